"""The gate of each new token, computed from the hidden states that the decoder reports, and stored beside its slot."""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from jkv.cache.attention import Cache
from jkv.cache.gating import store_gate
from jkv.engine.parts.base import Observe, Rows, Step, StepPart
from jkv.eviction.gate import DmsGate, FastKVzipGate, KVzapLinearGate, KVzapMlpGate
from jkv.model import decoder

AnyGate = DmsGate | KVzapLinearGate | KVzapMlpGate | FastKVzipGate


class Gating(StepPart):
    """The gate that all steps compute."""

    sees_prompts = True

    gate: AnyGate

    @classmethod
    def is_on(cls, rows: Rows) -> bool:
        return rows.gate is not None

    @classmethod
    def of(cls, rows: Rows) -> "Gating":
        return cls(rows.gate)

    def take(self, step: Step, carry: Any) -> tuple[Step, Any]:
        return step._replace(observe=storing(self.gate, step)), carry


def storing(gate: AnyGate, step: Step) -> Observe:
    """An `observe` of the decoder that stores the gate of each row's new tokens."""
    params, config = step.params, step.params.config

    def observe(layer: int, hidden: Float[Array, "R T D"], cache: Cache) -> Cache:
        if layer not in config.paged_layers:
            return cache
        normed = decoder.input_of_attention(params, layer, hidden)
        value = gate(layer, hidden.astype(jnp.float32), normed.astype(jnp.float32), config.norm_epsilon)
        return cache._replace(pool=store_gate(cache.pool, config.paged_layers.index(layer), step.row, step.num_new, value))

    return observe
