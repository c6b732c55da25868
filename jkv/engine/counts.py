"""How many tokens a turn has: a histogram of fixed size, however many turns it counts."""

import numpy as np

DOUBLINGS = 24  # the last bucket has all above 2**23


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
