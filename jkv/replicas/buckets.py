"""Weights as they travel: flat buckets of bytes, of those leaves alone that are new.

A model has hundreds of arrays; each message has a cost of its own, and a carrier shares large flat arrays between processes
of a machine without a copy. An array that is the same object as in the last update has not changed, since JAX's arrays never
do: so of an adapter (LoRA) whose base stays, only the adapter travels.
"""

import math
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
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


class Changes:
    """Which leaves are new since the last call; it keeps no weights alive.

    >>> import jax.numpy as jnp
    >>> base, changes = jnp.ones(3), Changes()
    >>> list(changes.since_last([base, jnp.ones(1)])), list(changes.since_last([base, jnp.zeros(1)]))
    ([0, 1], [1])
    """

    def __init__(self) -> None:
        self._last: list[weakref.ref[Any]] = []

    def since_last(self, leaves: Sequence[Any]) -> dict[int, Any]:
        """The leaves that are not the same arrays as before, by index."""
        old = [reference() for reference in self._last] or [None] * len(leaves)
        self._last = [weakref.ref(leaf) for leaf in leaves]
        return {i: leaf for i, (leaf, was) in enumerate(zip(leaves, old, strict=True)) if leaf is not was}


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
