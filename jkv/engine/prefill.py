"""How a prompt is cut into the chunks that prefill programs take, one after the other."""

from collections.abc import Iterator

import numpy as np

from pallas_kernels.choice import LEAST_CAPABILITY

SIZES = (16, 64, 256)  # tokens of a prefill program
LARGE = 1024  # one more where kernels run: the products of 256 tokens leave half of a GPU without work


def sizes_for(platform: str, capability: tuple[int, int] | None = None) -> tuple[int, ...]:
    """Tokens of the prefill programs on a platform, and for a GPU of this compute capability.

    >>> sizes_for("cpu"), sizes_for("tpu"), sizes_for("cuda", (7, 5))
    ((16, 64, 256), (16, 64, 256, 1024), (16, 64, 256))
    """
    has_kernels = platform == "tpu" or (platform == "cuda" and (capability or LEAST_CAPABILITY) >= LEAST_CAPABILITY)
    return (*SIZES, LARGE) if has_kernels else SIZES


def chunks(prompt: np.ndarray, sizes: tuple[int, ...]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yields the pieces of a prompt, each padded to one of the sizes, as [1, T], and the number of its tokens, as [1]."""
    for start in range(0, len(prompt), sizes[-1]):
        piece = prompt[start : start + sizes[-1]]
        padded = np.zeros((1, next(size for size in sizes if size >= len(piece))), np.int32)
        padded[0, : len(piece)] = piece
        yield padded, np.asarray([len(piece)], np.int32)
