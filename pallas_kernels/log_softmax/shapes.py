"""The arguments of real calls: the logits of a decode step, of a vocabulary of 32,768."""

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.models import Case, ModelShape, Workload, of

CASES = (Case("decode step"),)
VOCABULARY = 32768


def arguments(model: ModelShape, workload: Workload) -> tuple[Any, ...]:
    """The shape of the logits, in float32."""
    return (of(jnp.float32, workload.batch, VOCABULARY),)


def values(model: ModelShape, workload: Workload) -> tuple[Any, ...]:
    """Normal numbers, less the largest of a row."""
    logits = jax.random.normal(jax.random.key(0), arguments(model, workload)[0].shape)
    return (logits - logits.max(axis=-1, keepdims=True),)


def num_bytes(model: ModelShape, workload: Workload) -> int:
    """Bytes of the logits, read once, and of the log-probabilities."""
    return int(8 * arguments(model, workload)[0].size)
