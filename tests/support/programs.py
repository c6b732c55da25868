"""The device programs, traced with shapes only, so that any target can compile them. Nothing is allocated or run."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import jkv
from jkv.cache import pool
from jkv.cache.gating import GATE
from jkv.cache.in_step_eviction import StepRules
from jkv.cache.page_selection import ReadRules
from jkv.cache.pool import LOG_WEIGHT
from jkv.engine import programs as device
from jkv.engine import row_moves, scheduler, sharer
from jkv.engine.chunk_inputs import LARGE
from jkv.engine.drafters import Ngram
from jkv.engine.parts.alignment import Alignment
from jkv.engine.parts.base import Carried
from jkv.engine.parts.drafting import Drafting
from jkv.engine.parts.gating import Gating
from jkv.engine.parts.penalties import Penalties
from jkv.engine.parts.returned import Experts, HiddenStates
from jkv.engine.parts.steering import Steering
from jkv.engine.parts.table import Parts
from jkv.engine.programs import ChunkInputs
from jkv.engine.state import Snapshot, State, empty_state
from jkv.eviction import Evict, Needs
from jkv.eviction.gate import KVzapLinearGate
from jkv.model.joined import join_weights, separate_weights
from jkv.model.params import ModelConfig, Params
from jkv.model.sampling import PenaltyRows, SamplingRows
from jkv.model.weight_shapes import weight_shapes
from jkv.policies.learned_gate import GateValue
from jkv.reasoning.sentences import SentenceMap
from pallas_kernels.quantised import FORMATS, vector_bytes
from pallas_kernels.sealed import SEALED

DEEP = 28  # layers of the pool, even if fewer layers of the model are compiled
NUM_ROWS = 32
NUM_POSITIONS = 32_768  # positions of the sentence map of a compaction
BUDGET, INTERVAL = 1024, 128  # of R-KV
EVICTS = {
    "r_kv": jkv.r_kv(BUDGET, INTERVAL).evict,
    "streaming_llm": jkv.streaming_llm(BUDGET).evict,
    "random": jkv.random(BUDGET, INTERVAL).evict,
    "h2o": jkv.h2o(BUDGET, interval=INTERVAL).evict,
    "skip_kv": jkv.skip_kv(BUDGET, interval=INTERVAL).evict,
    "gate": Evict(GateValue()),
}

NOTHING, QUERIES, MASS, BOUNDS = Needs(), Needs(window=8), Needs(mass=True), Needs(bounds=True)
GATED = Needs(gate=True)
SHARING = Needs(window=8, sharing=True, aligning=True)

# The widths of DeepSeek-R1-Distill-Qwen-1.5B.
R1_QWEN = ModelConfig(
    family="qwen2",
    vocab_size=151_936,
    width=1536,
    num_layers=DEEP,
    num_query_heads=12,
    num_kv_heads=2,
    head_size=128,
    mlp_width=8960,
    max_positions=131_072,
    qkv_bias=True,
)

# The widths of DeepSeek-R1-Distill-Llama-8B.
R1_LLAMA = ModelConfig(
    family="llama",
    vocab_size=128_256,
    width=4096,
    num_layers=32,
    num_query_heads=32,
    num_kv_heads=8,
    head_size=128,
    mlp_width=14_336,
    max_positions=131_072,
)


class Shapes(NamedTuple):
    """The arguments of the programs; every leaf is a `jax.ShapeDtypeStruct` on one device of the target."""

    params: Params
    state: State
    leaf: Callable[..., jax.ShapeDtypeStruct]  # (*sizes, dtype=int32)


def shapes_of(
    config: ModelConfig,
    *,
    dtype: Any,
    page_size: int,
    sharding: Any,
    needs: Needs = NOTHING,
    layout: Callable[[Params], Params] | None = None,
    num_rows: int = NUM_ROWS,
    slots: int = BUDGET + INTERVAL,
    pool_gb: float | None = None,
    kv_dtype: str | None = None,
    places: int = 1,
) -> Shapes:
    """A full engine, with 32 rows of the slots of R-KV's budget and interval in 28 layers by default.

    Weights are in a `layout`, by default that in which `jkv.load` keeps them on this platform.
    `pool_gb` is the size of the keys and values where it is not that of all rows' slots.
    """

    def leaf(*sizes: int, dtype: Any = jnp.int32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(sizes, dtype, sharding=sharding)

    max_pages = pool.num_pages_of(slots, page_size)
    num_pages = DEEP * num_rows * config.num_kv_heads * max_pages
    if pool_gb is not None:
        num_pages = int(pool_gb * 1e9) // (2 * page_size * vector_bytes(config.head_size, dtype, FORMATS.get(kv_dtype)))
    kv_format = FORMATS.get(kv_dtype)
    if kv_dtype in SEALED:
        kv_format = dataclasses.replace(SEALED[kv_dtype], page=page_size)
    sizes = {"num_rows": num_rows, "num_pages": num_pages, "max_pages": max_pages, "page_size": page_size, "places": places}
    state = jax.eval_shape(functools.partial(empty_state, config, needs, **sizes, dtype=dtype, kv_format=kv_format))
    if layout is None and {device.platform for device in sharding.device_set} == {"gpu"}:
        layout = join_weights
    weights = jax.eval_shape(layout or separate_weights, weight_shapes(config, dtype))
    params, state = jax.tree.map(lambda x: leaf(*x.shape, dtype=x.dtype), (weights, state))
    return Shapes(params, state, leaf)


def decode(
    shapes: Shapes,
    moves_sinks: bool = False,
    steers: bool = False,
    returns_hidden: bool = False,
    draws: str = "sampled",
    penalises: bool = False,
    returns_experts: bool = False,
    drafter: Ngram | None = None,
) -> Any:
    """A chunk of decode steps."""
    leaf, rows = shapes.leaf, shapes.state.logits.shape[0]
    wide = leaf(rows, dtype=jnp.float32)
    settings, key = SamplingRows(wide, wide, leaf(rows), wide), leaf(rows, 2, dtype=jnp.uint32)
    parts, carried, counts = Parts(gate=gate_of(shapes)), Carried(), (rows, shapes.params.config.vocab_size)
    if penalises:
        settings = settings._replace(penalties=PenaltyRows(wide, wide, wide))
        parts, carried = parts._replace(penalties=Penalties(leaf(*counts, dtype=bool))), Carried(leaf(*counts))
    rules = None
    if shapes.state.cache.pool.vacant_slot is not None:
        flags = leaf(rows, dtype=bool)
        rules = StepRules(leaf(shapes.params.config.num_layers, rows), leaf(rows), leaf(rows), flags, flags)
    reads = None
    if shapes.state.cache.pool.bounds is not None:
        reads = ReadRules(leaf(rows), leaf(rows), leaf(rows, dtype=bool))
    sinks = leaf(rows) if moves_sinks else None
    if steers:
        config, flags = shapes.params.config, leaf(rows, dtype=bool)
        vector, is_break = leaf(rows, config.width, dtype=jnp.float32), leaf(config.vocab_size, dtype=bool)
        parts = parts._replace(steer=Steering(wide, leaf(rows), vector, flags, is_break, leaf(2)))
    if LOG_WEIGHT in shapes.state.cache.pool.slot_data:
        flags = leaf(rows, dtype=bool)
        ends = leaf(shapes.params.config.vocab_size, dtype=bool)
        parts = parts._replace(align=Alignment(flags, flags, leaf(rows), ends))
    if returns_hidden:
        parts = parts._replace(hidden=HiddenStates())
    if returns_experts:
        parts = parts._replace(experts=Experts())
    if drafter is not None:
        parts = parts._replace(draft=Drafting(leaf(rows, dtype=bool), leaf(rows)))
        carried = carried._replace(history=leaf(rows, drafter.history), credit=leaf(rows, dtype=jnp.float32))
    alive = leaf(rows, dtype=bool)  # as an engine that runs a chunk ahead passes it
    inputs = ChunkInputs(leaf(rows), leaf(rows, 1), settings, key, rules, reads, sinks, alive, parts)
    given = shapes.params, shapes.state, inputs, carried
    return device.decode_chunk.trace(*given, num_steps=scheduler.CHUNKS[0], draws=draws, drafter=drafter)


def prefill(shapes: Shapes, num_tokens: int = LARGE, returns_experts: bool = False) -> Any:
    """The largest chunk of a prompt."""
    token = shapes.leaf(1, num_tokens)
    parts = Parts(gate=gate_of(shapes), experts=Experts() if returns_experts else None)
    return device.prefill_chunk.trace(shapes.params, shapes.state, shapes.leaf(1), token, shapes.leaf(1), parts)


def gate_of(shapes: Shapes) -> Gating | None:
    """The gate of an engine that keeps its numbers."""
    if GATE not in shapes.state.cache.pool.slot_data:
        return None
    heads = shapes.params.config.num_layers, shapes.params.config.num_kv_heads
    sizes = (*heads, shapes.params.config.width), heads
    return Gating(KVzapLinearGate(*(shapes.leaf(*size, dtype=jnp.float32) for size in sizes)))


def compact(policy: str, shapes: Shapes) -> Any:
    """Compaction of a row."""
    config = shapes.params.config
    row, budget = shapes.leaf(1), shapes.leaf(config.num_layers, 1, config.num_kv_heads)
    protected, evict = shapes.leaf(2, 1), EVICTS[policy].static
    sentences = None
    if evict.needs.similarity:
        sentences = SentenceMap(shapes.leaf(1, NUM_POSITIONS), shapes.leaf(1, NUM_POSITIONS, dtype=jnp.float32))
    options = {"evict": evict, "is_traced": False, "sentences": sentences}
    return device.compact.trace(shapes.state, row, budget, row, protected, **options)


def take_pages(shapes: Shapes) -> Any:
    """Pages of any rows freed, and the weights of others changed."""
    entries = shapes.leaf(NUM_ROWS, shapes.state.cache.pool.page_table.shape[-1])
    log_weight = shapes.leaf(*entries.shape, dtype=jnp.float32)
    return device.take_pages.trace(shapes.state, shapes.leaf(NUM_ROWS), entries, log_weight)


def measure_pages(shapes: Shapes) -> Any:
    """Distances of the largest block of pairs, with rotated keys; it only reads the pool."""
    pairs = shapes.leaf(sharer.NUM_PAIRS)
    angle = shapes.leaf(*pairs.shape, shapes.params.config.head_size // 2, dtype=jnp.float32)
    return device.measure_pages.trace(shapes.state, pairs, pairs, pairs, pairs, angle)


def release(shapes: Shapes) -> Any:
    """Release of any rows."""
    return device.release.trace(shapes.state, shapes.leaf(NUM_ROWS))


def snapshot_of(shapes: Shapes) -> Snapshot:
    """The snapshot of a row."""
    snapshot = jax.eval_shape(device.snapshot_row, shapes.state, jax.ShapeDtypeStruct((), jnp.int32))
    return jax.tree.map(lambda x: shapes.leaf(*x.shape, dtype=x.dtype), snapshot)


def detach(shapes: Shapes) -> Any:
    """A row detached from the batch."""
    return device.detach.trace(shapes.state, shapes.leaf())


def fork(shapes: Shapes, owns_all: bool = False) -> Any:
    """A snapshot forked into any rows."""
    return device.fork.trace(shapes.state, snapshot_of(shapes), shapes.leaf(NUM_ROWS), owns_all)


def attach(shapes: Shapes) -> Any:
    """A row swapped in, before its pages are written."""
    snapshot = snapshot_of(shapes)
    is_own = shapes.leaf(*snapshot.block_table.page_table.shape, dtype=bool)
    return device.attach.trace(shapes.state, snapshot, shapes.leaf(), is_own)


def free(shapes: Shapes) -> Any:
    """The pages of a snapshot freed."""
    return device.free.trace(shapes.state, snapshot_of(shapes).block_table)


def hold_pages(shapes: Shapes) -> Any:
    """Pages of a row held for the prefix cache."""
    return device.hold_pages.trace(shapes.state, shapes.leaf(), shapes.leaf(4))


def piece_of(shapes: Shapes) -> Any:
    """The pages of a piece of the prefix cache."""
    layers, _, heads, _ = shapes.state.cache.pool.page_table.shape
    return shapes.leaf(layers, heads, 4)


def adopt_pages(shapes: Shapes) -> Any:
    """A row that starts from pages of the prefix cache."""
    return device.adopt_pages.trace(shapes.state, shapes.leaf(), piece_of(shapes))


def drop_pages(shapes: Shapes) -> Any:
    """Pages of the prefix cache dropped."""
    return device.drop_pages.trace(shapes.state, piece_of(shapes))


def write_pages(shapes: Shapes) -> Any:
    """A block of pages written from host memory."""
    kv, leaf = shapes.state.cache.pool.kv, shapes.leaf
    num_heads = shapes.params.config.num_kv_heads
    page = num_heads, row_moves.BLOCK // num_heads
    block = jax.tree.map(lambda x: leaf(*page, *x.shape[1:], dtype=x.dtype), kv)
    bounds = shapes.state.cache.pool.bounds
    bounds = None if bounds is None else leaf(*page, *bounds.shape[1:], dtype=bounds.dtype)
    content = pool.PageContent(block, leaf(*page, kv.shape[2]), bounds)
    return device.write_pages.trace(shapes.state, leaf(*page), content)


class Program(NamedTuple):
    """How to trace a program, and the needs of its engine."""

    trace: Callable[[Shapes], Any]
    needs: Needs = NOTHING


# An engine stores no queries for `full` and similar policies, which never compact.
PROGRAMS: dict[str, Program] = {
    "decode-full": Program(decode),
    "decode-r_kv": Program(decode, QUERIES),
    "decode-h2o": Program(decode, MASS),
    "decode-quest": Program(decode, BOUNDS),
    "decode-seal": Program(functools.partial(decode, steers=True)),
    "decode-moving-sinks": Program(functools.partial(decode, moves_sinks=True)),
    "compact-r_kv": Program(functools.partial(compact, "r_kv"), QUERIES),
    "decode-skip_kv": Program(functools.partial(decode, returns_hidden=True), QUERIES),
    "compact-skip_kv": Program(functools.partial(compact, "skip_kv"), QUERIES),
    "compact-streaming_llm": Program(functools.partial(compact, "streaming_llm")),
    "compact-random": Program(functools.partial(compact, "random")),
    "compact-h2o": Program(functools.partial(compact, "h2o"), MASS),
    "decode-gate": Program(decode, GATED),
    "compact-gate": Program(functools.partial(compact, "gate"), GATED),
    "prefill-gate": Program(prefill, GATED),
    "prefill": Program(prefill, QUERIES),
    "prefill-h2o": Program(prefill, MASS),
    "prefill-quest": Program(prefill, BOUNDS),
    "decode-share": Program(decode, SHARING),
    "compact-share": Program(functools.partial(compact, "r_kv"), SHARING),
    "take_pages": Program(take_pages, SHARING),
    "release": Program(release, QUERIES),
    "detach": Program(detach, QUERIES),
    "fork": Program(fork, QUERIES),
    "fork-h2o": Program(functools.partial(fork, owns_all=True), MASS),
    "fork-quest": Program(fork, BOUNDS),
    "attach": Program(attach, QUERIES),
    "free": Program(free, QUERIES),
    "hold_pages": Program(hold_pages, QUERIES),
    "adopt_pages": Program(adopt_pages, QUERIES),
    "drop_pages": Program(drop_pages, QUERIES),
    "write_pages": Program(write_pages, QUERIES),
    "write_pages-quest": Program(write_pages, BOUNDS),
}


def undonated_release(shapes: Shapes) -> Any:
    """A planted bug: the pool is not donated."""
    return jax.jit(pool.release).trace(shapes.state.cache.pool, shapes.leaf(NUM_ROWS))


def sliced_keys(shapes: Shapes) -> Any:
    """A planted bug: the keys of all pages are sliced out of the pool before a loop reads some of them."""

    @functools.partial(jax.jit, donate_argnums=0)
    def read(pages: Any, page: Any) -> Any:
        key = pages.kv[:, 0]
        return pages, jax.lax.scan(lambda _, p: (None, key[p]), None, page)[1]

    return read.trace(shapes.state.cache.pool, shapes.leaf(NUM_ROWS))


def sliced_index_append(shapes: Shapes) -> Any:
    """A planted bug: steps write with a slice among the indices, for which XLA transposes the pool on a TPU."""

    @functools.partial(jax.jit, donate_argnums=0)
    def write(pages: Any, page: Any, offset: Any, kv: Any) -> Any:
        def step(pool_kv: Any, new: Any) -> Any:
            page, offset, kv = new
            return pool_kv.at[page, :, offset].set(kv), None

        return pages.replace(kv=jax.lax.scan(step, pages.kv, (page, offset, kv))[0])

    pages = shapes.state.cache.pool
    address = shapes.leaf(scheduler.CHUNKS[0], NUM_ROWS)
    kv = shapes.leaf(*address.shape, 2, pages.kv.shape[-1], dtype=pages.kv.dtype)
    return write.trace(pages, address, address, kv)


PLANTED = {"undonated": undonated_release, "sliced-keys": sliced_keys, "sliced-index-append": sliced_index_append}
