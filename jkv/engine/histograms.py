"""Histograms of fixed size, however much they count: how long tokens take, and how many tokens a step has."""

import math

import numpy as np

DOUBLINGS = 24  # the last bucket has all above 2**23
LEAST, DECADES, PER_DECADE = 1e-6, 10, 50  # seconds; a bucket is 4.7 % wide


class Latency:
    """Counts of seconds in buckets on a logarithmic scale."""

    def __init__(self) -> None:
        self.counts = np.zeros(DECADES * PER_DECADE, np.int64)

    def add(self, seconds: float, count: int = 1) -> None:
        """Counts `count` times this many seconds; beyond the scale, the last bucket on that side."""
        bucket = int(PER_DECADE * math.log10(max(seconds, LEAST) / LEAST))
        self.counts[min(bucket, len(self.counts) - 1)] += count

    def quantile(self, share: float) -> float:
        """The seconds that a share of all counts does not exceed, to the middle of a bucket; 0 without counts.

        >>> latency = Latency()
        >>> latency.add(0.01, 99)
        >>> latency.add(1.0)
        >>> round(latency.quantile(0.5), 3), round(latency.quantile(0.999), 1)
        (0.01, 1.0)
        """
        total = self.counts.sum()
        if not total:
            return 0.0
        bucket = int(np.searchsorted(np.cumsum(self.counts), max(share * total, 1)))
        return LEAST * 10 ** ((bucket + 0.5) / PER_DECADE)


class Counts:
    """Counts of whole numbers in buckets that end at the powers of two."""

    def __init__(self) -> None:
        self.counts, self.total = np.zeros(DOUBLINGS, np.int64), 0

    def add(self, number: int) -> None:
        """Counts a number above 0, or none."""
        self.counts[min(max(number - 1, 0).bit_length(), DOUBLINGS - 1)] += 1
        self.total += number

    def up_to(self, bound: int) -> int:
        """How many were no larger than a power of two.

        >>> counts = Counts()
        >>> for number in (1, 8, 9):
        ...     counts.add(number)
        >>> counts.up_to(1), counts.up_to(8), counts.up_to(16), counts.total
        (1, 2, 3, 18)
        """
        return int(self.counts[: (bound - 1).bit_length() + 1].sum())
