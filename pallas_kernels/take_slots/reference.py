"""Plain XLA: a gather, then a scatter with full advanced indices; with other indices, some backend copies the pool.

Vectors of groups move by whole pages: a TPU stores such pages transposed, and for single slots XLA would transpose the pool.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from pallas_kernels.quantised import Numbers, is_rotated, put, take


def take_slots(kv: Numbers, slots: Int[Array, "R S"], source: Int[Array, "R MP"], target: Int[Array, "R MP"]) -> Numbers:
    """See `pallas_kernels.take_slots`."""
    if is_rotated(kv):
        return jax.tree.map(lambda x: rewrite_pages(x, slots, source, target), kv)
    page_size = jnp.int32(kv.shape[2])
    key_or_value = jnp.arange(2, dtype=jnp.int32)

    def indices(address: Int[Array, "R S"]) -> tuple[Int[Array, "..."], ...]:
        page, offset = jnp.divmod(address, page_size)
        return page[..., None], key_or_value, offset[..., None]

    begin, end = addresses(kv.shape[2], slots, source, target)
    return put(kv, indices(end), take(kv, indices(begin)))


def rewrite_pages(pool: Array, slots: Int[Array, "R S"], source: Int[Array, "R MP"], target: Int[Array, "R MP"]) -> Array:
    """The pool `[P, 2, page, C]` whose target pages are written whole."""
    page_size = pool.shape[2]
    row = jnp.arange(len(slots), dtype=jnp.int32)[:, None]
    page, offset = jnp.divmod(jnp.maximum(slots, 0), jnp.int32(page_size))
    old = pool.at[source].get(mode="promise_in_bounds")  # [R, MP, 2, page, C]
    taken = old[row, page, :, offset].reshape(*target.shape, page_size, 2, -1)
    return put(pool, (target,), jnp.swapaxes(taken, 2, 3))


def addresses(
    page_size: int, slots: Int[Array, "R S"], source: Int[Array, "R MP"], target: Int[Array, "R MP"]
) -> tuple[Int[Array, "R S"], Int[Array, "R S"]]:
    """The address from and to which each slot moves, as `page * page_size + offset`; 0 and 0 for a slot that does not move."""

    def address(pages: Int[Array, "R MP"], at: Int[Array, "R S"]) -> Int[Array, "R S"]:
        return jnp.take_along_axis(pages, at // page_size, axis=-1) * page_size + at % page_size

    is_moved = (slots >= 0) & jnp.repeat(target != 0, page_size, axis=-1)
    own = jnp.broadcast_to(jnp.arange(slots.shape[1], dtype=jnp.int32), slots.shape)
    begin, end = address(source, jnp.maximum(slots, 0)), address(target, own)
    return jnp.where(is_moved, begin, 0), jnp.where(is_moved, end, 0)
