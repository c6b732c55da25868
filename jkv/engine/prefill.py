"""How a prompt is cut into the chunks that prefill programs take, one after the other."""

from collections.abc import Iterator

import numpy as np

from pallas_kernels.choice import LEAST_CAPABILITY

SIZES = (16, 64, 256)  # tokens of a prefill program
LEAST_SLOTS = 1024  # of a row that a piece reads; more, by a factor of four each, where it holds more
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


def pages_to_read(num_slots: int, page_size: int, max_pages: int) -> int | None:
    """Pages of a row with so many slots that a piece reads: one of a few numbers; None for all that a row can have.

    >>> [pages_to_read(slots, 16, 2048) for slots in (300, 1024, 1025, 4097, 20_000)]
    [64, 64, 256, 1024, None]
    """
    most = LEAST_SLOTS
    while most < num_slots:
        most *= 4
    num_pages = -(-most // page_size)
    return num_pages if num_pages < max_pages else None
