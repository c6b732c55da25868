"""Plain XLA: a scan over blocks of rows of the similarity matrix, which never exists as a whole."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

BLOCK = 128


def key_redundancy(
    key_RSH: Float[Array, "R S H"],
    recency_RS: Int[Array, "R S"],
    is_filled: Bool[Array, "R S"],
    threshold: float,
    exempt: int,
    exempt_first: bool,
) -> Float[Array, "R S"]:
    """See `pallas_kernels.key_redundancy`."""
    num_slots = key_RSH.shape[1]
    key_RSH = jnp.where(is_filled[..., None], key_RSH, 0).astype(jnp.float32)
    key_RSH = key_RSH / (jnp.linalg.norm(key_RSH, axis=-1, keepdims=True) + 1e-8)
    slot = jnp.arange(num_slots, dtype=jnp.int32)
    block = min(BLOCK, num_slots)
    num_blocks = -(-num_slots // block)

    def add_block(total_RS: Float[Array, "R S"], index: Int[Array, ""]) -> tuple[Float[Array, "R S"], None]:
        row_I = index * block + jnp.arange(block, dtype=jnp.int32)
        clipped_I = jnp.minimum(row_I, num_slots - 1)
        is_row_RI = is_filled[:, clipped_I] & (row_I < num_slots)
        similarity_RIS = jnp.einsum("rih,rsh->ris", key_RSH[:, clipped_I], key_RSH)
        similarity_RIS = jnp.where(is_row_RI[..., None] & (row_I[:, None] != slot), similarity_RIS, 0.0)
        is_alike_RIS = similarity_RIS > threshold
        for turn in range(exempt):
            latest_RI1 = jnp.max(jnp.where(is_alike_RIS, recency_RS[:, None], -1), axis=-1, keepdims=True)
            is_exempt_RIS = is_alike_RIS & (recency_RS[:, None] == latest_RI1)
            if exempt_first and turn == 0:
                is_exempt_RIS |= (latest_RI1 == -1) & (slot == 0)
            similarity_RIS = jnp.where(is_exempt_RIS, 0.0, similarity_RIS)
            is_alike_RIS &= ~is_exempt_RIS
        return total_RS + similarity_RIS.sum(axis=1), None

    total_RS = jnp.zeros(key_RSH.shape[:2], jnp.float32)
    total_RS, _ = jax.lax.scan(add_block, total_RS, jnp.arange(num_blocks, dtype=jnp.int32))
    return total_RS / jnp.maximum(is_filled.sum(axis=-1, keepdims=True), 1).astype(jnp.float32)
