"""Weights as they travel: flat buckets of bytes, of those leaves alone that are new.

A model has hundreds of arrays; each message has a cost of its own, and a carrier shares large flat arrays between processes
of a machine without a copy. An array whose digest is that of the last update has not changed: so of an adapter (LoRA) whose
base stays, only the adapter travels. Replicas compare the digests of what they use with the digests of what was sent.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

BUCKET_BYTES = 1 << 28
ALIGNMENT = 64  # bytes at which each array begins, so that a device of the host can read it in place


class Bucket(NamedTuple):
    """Some leaves of the weights, one after the other.

    Attributes:
      leaves: their indices among all leaves.
      data: `[bytes]` uint8.
    """

    leaves: tuple[int, ...]
    data: np.ndarray


UINTS = {8: jnp.uint8, 16: jnp.uint16, 32: jnp.uint32, 64: jnp.uint32}  # by the bits of a number; 64 are read as two
MIXERS = (0x9E3779B1, 0x85EBCA6B), (0xC2B2AE35, 0x27D4EB2F)  # odd, so that no change of a single number is lost


def digests_of(params: Any) -> np.ndarray:
    """A digest of each leaf, from its bits and their places: `[leaves, 2]` uint32. One pass over the weights, where they lie.

    A change of one number always changes the digest, and other changes do but for one in 2**64. Each is awaited before the
    next begins: several CPU devices share their threads, and two sums over a mesh that run at once can each hold threads
    that the other needs.

    >>> a, b = digests_of([jnp.array([1.0, 2.0]), jnp.array([2.0, 1.0])])
    >>> (a == b).any()
    np.False_
    """
    return np.array([jax.device_get(digest(leaf)) for leaf in jax.tree.leaves(params)], np.uint32).reshape(-1, 2)


@jax.jit
def digest(leaf: jax.Array) -> jax.Array:
    """Two sums of mixed bits: [2] uint32. Sums of integers do not depend on their order, nor on how a mesh splits the array."""
    bits = jax.lax.bitcast_convert_type(leaf, UINTS[8 * leaf.dtype.itemsize]).astype(jnp.uint32)
    place = jnp.zeros(bits.shape, jnp.uint32)
    for axis, size in enumerate(bits.shape):
        place = place * jnp.uint32(size % 2**32) + jax.lax.broadcasted_iota(jnp.uint32, bits.shape, axis)
    sums = []
    for first, second in MIXERS:
        mixed = bits ^ (place * jnp.uint32(first))
        mixed = (mixed ^ (mixed >> 16)) * jnp.uint32(second)
        mixed = (mixed ^ (mixed >> 13)) * jnp.uint32(first)
        sums.append((mixed ^ (mixed >> 16)).sum(dtype=jnp.uint32))
    return jnp.stack(sums)


def check_digests(params: Any, digests: np.ndarray, version: int) -> None:
    """Refuses weights that are not the ones whose digests were sent.

    Raises:
      RuntimeError: they differ; the error names the first leaf.
    """
    is_other = (digests_of(params) != digests).any(axis=1)
    if is_other.any():
        path = jax.tree_util.tree_leaves_with_path(params)[int(is_other.argmax())][0]
        raise RuntimeError(
            f"A replica must use the weights that were sent as version {version}; its params{jax.tree_util.keystr(path)} are "
            f"others ({int(is_other.sum())} of {len(is_other)} arrays differ). It is started again."
        )


def num_bytes(shape: Any) -> int:
    """Bytes that a leaf takes in a bucket, of its shape and dtype."""
    return -(-math.prod(shape.shape) * np.dtype(shape.dtype).itemsize // ALIGNMENT) * ALIGNMENT


def pack(leaves: Mapping[int, Any], most_bytes: int = BUCKET_BYTES) -> Iterator[Bucket]:
    """Buckets of the leaves, in order, one at a time; each has at most `most_bytes`, or a single leaf."""
    group: dict[int, Any] = {}
    for i, leaf in leaves.items():
        if group and sum(map(num_bytes, (*group.values(), leaf))) > most_bytes:
            yield packed(group)
            group = {}
        group[i] = leaf
    if group:
        yield packed(group)


def packed(leaves: Mapping[int, Any]) -> Bucket:
    """One bucket of these leaves; waits for the device."""
    data, start = np.zeros(sum(map(num_bytes, leaves.values())), np.uint8), 0
    for leaf in leaves.values():
        flat = np.ascontiguousarray(jax.device_get(leaf)).reshape(-1).view(np.uint8)
        data[start : start + flat.size] = flat
        start += num_bytes(leaf)
    return Bucket(tuple(leaves), data)


def unpack(bucket: Bucket, shapes: Sequence[Any]) -> dict[int, np.ndarray]:
    """The leaves of a bucket, as views of its bytes; `shapes` has shape and dtype of all leaves."""
    leaves, start = {}, 0
    for i in bucket.leaves:
        shape, dtype = shapes[i].shape, np.dtype(shapes[i].dtype)
        size = math.prod(shape) * dtype.itemsize
        leaves[i] = bucket.data[start : start + size].view(dtype).reshape(shape)
        start += num_bytes(shapes[i])
    return leaves


def with_leaves(params: Any, leaves: Mapping[int, Any]) -> Any:
    """The weights with some leaves replaced, each put where the one before lies."""
    old, structure = jax.tree.flatten(params)
    new = [jax.device_put(leaves[i], leaf.sharding) if i in leaves else leaf for i, leaf in enumerate(old)]
    return jax.tree.unflatten(structure, new)
