"""Plain XLA: the mean of all similarities is one product with the sum of the keys; only the exempt entries are searched for.

A scan over blocks of rows of the similarity matrix finds the latest similar key of each key; the whole matrix never exists. The
matrix is symmetric, so the maximum of a column equals that of a row and needs no reduction across the lanes of a vector.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

BLOCK = 128  # slots


def key_redundancy(
    key_RSH: Float[Array, "R S H"],
    is_filled: Bool[Array, "R S"],
    threshold: float,
    exempt: int,
    exempt_first: bool,
    block: int = BLOCK,
    add: Callable[..., Float[Array, "R S"]] | None = None,
) -> Float[Array, "R S"]:
    """See `pallas_kernels.key_redundancy`; `block` is the number of matrix rows at a time, `add` a replacement of `add_at`."""
    add = add or add_at
    key_RSH = jnp.where(is_filled[..., None], key_RSH, 0).astype(jnp.float32)
    key_RSH = key_RSH / (jnp.linalg.norm(key_RSH, axis=-1, keepdims=True) + 1e-8)
    total_RS = jnp.einsum("rsh,rh->rs", key_RSH, key_RSH.sum(axis=1)) - jnp.square(key_RSH).sum(axis=-1)
    slot = jnp.arange(key_RSH.shape[1], dtype=jnp.int32)
    latest_RS = None
    for turn in range(exempt):
        latest_RS = latest_alike(key_RSH, is_filled, latest_RS, threshold, block)
        other_RS, is_exempt_RS = jnp.maximum(latest_RS, 0), is_filled & (latest_RS >= 0)
        if exempt_first and turn == 0:
            is_exempt_RS = is_filled & (other_RS != slot)
        similarity_RS = (key_RSH * jnp.take_along_axis(key_RSH, other_RS[..., None], axis=1)).sum(axis=-1)
        total_RS = add(total_RS, other_RS, jnp.where(is_exempt_RS, -similarity_RS, 0.0))
    count_R1 = jnp.maximum(is_filled.sum(axis=-1, keepdims=True), 1).astype(jnp.float32)
    return jnp.where(is_filled, total_RS / count_R1, 0.0)


def latest_alike(
    key_RSH: Float[Array, "R S H"],
    is_filled: Bool[Array, "R S"],
    below_RS: Int[Array, "R S"] | None,
    threshold: float,
    block: int,
) -> Int[Array, "R S"]:
    """For each (unit) key, the last slot (before `below`) of another key with a cosine above the threshold; -1 for none."""
    num_slots = key_RSH.shape[1]
    num_blocks = -(-num_slots // block)
    block = -(-num_slots // num_blocks)
    padding = (0, num_blocks * block - num_slots)
    # Slots are floats, exact to 2 ** 24: on a CPU the maximum of floats is faster than that of integers.
    slot = jnp.arange(num_slots, dtype=jnp.float32)
    padded_RS = jnp.pad(jnp.where(is_filled, slot, -1.0), [(0, 0), padding], constant_values=-1)
    padded_RSH = jnp.pad(key_RSH, [(0, 0), padding, (0, 0)])

    def look(best_RS: Float[Array, "R S"], start: Int[Array, ""]) -> tuple[Float[Array, "R S"], None]:
        key_RIH = jax.lax.dynamic_slice_in_dim(padded_RSH, start, block, axis=1)
        slot_RI1 = jax.lax.dynamic_slice_in_dim(padded_RS, start, block, axis=1)[..., None]
        similarity_RIS = jnp.einsum("rih,rsh->ris", key_RIH, key_RSH)
        is_alike_RIS = (similarity_RIS > threshold) & (slot_RI1 != slot)
        if below_RS is not None:
            is_alike_RIS &= slot_RI1 < below_RS[:, None].astype(jnp.float32)
        return jnp.maximum(best_RS, jnp.where(is_alike_RIS, slot_RI1, -1.0).max(axis=1)), None

    none_RS, start = jnp.full(is_filled.shape, -1.0), jnp.arange(0, num_blocks * block, block, dtype=jnp.int32)
    return jax.lax.scan(look, none_RS, start)[0].astype(jnp.int32)


def add_at(total_RS: Float[Array, "R S"], slot_RS: Int[Array, "R S"], value_RS: Float[Array, "R S"]) -> Float[Array, "R S"]:
    """The totals with each value added at its slot, in a fixed order; the scatter of a GPU adds in any order."""
    num_slots = total_RS.shape[1]
    slot, block = jnp.arange(num_slots, dtype=jnp.int32), min(BLOCK, num_slots)
    padding = [(0, 0), (0, -num_slots % block)]
    slot_RS, value_RS = jnp.pad(slot_RS, padding, constant_values=-1), jnp.pad(value_RS, padding)

    def add_block(total_RS: Float[Array, "R S"], start: Int[Array, ""]) -> tuple[Float[Array, "R S"], None]:
        slot_RI, value_RI = (jax.lax.dynamic_slice_in_dim(x, start, block, axis=1) for x in (slot_RS, value_RS))
        return total_RS + jnp.where(slot_RI[..., None] == slot, value_RI[..., None], 0.0).sum(axis=1), None

    return jax.lax.scan(add_block, total_RS, jnp.arange(0, num_slots, block, dtype=jnp.int32))[0]
