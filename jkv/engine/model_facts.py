"""What compaction passes to scores that read more of the model than its keys and values (`jkv.eviction.needs`)."""

import functools
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jkv.eviction import Policy
from jkv.eviction.calibration import Calibration
from jkv.eviction.query_statistics import QueryMoments
from jkv.model.params import LowRank, Model, fold
from jkv.model.rope import Rope, rope_of
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
