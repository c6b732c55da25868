"""Plain XLA, one layer at a time: the pages of all pairs exist for one layer at once, not for more."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels import hadamard
from pallas_kernels.quantised import Numbers, dequantise


def block_distance(
    kv: Numbers,
    first: Int[Array, "I L K"],
    second: Int[Array, "I L K"],
    num_tokens: Int[Array, " I"],
    angle: Float[Array, "I half"] | None,
) -> Float[Array, "I L 2 3"]:
    """See `pallas_kernels.block_distance`."""
    is_read = jnp.arange(kv.shape[2], dtype=jnp.int32) < num_tokens[:, None]  # [I, page]

    def of_layer(pages: tuple[Int[Array, "I K"], Int[Array, "I K"]]) -> Float[Array, "I 2 3"]:
        one, other = (
            dequantise(jax.tree.map(lambda x, page=page: x[page], kv), jnp.float32) for page in pages
        )  # [I, K, 2, page, H]
        if angle is not None:
            other = other.at[:, :, 0].set(turn(other[:, :, 0], angle[:, None, None]))
        parts = one, other, one - other
        squares = [jnp.where(is_read[:, None, None, :, None], jnp.square(x), 0.0).sum(axis=(1, 3, 4)) for x in parts]
        return jnp.stack(squares, axis=-1)

    of_layers = jax.lax.map(of_layer, (jnp.moveaxis(first, 1, 0), jnp.moveaxis(second, 1, 0)))
    return jnp.moveaxis(of_layers, 0, 1)


def turn(x: Float[Array, "... H"], angle: Float[Array, "... half"]) -> Float[Array, "... H"]:
    """Rotates the channel pairs (c, c + half); channels beyond the last pair do not change."""
    half = angle.shape[-1]
    low, high, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    return jnp.concatenate([low * cos - high * sin, high * cos + low * sin, rest], axis=-1)


def turn_of_rotated(angle: Float[Array, "I half"], head_size: int) -> Float[Array, "I H H"]:
    """Matrices that turn keys which Hadamard's matrix has rotated, as row vectors: rotated back, turned, and rotated again.

    A difference of rotated vectors is as long as that of the vectors, so kernels need not turn pages back.
    """
    matrix = hadamard.rotate(jnp.eye(head_size, dtype=jnp.float32))
    return hadamard.rotate(turn(jnp.broadcast_to(matrix, (len(angle), head_size, head_size)), angle[:, None]))
