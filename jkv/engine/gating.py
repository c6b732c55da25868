"""The gate of each new token, computed from the hidden states that the decoder reports, and stored beside its slot."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jkv.cache.attention import Cache
from jkv.cache.gating import store_gate
from jkv.eviction.gate_kinds import DmsGate, FastKVzipGate, KVzapLinearGate, KVzapMlpGate
from jkv.model import decoder
from jkv.model.params import Params

AnyGate = DmsGate | KVzapLinearGate | KVzapMlpGate | FastKVzipGate


def gating(params: Params, gate: AnyGate, row: Int[Array, " R"], num_new: Int[Array, " R"]) -> Callable[[int, Array, Any], Any]:
    """An `observe` of the decoder that stores the gate of each row's new tokens."""
    epsilon = params.config.norm_epsilon

    def observe(layer: int, hidden: Float[Array, "R T D"], cache: Cache) -> Cache:
        if layer not in params.config.paged_layers:
            return cache
        normed = decoder.input_of_attention(params, layer, hidden)
        value = gate(layer, hidden.astype(jnp.float32), normed.astype(jnp.float32), epsilon)
        return cache._replace(pool=store_gate(cache.pool, params.config.paged_layers.index(layer), row, num_new, value))

    return observe
