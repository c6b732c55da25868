"""The tables of forms on the device: one array, in which a new form's table takes a free place, so that it compiles nothing."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jkv.forms.tables import Table

LEAST_ENTRIES = 1 << 16
TABLES = 32  # of a kilobyte or so beside the classes of all tokens, for which there is room at first


def first_entries(vocab_size: int) -> int:
    """Entries of the array where the tables in use need no more.

    >>> first_entries(128_256)
    4194304
    """
    return 1 << (max(LEAST_ENTRIES, TABLES * vocab_size) - 1).bit_length()


class FormStore:
    """Tables (`Table.block`) one after the other in an array of a fixed size, on the device.

    Tables that no row needs are dropped when there is no room. Where those in use need more, the array doubles, and decode
    programs compile once more.

    Args:
      put: places an array on the device or mesh.
    """

    def __init__(self, put: Callable[[np.ndarray], Any]) -> None:
        self._put, self._content, self._end = put, np.zeros(0, np.int16), 0
        self._begins: dict[Table, int] = {}
        self._array: Any = None

    def place(self, tables: Sequence[Table]) -> tuple[Any, dict[Table, int]]:
        """The array, [entries] int16, with these tables in it, and where each begins."""
        needed = list(dict.fromkeys(tables))
        new = [table for table in needed if table not in self._begins]
        if new or self._array is None or self._array.is_deleted():
            if self._end + sum(len(table.block) for table in new) > len(self._content):
                new = needed
                self._lay_out(needed)
            for table in new:
                end = self._end + len(table.block)
                self._content[self._end : end] = table.block
                self._begins[table], self._end = self._end, end
            self._array = self._put(self._content.copy())  # on a CPU, the device may use the host's own memory
        return self._array, {table: self._begins[table] for table in needed}

    @property
    def num_bytes(self) -> int:
        """Bytes of the array; 0 before the first form."""
        return self._content.nbytes

    def _lay_out(self, needed: Sequence[Table]) -> None:
        """Drops all tables, and makes room for some."""
        total = sum(len(table.block) for table in needed)
        least = max(first_entries(len(table.class_of)) for table in needed)
        size = max(len(self._content), least, 1 << (total - 1).bit_length())
        self._content, self._begins, self._end = np.zeros(size, np.int16), {}, 0
