"""Score functions that policies share: frozen records with one method, hashable, printable, usable under jit."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jkv.policies.base import CacheView


@dataclasses.dataclass(frozen=True)
class Recency:
    """Newer is better."""

    def __call__(self, view: CacheView) -> Float[Array, "B K S"]:
        return view.position.astype(jnp.float32)


@dataclasses.dataclass(frozen=True)
class Uniform:
    """Random numbers from 0 to 1 that depend on the seed, the layer, the KV head, the slot's position and the length alone."""

    seed: int = 0

    def __call__(self, view: CacheView) -> Float[Array, "B K S"]:
        key = jax.random.fold_in(jax.random.key(self.seed), 0 if view.layer is None else view.layer)

        def draw(position: Array, head: Array, num_seen: Array) -> Float[Array, ""]:
            folded = jax.random.fold_in(jax.random.fold_in(jax.random.fold_in(key, num_seen), head), position)
            return jax.random.uniform(folded)

        head = jnp.arange(view.position.shape[1], dtype=jnp.int32)
        over_slots = jax.vmap(draw, in_axes=(0, None, None))
        over_heads = jax.vmap(over_slots, in_axes=(0, 0, None))
        return jax.vmap(over_heads, in_axes=(0, None, 0))(view.position, head, view.num_seen)


def is_query(view: CacheView, window: int) -> Bool[Array, "B W"]:
    """Which of the last `window` queries exist: a sequence may be shorter than the window."""
    return jnp.arange(window, dtype=jnp.int32) >= window - view.num_seen[:, None]


def max_pool(x: Float[Array, "B K S"], width: int) -> Float[Array, "B K S"]:
    """The largest of `width` (odd) neighbouring slots, the slot itself in the middle."""
    return jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 1, width), (1, 1, 1), "SAME")
