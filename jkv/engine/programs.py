"""The device programs that the engine dispatches, each of fixed shapes.

Other prompts, lengths, budgets or weights compile nothing. The pool is donated from each program to the next, and no program
copies it (`tests/engine/test_pool_copies.py`, `tests/aot`).
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt, UInt32

import pallas_kernels as kernels
from jkv.cache import compaction, sealed_pages
from jkv.cache import pool as pages
from jkv.cache.attention import Cache, DecodeAttention, PrefillAttention
from jkv.cache.in_step_eviction import StepRules
from jkv.cache.moved_sinks import SinkRules
from jkv.cache.page_selection import ReadRules
from jkv.cache.pool import EMPTY, BlockTable, PageContent
from jkv.cache.query_ring import oldest_queries, put_back
from jkv.cache.row_storage import decode_groups, prefill_groups, read_row, write_rows
from jkv.engine.device_program import device_program
from jkv.engine.parts.base import Carried, Draw, Step
from jkv.engine.parts.table import Parts
from jkv.engine.row_views import ModelFacts, view_of_rows
from jkv.engine.state import Snapshot, State
from jkv.eviction.evict import Cutoff, Evict, Limits
from jkv.model import decoder, sampling
from jkv.model.params import Params
from jkv.model.rotary import rotary_angle, rotation
from jkv.model.sampling import SamplingRows
from jkv.reasoning.sentences import SentenceMap, similarity_of_slots

DONATED = ("state", "carried")  # arguments whose memory a program uses again for the value that it returns
TRACED = "dropped", "is_read", "steered"  # outputs of a chunk that are returned if samples are traced


class ChunkInputs(NamedTuple):
    """The host's inputs of a decode chunk, by row."""

    remaining: Int[Array, " B"]  # tokens until the row's limit; 0 for a row that is not running
    stop_ids: Int[Array, "B E"]  # padded with -1
    sampling: SamplingRows
    key: UInt32[Array, "B 2"]  # of each sample, before the position is folded in
    rules: StepRules | None = None  # None when the pool keeps no mass
    reads: ReadRules | None = None  # None when the pool keeps no bounds
    sinks: Int[Array, " B"] | None = None  # number of each row that moves them, 0 for others; None when no policy does
    is_alive: Bool[Array, " B"] | None = None  # rows that the last chunk left running; None where the host knows by `remaining`
    parts: Parts = Parts()


class ChunkOutputs(NamedTuple):
    """A chunk's tokens, for the host; steps of finished rows are not real."""

    token: Int[Array, "steps B"]
    log_prob: Float[Array, "steps B"]
    is_real: Bool[Array, "steps B"]
    held_pages: Int[Array, ""]
    is_running: Bool[Array, " B"]  # rows that are not finished
    dropped: Int[Array, "steps L B K"] | None = None  # positions that steps evicted, EMPTY for none; None unless traced
    is_read: Bool[Array, "steps L B K MP"] | None = None  # pages that steps read, by entry of their table; None unless traced
    steered: Float[Array, "steps B"] | None = None  # multiple of the steering vector added to each token; None unless traced
    hidden: Float[Array, "steps B D"] | None = None  # of each token, after the final norm; None unless sentences are compared
    log_prob_full: Float[Array, "steps B"] | None = None  # before penalties and cuts; None where equal to `log_prob`
    experts: UInt[Array, "steps B L A"] | None = None  # that each token went through, by layer with experts; None unless asked
    log_prob_own: Float[Array, "steps B"] | None = None  # of the model's own distribution; None unless asked, or where equal


