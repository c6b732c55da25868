"""What a compaction's score sees of rows, and of the model where it asks for more (`jkv.eviction.needs`)."""

import functools
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jkv.cache import pool as pages
from jkv.cache.attention import Cache
from jkv.cache.gating import GATE
from jkv.cache.query_ring import last_queries
from jkv.eviction import Policy
from jkv.eviction.calibration import Calibration, QueryMoments
from jkv.eviction.evict import Evict
from jkv.eviction.view import CacheView
from jkv.model.params import LowRank, Model, fold
from jkv.model.rotary import Rope, rope_of
from jkv.model.sharding import gather_copies, mean_over_copies
from jkv.policies.foresight import Network
from jkv.policies.oracle import Reads


class ModelFacts(NamedTuple):
    """What a score reads of the model; None for what it does not declare."""

    rope: Rope | None
    calibration: QueryMoments | Network | Reads | None  # the arrays of the policy's calibration
    out: tuple[Annotated[Any, "N*H D"], ...] | None  # output projection of each layer
    sink: tuple[Annotated[Any, "N"], ...] | None = None  # learned sinks of each layer; None where the model has none


def facts_for(policy: Policy, model: Model) -> ModelFacts | None:
    """The facts that a policy's score declares, and learned sinks; None if none, so that its programs take no argument more.

    Learned sinks are passed to every score that reads queries, whose attention has a term for them.
    """
    needs, calibration = policy.needs, policy.calibration
    reads_sinks = model.config.has_sinks and needs.window > 0
    if not (needs.rope or needs.projected or needs.calibration or reads_sinks):
        return None
    of_layers = [model.params.layers[layer] for layer in model.config.paged_layers]
    return ModelFacts(
        rope=rope_of(model.config) if needs.rope else None,
        calibration=None if calibration is None else arrays_of(calibration),
        out=tuple(layer.out for layer in of_layers) if needs.projected else None,
        sink=tuple(layer.sink for layer in of_layers) if reads_sinks else None,
    )


@functools.lru_cache(maxsize=8)
def arrays_of(calibration: Calibration) -> Any:
    """The arrays of a calibration, moved to the device once and not at each compaction."""
    return jax.tree.map(jnp.asarray, calibration.arrays)


def projected_norms(value: Float[Array, "L R K S H"], out: tuple[Any, ...]) -> Float[Array, "L R K S"]:
    """The L1 norms of values after their layer's output projection, mean over the query heads of each KV head.

    It loops over the query heads, so that the projected values of only one of them exist at once.
    """
    _, rows, kv_heads, slots, size = value.shape

    def of_layer(value: Float[Array, "R K S H"], weight: Any) -> Float[Array, "R K S"]:
        base = weight.base if isinstance(weight, LowRank) else weight
        width = base.shape[-1]
        matrix = fold(weight, (base.size // width, width)).reshape(-1, size, width)
        group = len(matrix) // kv_heads

        def of_head(head: Array) -> Float[Array, "R S"]:
            product = jnp.einsum("rsh,hd->rsd", value[:, head // group], matrix[head], preferred_element_type=jnp.float32)
            return jnp.abs(product).sum(axis=-1)

        norm = jax.lax.map(of_head, jnp.arange(len(matrix), dtype=jnp.int32))
        return norm.reshape(kv_heads, group, rows, slots).mean(axis=1).swapaxes(0, 1)

    return jnp.stack([of_layer(*layer) for layer in zip(value, out, strict=True)])


def view_of_rows(
    cache: Cache,
    row: Int[Array, " R"],
    evict: Evict,
    budget: Int[Array, "L R K"],
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
        carried={name: pool.slot_data[place][layer, row] for name, place in evict.needs.carried_slots.items()} or None,
        layer=layer,
        budget=budget.reshape(position.shape[:2]),
        prompt_length=jnp.tile(prompt_length, num_layers),
        log_weight=pool.slot_data[pages.LOG_WEIGHT][layer, row] if pages.LOG_WEIGHT in pool.slot_data else None,
        first_head=first_head,
        rope=rope,
        projected_norm=projected,
        calibration=calibration,
        gate=pool.slot_data[GATE][layer, row] if evict.needs.gate else None,
        sink=sink,
    )
