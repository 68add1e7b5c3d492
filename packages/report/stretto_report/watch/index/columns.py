"""A table as columns that grow: what the pages filter, sort and draw, in memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Column = npt.NDArray[Any]
_FIRST = 1024


class GrowingColumns:
    """Columns of one length, each an array that is doubled when it is full.

    Example::

        table = GrowingColumns({"reward": "f8", "length": "i4"})
        table.append({"reward": [1.0, 0.0], "length": [29, 64]})
        table["reward"].mean()
    """

    def __init__(self, kinds: Mapping[str, str]) -> None:
        """`kinds`: numpy's type of each column."""
        self._arrays = {name: np.zeros(_FIRST, kind) for name, kind in kinds.items()}
        self.rows = 0

    def __getitem__(self, name: str) -> Column:
        """[rows] a view; it is of the rows of now."""
        return self._arrays[name][: self.rows]

    @property
    def held(self) -> int:
        """Bytes in memory."""
        return sum(array.nbytes for array in self._arrays.values())

    def __contains__(self, name: str) -> bool:
        return name in self._arrays

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._arrays)

    def add(self, name: str) -> None:
        """A further column of numbers; the rows so far have none (NaN)."""
        capacity = len(next(iter(self._arrays.values())))
        self._arrays[name] = np.full(capacity, np.nan)

    def append(self, columns: Mapping[str, Sequence[Any] | Column]) -> None:
        """Rows at the end; a column that is not named has NaN in them."""
        count = len(next(iter(columns.values())))
        begin, end = self.rows, self.rows + count
        for name, array in self._arrays.items():
            if end > len(array):
                self._arrays[name] = array = np.resize(array, max(end, 2 * len(array)))
            array[begin:end] = columns.get(name, np.nan)
        self.rows = end

    def put(self, places: Column, columns: Mapping[str, Column]) -> None:
        """Other values for the rows at these places."""
        for name, values in columns.items():
            self._arrays[name][places] = values

    def restore(self, arrays: Mapping[str, Column]) -> bool:
        """Take these columns in place of what is there; False, and nothing is done, if they are not such columns."""
        shapes = {array.shape for array in arrays.values()}
        fitting = all(name in arrays and arrays[name].dtype == own.dtype for name, own in self._arrays.items())
        if not fitting or len(shapes) != 1:
            return False
        self._arrays, (self.rows,) = dict(arrays), next(iter(shapes))
        return True
