"""The paged pool, and how a decode step reads, extends and trims it."""

DEFAULT_PAGE_SIZE = 16  # slots; on all platforms where a copy of so few is as fast, byte for byte, as one of more
TPU_PAGE_SIZE = 128  # each page is a copy; on a TPU the fixed cost of a copy outweighs the bytes of 16 slots


def default_page_size(platform: str) -> int:
    """Slots of a page where none are asked for, on a device's platform: 128 on a TPU, 16 elsewhere.

    >>> default_page_size("tpu"), default_page_size("gpu"), default_page_size("cpu")
    (128, 16, 16)
    """
    return TPU_PAGE_SIZE if platform == "tpu" else DEFAULT_PAGE_SIZE
