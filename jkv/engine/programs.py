"""The device programs that the engine dispatches, each of fixed shapes.

Other prompts, lengths, budgets or weights compile nothing. The pool is donated from each program to the next, and no program
copies it (`tests/engine/test_pool_copies.py`, `tests/aot`).
"""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt

import pallas_kernels as kernels
from jkv.cache import compaction, sealed_pages
from jkv.cache import pool as pages
from jkv.cache.attention import PrefillAttention
from jkv.cache.pool import EMPTY, BlockTable, PageContent
from jkv.cache.row_storage import prefill_groups, read_row, write_rows
from jkv.engine import chunk, speculation
from jkv.engine.chunk import ChunkInputs, ChunkOutputs
from jkv.engine.device_program import device_program
from jkv.engine.drafters import Drafter
from jkv.engine.parts.base import Carried, Step
from jkv.engine.parts.table import Parts
from jkv.engine.row_views import ModelFacts, view_of_rows
from jkv.engine.state import Snapshot, State
from jkv.eviction.evict import Cutoff, Evict, Limits
from jkv.model import decoder
from jkv.model.params import Params
from jkv.reasoning.sentences import SentenceMap, similarity_of_slots

DONATED = ("state", "carried")  # arguments whose memory a program uses again for the value that it returns


@device_program(static_argnames=("num_steps", "draws", "is_traced", "drafter"), donate_argnames=DONATED)
def decode_chunk(
    params: Params,
    state: State,
    inputs: ChunkInputs,
    carried: Carried,
    num_steps: int,
    draws: str,
    is_traced: bool = False,
    drafter: Drafter | None = None,
) -> tuple[State, ChunkOutputs, Carried]:
    """`num_steps` tokens of all rows, in as many decode steps, or in fewer with a drafter. No device waits for the host.

    `carried` is what optional parts (`jkv.engine.parts`) keep on the device from chunk to chunk.
    """
    if drafter is not None:
        return speculation.decode_chunk(params, state, inputs, carried, num_steps, draws, is_traced, drafter)
    return chunk.decode_chunk(params, state, inputs, carried, num_steps, draws, is_traced)


@device_program(static_argnames="num_pages", donate_argnames="state")
def prefill_chunk(
    params: Params,
    state: State,
    row: Int[Array, " 1"],
    token: Int[Array, "1 T"],
    num_new: Int[Array, " 1"],
    parts: Parts = Parts(),  # noqa: B008
    num_pages: int | None = None,
) -> tuple[State, Float[Array, "1 T D"], Int[Array, ""], UInt[Array, "T L A"] | None]:
    """Appends the first `num_new` of T prompt tokens to a row, and sets its logits.

    Reads the row's first `num_pages` pages, which must hold the new tokens too; None are all that it can have.
    Also returns the hidden states and the number of pages in use, which the host need not wait for, and if asked the experts
    that each token went through, by layer with experts. `parts` holds the parts that see prompts.
    """
    new = Step(params, state.cache, row, token, num_new, num_new > 0)
    for part in parts.on.values():
        new, _ = part.take(new, part.begin(Carried()))
    cache = new.cache
    position = cache.pool.logical_length[row][:, None] + jnp.arange(token.shape[1], dtype=jnp.int32)
    pool, address = pages.reserve(cache.pool, row, num_new, token.shape[1])
    of_piece = address, row, position, num_new, num_pages
    attend: decoder.Attend = PrefillAttention(*of_piece) if cache.tail is None else sealed_pages.SealedPrefill(*of_piece)
    attend = prefill_groups(params.config, attend, cache, row, position, num_new)
    cache = cache._replace(pool=pool)
    hidden, cache = decoder.forward(new.params, token, position, attend, cache, new.enter, new.observe, new.choose)
    experts = None if cache.experts is None else cache.experts[0]
    cache = cache.after_pass(pages.advance(cache.pool, row, num_new))
    logits = decoder.unembed(new.params, hidden[:, num_new[0] - 1])
    return State(cache, state.logits.at[row].set(logits)), hidden, pages.held_pages(cache.pool), experts


