"""The random keys of samples, computed on the host as `jax.random` would: Threefry-2x32 (Salmon et al., SC 2011).

A key takes microseconds. A program on the device for it would wait for all that the device has to do.
"""

import numpy as np
from jaxtyping import UInt32

ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))  # bits, of the rounds in turn
PARITY = 0x1BD11BDA
MASK = 0xFFFFFFFF


def sample_key(seed: int, request: int, sample: int) -> UInt32[np.ndarray, " 2"]:
    """The key data of one sample of one request: its number, folded into the request's, folded into the seed's key.

    >>> sample_key(1, 2, 3)
    array([2563710487,  186860909], dtype=uint32)
    """
    key = 0, int(seed) & MASK
    for number in (int(request), int(sample)):
        key = threefry(key, (0, number & MASK))
    return np.array(key, np.uint32)


def threefry(key: tuple[int, int], count: tuple[int, int]) -> tuple[int, int]:
    """Two pseudo-random 32-bit numbers: `count`, encrypted by `key` in 20 rounds."""
    keys = *key, key[0] ^ key[1] ^ PARITY
    one, other = (count[0] + key[0]) & MASK, (count[1] + key[1]) & MASK
    for i in range(5):
        for bits in ROTATIONS[i % 2]:
            one = (one + other) & MASK
            other = ((other << bits | other >> 32 - bits) & MASK) ^ one
        one = (one + keys[(i + 1) % 3]) & MASK
        other = (other + keys[(i + 2) % 3] + i + 1) & MASK
    return one, other
