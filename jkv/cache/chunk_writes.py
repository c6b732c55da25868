"""New tokens written to the keys and values of a pool: slot by slot, or by whole pages whose old slots are read first.

Whole pages are for chunks of vectors of groups (`pallas_kernels.quantised`): a TPU stores their pages transposed, and for a
scatter of many single slots XLA would transpose the pool.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from pallas_kernels.quantised import Numbers, Quantised, put


def write(kv: Numbers, address: Int[Array, "R K T"], new: Numbers) -> Numbers:
    """The pool with new vectors `[R, K, T, 2, H]` in its form at addresses of consecutive slots, but for those in page 0."""
    if isinstance(kv, Quantised) and isinstance(new, Quantised) and kv.format.group is not None and address.shape[-1] > 1:
        return write_chunk(kv, address, new)
    page, offset = address // kv.shape[2], address % kv.shape[2]
    return put(kv, (page[..., None], jnp.arange(2, dtype=jnp.int32), offset[..., None]), new)


def write_chunk(kv: Quantised, address: Int[Array, "R K T"], new: Quantised) -> Quantised:
    """The pool with new vectors `[R, K, T, 2, H]` at addresses of consecutive slots; address 0, at the end, is not written.

    In: page 4, slots 6 to 8 -> Out: a page written from slot 2 on, and one of which slot 0 is written.
    """
    page_size, num_tokens = kv.shape[2], address.shape[-1]
    first = address[..., :1] % page_size
    most = (num_tokens + 2 * page_size - 2) // page_size  # pages that a chunk may touch
    start = jnp.maximum(jnp.arange(most, dtype=jnp.int32) * page_size - first, 0)  # first token of each page
    page = jnp.take_along_axis(address, jnp.minimum(start, num_tokens - 1), axis=-1) // page_size
    page = jnp.where(start < num_tokens, page, 0)
    token = jnp.arange(most * page_size, dtype=jnp.int32) - first
    at = jnp.clip(token, 0, num_tokens - 1)
    is_new = (token >= 0) & (token < num_tokens) & (jnp.take_along_axis(address, at, axis=-1) >= page_size)

    def write(x: Array, part: Array) -> Array:
        return put(x, (page,), merged(x.at[page].get(mode="promise_in_bounds"), part, at, is_new))

    return jax.tree.map(write, kv, new)


def merged(old: Array, new: Array, at: Int[Array, "R K S"], is_new: Bool[Array, "R K S"]) -> Array:
    """Pages `[R, K, I, 2, page, C]` whose slots are the vectors `at` `[R, K, T, 2, C]` where they are new."""
    by_page = *old.shape[:3], old.shape[4]
    taken = jnp.take_along_axis(new, at[..., None, None], axis=2)
    taken = jnp.swapaxes(taken.reshape(*by_page, 2, old.shape[-1]), 3, 4)
    return jnp.where(is_new.reshape(by_page)[:, :, :, None, :, None], taken, old)