@device_program(static_argnames=("evict", "is_traced"), donate_argnames="state")
def compact(
    state: State,
    row: Int[Array, " R"],
    budget: Int[Array, "L R K"],
    prompt_length: Int[Array, " R"],
    protected: Int[Array, "2 R"],
    evict: Evict,
    is_traced: bool,
    sentences: SentenceMap | None = None,
    first_head: int | Int[Array, ""] | None = None,
    facts: ModelFacts | None = None,
    cutoff: Cutoff | None = None,
    is_alive: Bool[Array, " B"] | None = None,
) -> tuple[State, Int[Array, "L R K S"] | None, Bool[Array, "R T"] | None, Int[Array, "R 3"]]:
    """Compacts rows to their budgets. When traced, also returns the dropped positions (EMPTY where a slot stays).

    With sentences, also returns which positions are left in any layer and head. Last, the kinds of each row's scores
    (`Evict.kinds`), zeros where it is not alive.

    The engine passes one row at a time: for another number of rows XLA may round differently, and which of two nearly equal
    slots stays would depend on the batch. Temporaries are the row's keys, and values if a score reads them, in all layers.

    `protected` holds each row's number of sinks and of recent tokens; `evict` is an `Evict.static`; `first_head` is the index
    of the pool's first KV head if a mesh splits the heads; `facts` are what the score reads of the model; slots below the
    row's `cutoff` are dropped whatever its budget; rows that are not `is_alive` have ended, and stay as they are.
    """
    cache = state.cache
    pool = cache.pool
    view = view_of_rows(cache, row, evict, budget, prompt_length, first_head, facts)
    if sentences is not None:
        view = view._replace(similarity=similarity_of_slots(sentences, view.position))
    num_layers = pool.page_table.shape[0]
    limits = Limits(jnp.tile(protected[0], num_layers), jnp.tile(protected[1], num_layers))
    by_layer = num_layers, len(row)
    score, carried = evict.rate_and_carry(view, limits)
    kinds = evict.kinds(score, view, limits).reshape(*by_layer, 3).sum(axis=0)
    if cutoff is not None:
        score = Cutoff(*(jnp.tile(x, num_layers) for x in cutoff))(score, view.age)
    score, position = (x.reshape(*by_layer, *x.shape[1:]) for x in (score, view.position))
    slots = evict.choose(score, budget, first_head)
    numbers = {place: carried[name].reshape(position.shape) for name, place in evict.needs.carried_slots.items()}
    if is_alive is not None:
        goes_on, slot = is_alive[row][:, None, None], jnp.arange(slots.shape[-1], dtype=jnp.int32)
        slots = jnp.where(goes_on, slots, jnp.where(slot < pool.length[:, row][..., None], slot, EMPTY))
        numbers = {place: jnp.where(goes_on, new, pool.slot_data[place][:, row]) for place, new in numbers.items()}
        kinds = jnp.where(is_alive[row][:, None], kinds, 0)
    numbers = {place: pool.slot_data[place].at[:, row].set(new) for place, new in numbers.items()}
    pool = pool.replace(slot_data=pool.slot_data | numbers)
    keep = compaction.take_slots if cache.tail is None else compaction.take_whole_pages
    state = state._replace(cache=cache._replace(pool=keep(pool, row, slots)))
    dropped = compaction.dropped_positions(position, slots) if is_traced else None
    num_positions = None if sentences is None else sentences.sentence.shape[1]
    is_left = None if num_positions is None else compaction.positions_left(position, slots, num_positions)
    return state, dropped, is_left, kinds


@device_program()
def filled_slots(state: State, row: Int[Array, ""]) -> Int[Array, "L K"]:
    """The filled slots of a row in each layer and KV head."""
    return state.cache.pool.length[:, row]


@device_program(static_argnames="unrotated")
def measure_pages(
    state: State,
    row: Int[Array, " I"],
    first: Int[Array, " I"],
    second: Int[Array, " I"],
    num_tokens: Int[Array, " I"],
    angle: Float[Array, "I half"] | None,
    unrotated: tuple[int, ...] = (),
) -> Float[Array, "I L 2 3"]:
    """Distances between the pages at two entries of each row's table (`pallas_kernels.block_distance`).

    Keys are compared after a rotation by `angle`, but as they are in the layers `unrotated`, which have no RoPE.
    """
    pool = state.cache.pool
    first_page, second_page = (pool.page_table[:, row, :, entry] for entry in (first, second))  # [I, L, K]
    distance = kernels.block_distance(pool.kv, first_page, second_page, num_tokens, angle)
    if angle is None or not unrotated:
        return distance
    pages_of = (first_page[:, unrotated], second_page[:, unrotated])
    return distance.at[:, unrotated].set(kernels.block_distance(pool.kv, *pages_of, num_tokens, None))


