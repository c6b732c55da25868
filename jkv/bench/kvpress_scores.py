"""Methods of kvpress that `jkv` has no recipe for, as scores: for `jkv bench peers`, which runs equal methods side by side."""

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from jkv.policies import CacheView, Policy, evict_by, make


def knorm(view: CacheView) -> Float[Array, "B K S"]:
    """The smaller a key's norm, the better: minus its length (arXiv 2406.11430)."""
    return -jnp.linalg.norm(view.key.astype(jnp.float32), axis=-1)


def key_diff(view: CacheView) -> Float[Array, "B K S"]:
    """The less a key is like the others, the better: minus its cosine with the mean of all unit keys (arXiv 2504.15364)."""
    key = jnp.where(view.is_filled[..., None], view.key.astype(jnp.float32), 0.0)
    unit = key / jnp.maximum(jnp.linalg.norm(key, axis=-1, keepdims=True), 1e-12)
    anchor = unit.sum(axis=2) / jnp.maximum(view.is_filled.sum(axis=2), 1).astype(jnp.float32)[..., None]
    anchor = anchor / jnp.maximum(jnp.linalg.norm(anchor, axis=-1, keepdims=True), 1e-12)
    return -jnp.einsum("bksh,bkh->bks", unit, anchor)


SCORES = {"knorm": knorm, "key_diff": key_diff}


def policy_of(name: str, settings: Mapping[str, Any]) -> Policy:
    """A policy of the table, or one of the scores above with nothing protected, as kvpress runs them."""
    if name not in SCORES:
        return make(name, dict(settings))
    return evict_by(SCORES[name], settings["budget"], settings["interval"], name=name)