@device_program(static_argnames=("num_steps", "draws", "is_traced"), donate_argnames=DONATED)
def decode_chunk(
    params: Params,
    state: State,
    inputs: ChunkInputs,
    carried: Carried,
    num_steps: int,
    draws: str,
    is_traced: bool = False,
) -> tuple[State, ChunkOutputs, Carried]:
    """`num_steps` decode steps of all rows; a static trip count, so that no device waits for the host.

    `carried` is what optional parts (`jkv.engine.parts`) keep on the device from chunk to chunk.
    """
    row = jnp.arange(inputs.remaining.shape[0], dtype=jnp.int32)
    parts, is_own = inputs.parts.on, draws == "greedy" and inputs.sampling.penalties is None

    def step(loop: tuple[Any, ...], _: None) -> tuple[tuple[Any, ...], dict[str, Array]]:
        (cache, logits), is_active, remaining, carries = loop
        position, carries = cache.pool.logical_length, dict(carries)
        draw = Draw(logits, own=logits)
        for name, part in parts.items():
            draw = part.draw(draw, carries[name])
        draw = draw._replace(is_own=is_own and draw.logits is logits)
        of_rows = inputs.sampling, inputs.key, position, draws, draw.forced, draw.counts
        token, log_prob, log_prob_full = sampling.draw(draw.logits, *of_rows)
        token = jnp.where(is_active, token, 0)
        is_stop = (token[:, None] == inputs.stop_ids).any(axis=-1)
        is_stop = is_stop if draw.forced is None else is_stop & (draw.forced < 0)
        is_last = is_stop | (remaining <= 1) | ~jnp.isfinite(log_prob)
        goes_on, num_new = is_active & ~is_last, is_active.astype(jnp.int32)
        new = Step(params, cache, row, token[:, None], num_new, is_active)
        for name, part in parts.items():
            new, carries[name] = part.take(new, carries[name])
        cache, attend = attention_of(inputs, new, position, goes_on)
        given = params, new.token, position[:, None], attend, cache, new.enter, new.observe, new.choose
        hidden, cache = decoder.forward(*given, rotates=False)
        pool, dropped = pages.advance(cache.pool, row, num_new), None
        if cache.victim is not None:
            pool, dropped = pages.vacate(pool, cache.victim)
        out = {"token": token, "log_prob": log_prob, "is_real": is_active, "log_prob_full": log_prob_full}
        out |= {"dropped": dropped, "is_read": cache.is_read}
        for name, part in parts.items():
            out |= part.report(new, draw, hidden, cache, carries[name])
        state = State(cache.after_pass(pool), decoder.unembed(params, hidden[:, 0]))
        out = {name: x for name, x in out.items() if x is not None and (is_traced or name not in TRACED)}
        return (state, goes_on, remaining - 1, carries), out

    is_active = inputs.remaining > 0 if inputs.is_alive is None else (inputs.remaining > 0) & inputs.is_alive
    ring, num_seen, oldest = state.cache.query_ring, state.cache.pool.logical_length, None
    if ring is not None and inputs.is_alive is not None:
        # Rows that ended in the last chunk stay as they are, because they may be kept: the queries that this chunk overwrites
        # are saved, and restored at its end. They are read before the steps begin, or XLA would copy the ring.
        oldest, ring = jax.lax.optimization_barrier((oldest_queries(ring, num_seen), ring))
        state = state._replace(cache=state.cache._replace(query_ring=ring))
    start = state, is_active, inputs.remaining, {name: part.begin(carried) for name, part in parts.items()}
    (state, is_running, _, carries), out = jax.lax.scan(step, start, length=num_steps)
    if state.cache.tail is not None:
        state = state._replace(cache=state.cache._replace(pool=sealed_pages.seal_filled(state.cache, num_seen)))
    ring = state.cache.query_ring
    if ring is not None and oldest is not None:
        ring = put_back(ring, oldest, num_seen, ~is_active)
        state = state._replace(cache=state.cache._replace(query_ring=ring))
    outputs = ChunkOutputs(held_pages=pages.held_pages(state.cache.pool), is_running=is_running, **out)
    ends: dict[str, Array] = {}
    for name, part in parts.items():
        ends |= part.end(carries[name])
    return state, outputs, Carried(**ends)


def attention_of(
    inputs: ChunkInputs, new: Step, position: Int[Array, " B"], goes_on: Bool[Array, " B"]
) -> tuple[Cache, decoder.Attend]:
    """Reserves a slot for each new token; returns the cache, and the attention of the decoder's layers."""
    cache, config = new.cache, new.params.config
    pool, address = pages.reserve(cache.pool, new.row, new.num_new, 1)
    length = pool.length + pages.num_growing(pool, new.row, new.num_new)
    sinks = None
    if inputs.sinks is not None:  # lengths of rows that move their sinks are the same in every layer and head
        angle = rotary_angle(config, (length[0, :, 0] - 1 - position)[:, None])
        sinks = SinkRules(inputs.sinks, jnp.cos(angle), jnp.sin(angle))
    turn, unrotated = rotation(config, position), config.unrotated
    attend: decoder.Attend = DecodeAttention(
        address, length, position, *turn, inputs.rules, inputs.reads, sinks, goes_on, unrotated, new.params.axis
    )
    if cache.tail is not None:
        attend = sealed_pages.SealedDecode(address, length, position, new.is_active, *turn, inputs.reads, unrotated)
    cache = cache._replace(
        pool=pool,
        victim=None if inputs.rules is None else jnp.full_like(length, EMPTY),
        is_read=None if inputs.reads is None else jnp.zeros(pool.page_table.shape, bool),
    )
    return cache, decode_groups(config, attend, cache, position, new.is_active)


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
    hidden, cache = decoder.forward(params, token, position, attend, cache, new.enter, new.observe, new.choose)
    experts = None if cache.experts is None else cache.experts[0]
    cache = cache.after_pass(pages.advance(cache.pool, row, num_new))
    logits = decoder.unembed(params, hidden[:, num_new[0] - 1])
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
