"""Digests of weights and of a tokenizer, by which records of runs identify a model (`Model.digests`)."""

import hashlib
import json
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, UInt32

from jkv.resuming import digest_of

ODD = 0x9E3779B1  # which spreads places over 32 bits


def weights_digest(named_sums: Iterable[tuple[str, tuple[int, ...], Any]]) -> str:
    """Identifies every number of some weights, given the name, the shape and the `hash_sum` of each: 16 hexadecimal digits."""
    content = hashlib.blake2s(digest_size=8)
    for name, shape, sums in named_sums:
        content.update(f"{name} {shape}".encode() + np.asarray(sums).tobytes())
    return content.hexdigest()


def hash_sum(array: Array) -> UInt32[Array, " 2"]:
    """Two sums over an array, modulo 2**32, of hashes of its numbers and their places.

    They are the same for bfloat16 numbers and the float32 numbers that they become, and however the array is sharded. A device
    reads the numbers once, and they never leave it.
    """
    exact = jnp.float32 if jnp.issubdtype(array.dtype, jnp.floating) else jnp.int32
    bits = jax.lax.bitcast_convert_type(array.astype(exact), jnp.uint32)
    place, step = jnp.zeros(array.shape, jnp.uint32), 1
    for axis in reversed(range(array.ndim)):
        place += jax.lax.broadcasted_iota(jnp.uint32, array.shape, axis) * jnp.uint32(step % 2**32)
        step *= array.shape[axis]
    hashes = scrambled(bits ^ (place * jnp.uint32(ODD)))
    return jnp.stack([sum_of.sum(dtype=jnp.uint32) for sum_of in (hashes, hashes * (2 * place + jnp.uint32(1)))])


def scrambled(x: UInt32[Array, "..."]) -> UInt32[Array, "..."]:
    """A hash of each number (the end of MurmurHash3): each bit of the input changes half of the output's."""
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        x = (x ^ (x >> jnp.uint32(shift))) * jnp.uint32(factor)
    return x ^ (x >> jnp.uint32(16))


def tokenizer_digest(tokenizer: Any) -> str:
    """Identifies how text becomes ids, and messages a prompt; "none" without a tokenizer."""
    if tokenizer is None:
        return "none"
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        rules: Any = type(tokenizer).__name__, sorted(tokenizer.get_vocab().items())
    else:
        rules = {name: value for name, value in json.loads(backend.to_str()).items() if name not in ("padding", "truncation")}
    special = getattr(tokenizer, "special_tokens_map", {})
    return digest_of([rules, special, getattr(tokenizer, "chat_template", None)])
