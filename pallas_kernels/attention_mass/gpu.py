"""Pallas for NVIDIA GPUs: two launches over the same keys; the second one reads them from the L2 cache if they fit.

In the first launch, a program per row and span of slots finds the largest logit and the denominator of every query, lane by
lane, and reduces across its threads once. In the second, a program per row and block of slots combines the spans in order and
sums the mass of its slots over the queries. The spans depend on shapes alone, so a row's bits depend on that row only. Keys
are the left operand of the products: one load serves all of the few queries.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.attention_mass import pallas
from pallas_kernels.launch import dot, launch, load, store

SPANS = 16  # per row at most, a power of two
MOST_QUERIES = 64  # per product
MOST_BLOCK = 128  # slots per product
HEAD_SIZES = (16, 32, 64, 128, 256)
MOST_FLOAT32 = 128  # channels; with 256, threads spill up to 13 KiB, and the kernel compiles for most of a minute
LEAST = -1e30  # masked logit; with -inf, the difference of two would be NaN


def why_not(
    query: Any, key: Any, is_candidate: Any, is_query: Any, age: Any, log_weight: Any, sink: Any = None, over_group: str = "max"
) -> str | None:
    """Why the kernel cannot take these arguments; None when it can."""
    if reason := pallas.why_not(query, key):
        return reason
    if key.shape[2] not in HEAD_SIZES:
        return f"the head size must be a power of two from {HEAD_SIZES[0]} to {HEAD_SIZES[-1]}; got {key.shape[2]}"
    if key.shape[2] > MOST_FLOAT32 and key.dtype == jnp.float32:
        return f"the head size must be at most {MOST_FLOAT32} in float32; got {key.shape[2]}"
    if key.size >= 2**31:
        return f"offsets are 32 bits wide, so keys must be fewer than 2**31 numbers; got {key.size}"
    return None


@functools.partial(jax.jit, static_argnames=("over_group", "interpret"))
def attention_mass(
    query: Float[Array, "R G W H"],
    key: Float[Array, "R S H"],
    is_candidate: Bool[Array, "R S"],
    is_query: Bool[Array, "R W"],
    age: Int[Array, "R S"] | None,
    log_weight: Float[Array, "R S"] | None,
    sink: Float[Array, "R G"] | None = None,
    *,
    over_group: str,
    interpret: Any = False,
) -> Float[Array, "R S"]:
    """See `pallas_kernels.attention_mass`."""
    terms = pallas.terms(query, is_candidate, is_query, log_weight, sink, over_group)
    query_RDVH, bias_RS, share_RV, after_V, sink_RV = terms
    num_rows, num_slots = bias_RS.shape
    most_queries = MOST_QUERIES // 2 if key.dtype == jnp.float32 else MOST_QUERIES
    window = min(most_queries, max(16, pl.next_power_of_2(query_RDVH.shape[2])))  # queries per product
    padding = -query_RDVH.shape[2] % window
    windows = (query_RDVH.shape[2] + padding) // window
    query_RDVH = jnp.pad(query_RDVH, [(0, 0), (0, 0), (0, padding), (0, 0)])
    share_RV, after_V = jnp.pad(share_RV, [(0, 0), (0, padding)]), jnp.pad(after_V, [(0, padding)])
    is_small = window == MOST_QUERIES or key.dtype == jnp.float32 or key.shape[2] > 128
    block = MOST_BLOCK // 2 if is_small else MOST_BLOCK
    blocks = -(-num_slots // block)
    spans = min(SPANS, pl.next_power_of_2(blocks))
    slot = jnp.arange(1, num_slots + 1, dtype=jnp.int32)
    extent = jnp.where(bias_RS > -jnp.inf, slot, 0).max(axis=1)
    ages = [] if age is None else [age.astype(jnp.int32), after_V]
    inputs = (extent, query_RDVH, key, bias_RS, *ages)
    settings = {"num_warps": 4, "num_stages": 2, "interpret": interpret}
    statistic = jax.ShapeDtypeStruct((num_rows, spans, windows * window), jnp.float32)
    peak, total = launch(
        functools.partial(measure, window, block, -(-blocks // spans)),
        *inputs,
        name="attention_mass_measure",
        grid=(num_rows, spans, windows),
        out_shape=(statistic, statistic),
        **settings,
    )
    if sink_RV is not None:  # one more term of the first span's denominators
        sink_RV = jnp.pad(sink_RV, [(0, 0), (0, padding)])
        raised_RV = jnp.maximum(peak[:, 0], sink_RV)
        more_RV = total[:, 0] * jnp.exp(peak[:, 0] - raised_RV) + jnp.exp(sink_RV - raised_RV)
        peak, total = peak.at[:, 0].set(raised_RV), total.at[:, 0].set(more_RV)
    return launch(
        functools.partial(collect, window, block, windows),
        *inputs,
        share_RV,
        peak,
        total,
        name="attention_mass_collect",
        grid=(num_rows, blocks),
        out_shape=jax.ShapeDtypeStruct((num_rows, num_slots), jnp.float32),
        **settings,
    )


def logits_of(key_SH: Any, query_ref: Any, bias_ref: Any, ages: Any, row: Any, slot_S: Any, query_V: Any) -> tuple[Any, Any]:
    """Logits of some queries for a block of slots, and whether each query sees each slot; masked logits may be anything."""
    num_slots, head_size = bias_ref.shape[1], key_SH.shape[1]
    offset_H = jnp.arange(head_size, dtype=jnp.int32)
    precision = lax.Precision.HIGHEST if key_SH.dtype == jnp.float32 else None

    def of_head(head: Any) -> Any:
        return dot(key_SH, load(query_ref.at[row, head, query_V[:, None], offset_H[None]]), trans_b=True, precision=precision)

    def raise_by(head: Any, logits_SV: Any) -> Any:
        return jnp.maximum(logits_SV, of_head(head))

    heads = query_ref.shape[1]
    lowest_SV = jnp.full((key_SH.shape[0], query_V.shape[0]), -jnp.inf, jnp.float32)
    logits_SV = of_head(0) if heads == 1 else lax.fori_loop(0, heads, raise_by, lowest_SV)
    is_slot_S = slot_S < num_slots
    bias_S = load(bias_ref.at[row, slot_S], mask=is_slot_S, other=-jnp.inf)
    is_seen_SV = jnp.broadcast_to((bias_S > -jnp.inf)[:, None], logits_SV.shape)
    if ages:
        age_ref, after_ref = ages
        age_S = load(age_ref.at[row, slot_S], mask=is_slot_S, other=0)
        is_seen_SV &= age_S[:, None] >= load(after_ref.at[query_V])[None]
    return logits_SV * head_size**-0.5 + bias_S[:, None], is_seen_SV


def load_keys(key_ref: Any, row: Any, slot_S: Any, extent: Any) -> Any:
    """Keys of a row's slots; those beyond the last candidate are 0 and not fetched."""
    offset_H = jnp.arange(key_ref.shape[2], dtype=jnp.int32)
    return load(key_ref.at[row, slot_S[:, None], offset_H[None]], mask=(slot_S < extent)[:, None], other=0)


