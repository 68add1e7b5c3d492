"""Growing columnar table in memory, which the pages filter, sort and draw."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Column = npt.NDArray[Any]
_FIRST = 1024


class GrowingColumns:
    """Columns of equal length, each an array that doubles when full.

    Example::

        table = GrowingColumns({"reward": "f8", "length": "i4"})
        table.append({"reward": [1.0, 0.0], "length": [29, 64]})
        table["reward"].mean()
    """

    def __init__(self, kinds: Mapping[str, str]) -> None:
        """`kinds`: numpy dtype of each column."""
        self._arrays = {name: np.zeros(_FIRST, kind) for name, kind in kinds.items()}
        self.rows = 0

    def __getitem__(self, name: str) -> Column:
        """[rows] a view of the current rows of a column."""
        return self._arrays[name][: self.rows]

    @property
    def held(self) -> int:
        """Memory in bytes."""
        return sum(array.nbytes for array in self._arrays.values())

    def __contains__(self, name: str) -> bool:
        return name in self._arrays

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._arrays)

    def add(self, name: str) -> None:
        """Add a numeric column; existing rows get NaN."""
        capacity = len(next(iter(self._arrays.values())))
        self._arrays[name] = np.full(capacity, np.nan)

    def append(self, columns: Mapping[str, Sequence[Any] | Column]) -> None:
        """Append rows, given as columns of equal length; columns that are not given get NaN."""
        count = len(next(iter(columns.values())))
        begin, end = self.rows, self.rows + count
        for name, array in self._arrays.items():
            if end > len(array):
                self._arrays[name] = array = np.resize(array, max(end, 2 * len(array)))
            array[begin:end] = columns.get(name, np.nan)
        self.rows = end

    def put(self, places: Column, columns: Mapping[str, Column]) -> None:
        """Replace the values of some columns in the rows with the indices `places`."""
        for name, values in columns.items():
            self._arrays[name][places] = values

    def restore(self, arrays: Mapping[str, Column]) -> bool:
        """Replace all columns. Return False and change nothing if their names, types or lengths do not fit."""
        shapes = {array.shape for array in arrays.values()}
        fitting = all(name in arrays and arrays[name].dtype == own.dtype for name, own in self._arrays.items())
        if not fitting or len(shapes) != 1:
            return False
        self._arrays, (self.rows,) = dict(arrays), next(iter(shapes))
        return True
