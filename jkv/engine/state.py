"""What stays on the device between programs, and how it begins."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jkv.cache import pool as pages
from jkv.cache import sealed_pages, states, windows
from jkv.cache.attention import Cache
from jkv.cache.gating import GATE
from jkv.cache.pool import BlockTable
from jkv.cache.row_storage import RowContent
from jkv.eviction import Needs
from jkv.model.params import ModelConfig
from pallas_kernels.quantised import Format
from pallas_kernels.sealed import SealedFormat

SIZES = "num_rows", "num_pages", "max_pages", "page_size", "dtype", "poison", "kv_format", "places"


class State(NamedTuple):
    """All that stays on the device between programs, except weights and settings; donated to each program."""

    cache: Cache
    logits: Float[Array, "B V"]  # of each row's next token


class Snapshot(NamedTuple):
    """One row outside the batch: its block table, and the rest that its next step needs."""

    block_table: BlockTable
    logits: Float[Array, " V"]
    query_ring: Float[Array, "L W N H"] | None
    beside: RowContent = RowContent()  # what it has outside of the pool


@functools.partial(jax.jit, static_argnums=(0, 1), static_argnames=SIZES)  # one program in place of one for each array
def empty_state(
    config: ModelConfig,
    needs: Needs,
    *,
    num_rows: int,
    num_pages: int,
    max_pages: int,
    page_size: int,
    dtype: Any = jnp.float32,
    poison: bool = False,
    kv_format: Format | None = None,
    places: int = 1,
) -> State:
    """The state of an idle engine: an empty pool (`pool.create`), last queries, windows, recurrent states, logits.

    `places` are the tokens that a step may append to a row: see `jkv.cache.query_ring`.
    """
    pool = pages.create(
        num_layers=config.num_paged_layers,
        num_rows=num_rows,
        num_kv_heads=config.num_kv_heads,
        head_size=config.head_size,
        num_pages=num_pages,
        max_pages=max_pages,
        page_size=page_size,
        dtype=dtype,
        slot_data=("mass",) * needs.mass
        + tuple(needs.carried_slots.values())
        + (GATE,) * needs.gate
        + (pages.LOG_WEIGHT,) * needs.sharing,
        has_vacant_slots=needs.mass,
        has_bounds=needs.bounds,
        poison=poison,
        kv_format=kv_format,
    )
    window = needs.window + (places if places > 1 else 0)
    ring = (config.num_paged_layers, num_rows, window, config.num_query_heads, config.head_size)
    rings = tail = None
    if config.window_layers:
        rings = windows.create(
            num_layers=config.num_ring_layers,
            num_rows=num_rows,
            num_kv_heads=config.in_windows.num_kv_heads,
            head_size=config.in_windows.head_size,
            window=config.window,
            page_size=page_size,
            dtype=dtype,
            poison=poison,
            places=places,
        )
    if is_sealed := isinstance(kv_format, SealedFormat):
        tail = windows.create(
            num_layers=config.num_paged_layers,
            num_rows=num_rows,
            num_kv_heads=config.num_kv_heads,
            head_size=config.head_size,
            window=sealed_pages.num_float_pages(places) * page_size,
            page_size=page_size,
            dtype=dtype,
            poison=poison,
        )
    recurrent = None
    if config.delta_net is not None:
        num_layers = len(config.state_layers)
        recurrent = states.create(config.delta_net, num_layers=num_layers, num_rows=num_rows, dtype=dtype, poison=poison)
    queries = jnp.zeros(ring, dtype) if needs.window and not is_sealed else None
    cache = Cache(pool, queries, windows=rings, states=recurrent, tail=tail)
    return State(cache, jnp.zeros((num_rows, config.vocab_size), jnp.float32))