@device_program(donate_argnames="state")
def take_pages(state: State, row: Int[Array, " B"], entries: Int[Array, "B MP"], log_weight: Float[Array, "B MP"]) -> State:
    """Keeps some entries of rows' page tables (`pool.take_pages`)."""
    pool = pages.take_pages(state.cache.pool, row, entries, log_weight)
    return state._replace(cache=state.cache._replace(pool=pool))


@device_program(donate_argnames="state")
def release(state: State, row: Int[Array, " B"]) -> State:
    """Frees rows."""
    return state._replace(cache=state.cache._replace(pool=pages.release(state.cache.pool, row)))


@device_program()
def snapshot_row(state: State, row: Int[Array, ""]) -> Snapshot:
    """A row's snapshot, which holds no page references."""
    pool, ring = state.cache.pool, state.cache.query_ring
    return Snapshot(
        pages.block_table_of(pool, row),
        state.logits[row],
        None if ring is None else ring[:, row],
        read_row(state.cache, row),
    )


@device_program(donate_argnames="state")
def detach(state: State, row: Int[Array, ""]) -> tuple[State, Snapshot]:
    """Detaches a row from the batch; its snapshot holds the page references until `free`."""
    snapshot = snapshot_row.function(state, row)
    pool, _ = pages.detach(state.cache.pool, row)
    return state._replace(cache=state.cache._replace(pool=pool)), snapshot


@device_program(static_argnames="owns_all", donate_argnames="state")
def fork(state: State, snapshot: Snapshot, target: Int[Array, " B"], owns_all: bool = False) -> State:
    """Starts empty rows `target` from a snapshot, whose full pages they share, or copy if `owns_all`."""
    return place(state, pages.fork(state.cache.pool, snapshot.block_table, target, owns_all), snapshot, target)


@device_program(donate_argnames="state")
def attach(state: State, snapshot: Snapshot, row: Int[Array, ""], is_own: Bool[Array, "L K MP"]) -> State:
    """Starts an empty row from a snapshot; entries marked by `is_own` get new pages, which `write_pages` then fills."""
    pool = pages.attach(state.cache.pool, snapshot.block_table, row[None], is_own)
    return place(state, pool, snapshot, row[None])


def place(state: State, pool: pages.Pool, snapshot: Snapshot, target: Int[Array, " R"]) -> State:
    """The state with another pool, and with a snapshot's logits and queries in rows `target`."""
    ring = state.cache.query_ring
    if ring is not None:
        assert snapshot.query_ring is not None
        ring = ring.at[:, target].set(snapshot.query_ring[:, None], mode="drop", unique_indices=True)
    cache = write_rows(state.cache._replace(pool=pool, query_ring=ring), target, snapshot.beside)
    return State(cache, state.logits.at[target].set(snapshot.logits, mode="drop"))


@device_program(donate_argnames="state")
def free(state: State, block_table: BlockTable) -> State:
    """Frees the pages of a detached row."""
    return state._replace(cache=state.cache._replace(pool=pages.free(state.cache.pool, block_table)))


@device_program(donate_argnames="state")
def hold_pages(state: State, row: Int[Array, ""], entry: Int[Array, " I"]) -> tuple[State, Int[Array, "L K I"]]:
    """Holds full pages of a row for the prefix cache."""
    pool, page = pages.hold(state.cache.pool, row, entry)
    return state._replace(cache=state.cache._replace(pool=pool)), page


@device_program(donate_argnames="state")
def adopt_pages(state: State, row: Int[Array, ""], page: Int[Array, "L K I"]) -> State:
    """Appends pages of the prefix cache to a row, before the rest of its prompt is prefilled."""
    return state._replace(cache=state.cache._replace(pool=pages.adopt(state.cache.pool, row, page)))


@device_program(donate_argnames="state")
def drop_pages(state: State, page: Int[Array, "L K I"]) -> State:
    """Drops pages of the prefix cache."""
    return state._replace(cache=state.cache._replace(pool=pages.drop(state.cache.pool, page)))


@device_program()
def read_pages(state: State, page: Int[Array, "K I"]) -> PageContent:
    """The content of pages of each KV head, to be swapped out."""
    return pages.read_pages(state.cache.pool, page)


@device_program(donate_argnames="state")
def write_pages(state: State, page: Int[Array, "K I"], content: PageContent) -> State:
    """Writes swapped-out pages back to the pool."""
    return state._replace(cache=state.cache._replace(pool=pages.write_pages(state.cache.pool, page, content)))
