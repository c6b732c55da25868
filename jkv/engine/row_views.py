"""What a compaction's score sees of rows."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from jkv.cache import pool as pages
from jkv.cache.attention import Cache
from jkv.cache.gating import GATE
from jkv.cache.query_ring import last_queries
from jkv.engine.model_facts import ModelFacts, projected_norms
from jkv.eviction.evict import Evict
from jkv.eviction.query_statistics import QueryMoments
from jkv.eviction.view import CacheView
from jkv.model.copies import gather_copies, mean_over_copies


def view_of_rows(
    cache: Cache,
    row: Int[Array, " R"],
    evict: Evict,
    budget: Int[Array, "L R"],
    prompt_length: Int[Array, " R"],
    first_head: int | Int[Array, ""] | None = None,
    facts: ModelFacts | None = None,
) -> CacheView:
    """The view that a score gets of some rows, in all layers at once: batch row `l * R + r` is row r in layer l."""
    pool, num_layers = cache.pool, cache.pool.page_table.shape[0]
    layer = jnp.repeat(jnp.arange(num_layers, dtype=jnp.int32), len(row))
    row = jnp.tile(row, num_layers)
    key, value, position = pages.gather(pool, layer, row)
    query = None
    if cache.query_ring is not None and evict.needs.window:
        query = last_queries(cache.query_ring, layer, row, pool.logical_length[row], evict.needs.window)
        query = gather_copies(query, axis=1)
    rope = calibration = projected = sink = None
    if facts is not None:
        rope, calibration = jax.tree.map(lambda x: x[layer], (facts.rope, facts.calibration))
        if isinstance(calibration, QueryMoments):
            calibration = QueryMoments(*(gather_copies(x, axis=1) for x in calibration))
        sink = None if facts.sink is None else gather_copies(jnp.stack(facts.sink).astype(jnp.float32)[layer], axis=1)
        if facts.out is not None:
            by_layer = value.reshape(num_layers, -1, *value.shape[1:])
            projected = mean_over_copies(projected_norms(by_layer, facts.out).reshape(position.shape))
    return CacheView(
        key,
        value,
        position,
        query,
        mass=pool.slot_data["mass"][layer, row] if evict.needs.mass else None,
        carried=pool.slot_data["carried"][layer, row] if evict.needs.carried else None,
        layer=layer,
        budget=jnp.broadcast_to(budget.reshape(-1, 1), position.shape[:2]),
        prompt_length=jnp.tile(prompt_length, num_layers),
        log_weight=pool.slot_data[pages.LOG_WEIGHT][layer, row] if pages.LOG_WEIGHT in pool.slot_data else None,
        first_head=first_head,
        rope=rope,
        projected_norm=projected,
        calibration=calibration,
        gate=pool.slot_data[GATE][layer, row] if evict.needs.gate else None,
        sink=sink,
    )
