"""Methods of kvpress as scores that protect nothing: `research.bench.peers` runs equal methods side by side."""

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from jkv.eviction import CacheView, Policy, evict_by
from jkv.policies import make
from jkv.policies.key_diff import KeyDifference


def knorm(view: CacheView) -> Float[Array, "B K S"]:
    """The smaller a key's norm, the better: minus its length (arXiv 2406.11430)."""
    return -jnp.linalg.norm(view.key.astype(jnp.float32), axis=-1)


SCORES: dict[str, Any] = {"knorm": knorm, "key_diff": KeyDifference()}


def policy_of(name: str, settings: Mapping[str, Any]) -> Policy:
    """A policy of the table, or one of the scores above with nothing protected, as kvpress runs them."""
    if name not in SCORES:
        return make(name, dict(settings))
    return evict_by(SCORES[name], settings["budget"], settings["interval"], name=name)
