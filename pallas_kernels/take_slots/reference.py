"""Plain XLA: gather, then scatter with full advanced indices (anything less copies the pool on some backend)."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def take_slots(
    kv: Float[Array, "P 2 page H"], source: Int[Array, "R M"], target: Int[Array, "R M"]
) -> Float[Array, "P 2 page H"]:
    """See `pallas_kernels.take_slots`."""
    page_size = jnp.int32(kv.shape[2])
    key_or_value = jnp.arange(2, dtype=jnp.int32)

    def indices(address: Int[Array, "R M"]) -> tuple[Int[Array, "..."], ...]:
        page, offset = jnp.divmod(address, page_size)
        return page[..., None], key_or_value, offset[..., None]

    moved_RM2H = kv.at[indices(source)].get(mode="promise_in_bounds")
    return kv.at[indices(target)].set(moved_RM2H, mode="promise_in_bounds")