def measure(window: int, block: int, blocks: int, extent_ref: Any, query_ref: Any, key_ref: Any, *refs: Any) -> None:
    """Finds the largest logit and the denominator of some queries over one span of a row's slots."""
    bias_ref, *ages, peak_ref, total_ref = refs
    (row, span, part), lanes = (pl.program_id(axis) for axis in range(3)), jnp.arange(block, dtype=jnp.int32)
    query_V = part * window + jnp.arange(window, dtype=jnp.int32)
    extent, begin = load(extent_ref.at[row]), span * (blocks * block)

    def look(index: Any, carry: tuple[Any, Any]) -> tuple[Any, Any]:
        peak_SV, total_SV = carry
        slot_S = begin + index * block + lanes
        key_SH = load_keys(key_ref, row, slot_S, extent)
        logits_SV, is_seen_SV = logits_of(key_SH, query_ref, bias_ref, ages, row, slot_S, query_V)
        logits_SV = jnp.where(is_seen_SV, logits_SV, LEAST)
        apart_SV = logits_SV - peak_SV
        shrunk_SV = jnp.exp(-jnp.abs(apart_SV))
        higher_SV, as_high_SV = total_SV * shrunk_SV + 1.0, total_SV + jnp.where(is_seen_SV, shrunk_SV, 0.0)
        return jnp.maximum(peak_SV, logits_SV), jnp.where(apart_SV > 0, higher_SV, as_high_SV)

    start = jnp.full((block, window), LEAST, jnp.float32), jnp.zeros((block, window), jnp.float32)
    trips = jnp.clip(lax.div(extent - begin + block - 1, block), 0, blocks)
    peak_SV, total_SV = lax.fori_loop(0, trips, look, start)
    peak_V = peak_SV.max(axis=0)
    store(peak_ref.at[row, span, query_V], peak_V)
    store(total_ref.at[row, span, query_V], (total_SV * jnp.exp(peak_SV - peak_V[None])).sum(axis=0))


def collect(window: int, block: int, windows: int, extent_ref: Any, query_ref: Any, key_ref: Any, *refs: Any) -> None:
    """Computes the mass of a block of one row's slots."""
    bias_ref, *ages, share_ref, peak_ref, total_ref, mass_ref = refs
    row, index = pl.program_id(0), pl.program_id(1)
    slot_S, extent = index * block + jnp.arange(block, dtype=jnp.int32), load(extent_ref.at[row])
    key_SH = load_keys(key_ref, row, slot_S, extent)
    span_J = jnp.arange(peak_ref.shape[1], dtype=jnp.int32)

    def add(part: Any, mass_S: Any) -> Any:
        query_V = part * window + jnp.arange(window, dtype=jnp.int32)
        peak_JV = load(peak_ref.at[row, span_J[:, None], query_V[None]])
        total_JV = load(total_ref.at[row, span_J[:, None], query_V[None]])
        peak_V = peak_JV.max(axis=0)
        total_V = (total_JV * jnp.exp(peak_JV - peak_V[None])).sum(axis=0)
        scale_V = load(share_ref.at[row, query_V]) / jnp.where(total_V == 0, 1.0, total_V)
        logits_SV, is_seen_SV = logits_of(key_SH, query_ref, bias_ref, ages, row, slot_S, query_V)
        probability_SV = jnp.where(is_seen_SV, jnp.exp(logits_SV - peak_V[None]) * scale_V[None], 0.0)
        return mass_S + probability_SV.sum(axis=1)

    trips = jnp.where(index * block < extent, jnp.int32(windows), jnp.int32(0))
    mass_S = lax.fori_loop(0, trips, add, jnp.zeros((block,), jnp.float32))
    store(mass_ref.at[row, slot_S], mass_S, mask=slot_S < mass_ref.shape[1])
