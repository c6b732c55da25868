"""Published gates: what each computes from the hidden states at the input of a layer, one number for each token and KV head.

Two hidden states go into every gate: the residual stream that enters the layer, and the same after the norm before attention.
A larger number means that the token is worth more. All of them compute in float32.
"""

from typing import NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.add_norm.reference import rms_norm

DMS_SCALE, DMS_OFFSET = 100.0, 5.0
DMS_WINDOW, KVZAP_WINDOW, FAST_KVZIP_WINDOW = 512, 128, 8  # tokens that the authors keep whatever their gate says
FAST_KVZIP_EPSILON = 1e-6


@runtime_checkable
class GateArrays(Protocol):
    """The weights of a gate, which begin with the layer, and what it computes with those of one layer."""

    def __call__(
        self, layer: int, hidden: Float[Array, "B T D"], normed: Float[Array, "B T D"], epsilon: float
    ) -> Float[Array, "B T K"]: ...


class DmsGate(NamedTuple):
    """DMS (arXiv 2506.05345): a linear map of the residual stream after a norm of its own; tokens below 0 are evicted."""

    norm: Float[Array, "L D"]
    weight: Float[Array, "L K D"]
    bias: Float[Array, "L K"]

    def __call__(
        self, layer: int, hidden: Float[Array, "B T D"], normed: Float[Array, "B T D"], epsilon: float
    ) -> Float[Array, "B T K"]:
        x = rms_norm(hidden, self.norm[layer], epsilon)
        return DMS_OFFSET - DMS_SCALE * (multiply("btd,kd->btk", x, self.weight[layer]) + self.bias[layer])


class KVzapLinearGate(NamedTuple):
    """KVzap's linear map (arXiv 2601.07891): the logarithm of the importance, of the hidden state after the norm."""

    weight: Float[Array, "L K D"]
    bias: Float[Array, "L K"]

    def __call__(
        self, layer: int, hidden: Float[Array, "B T D"], normed: Float[Array, "B T D"], epsilon: float
    ) -> Float[Array, "B T K"]:
        return multiply("btd,kd->btk", normed, self.weight[layer]) + self.bias[layer]


class KVzapMlpGate(NamedTuple):
    """KVzap's network with one hidden layer, which all KV heads share (arXiv 2601.07891); what it reads is as in the linear."""

    into: Float[Array, "L I D"]
    into_bias: Float[Array, "L I"]
    out: Float[Array, "L K I"]
    out_bias: Float[Array, "L K"]

    def __call__(
        self, layer: int, hidden: Float[Array, "B T D"], normed: Float[Array, "B T D"], epsilon: float
    ) -> Float[Array, "B T K"]:
        x = jax.nn.gelu(multiply("btd,id->bti", normed, self.into[layer]) + self.into_bias[layer], approximate=False)
        return multiply("bti,ki->btk", x, self.out[layer]) + self.out_bias[layer]


class FastKVzipGate(NamedTuple):
    """Fast KVzip (arXiv 2601.17668): the attention of a small query to its token's small key, against I learned sinks.

    It reads the hidden state after the norm. E is the size of the small heads.
    """

    query: Float[Array, "L K G E D"]
    query_bias: Float[Array, "L K G E"]
    query_norm: Float[Array, "L E"]
    key: Float[Array, "L K E D"]
    key_norm: Float[Array, "L E"]
    sinks: Float[Array, "L K I E"]
    bias: Float[Array, "L K G"]

    def __call__(
        self, layer: int, hidden: Float[Array, "B T D"], normed: Float[Array, "B T D"], epsilon: float
    ) -> Float[Array, "B T K"]:
        size = self.key_norm.shape[-1] ** -0.5
        query = multiply("btd,kged->btkge", normed, self.query[layer]) + self.query_bias[layer]
        query = rms_norm(query, self.query_norm[layer], FAST_KVZIP_EPSILON)
        key = rms_norm(multiply("btd,ked->btke", normed, self.key[layer]), self.key_norm[layer], FAST_KVZIP_EPSILON)
        own = size * multiply("btkge,btke->btkg", query, key) + self.bias[layer]
        sinks = size * multiply("btkge,kie->btkgi", query, self.sinks[layer])
        return (1 / (1 + jnp.exp(sinks - own[..., None]).sum(axis=-1))).mean(axis=-1)


def multiply(equation: str, one: Float[Array, "..."], other: Float[Array, "..."]) -> Float[Array, "..."]:
    """A float32 `einsum` of two arrays."""
    return jnp.einsum(equation, one, other, precision="highest")


# Kind -> tokens that stay whatever their gate says.
WINDOWS: dict[type, int] = {
    DmsGate: DMS_WINDOW,
    KVzapLinearGate: KVZAP_WINDOW,
    KVzapMlpGate: KVZAP_WINDOW,
    FastKVzipGate: FAST_KVZIP_WINDOW,
}
