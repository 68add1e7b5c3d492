"""Trend of a measurement over a whole run, with a bounded number of points."""

from __future__ import annotations

import math

_POINTS = 120


class Trend:
    """Means over equal numbers of consecutive values. When there are `_POINTS` (120) means, neighbours are merged, so
    that memory is bounded for a run of any length."""

    def __init__(self) -> None:
        self._means: list[float] = []
        self._each = 1  # values of a mean
        self._sum, self._count = 0.0, 0  # of the values behind the last mean

    def add(self, value: float | None) -> None:
        """Add the next value; None and NaN are skipped."""
        if value is None or not math.isfinite(value):
            return
        self._sum, self._count = self._sum + value, self._count + 1
        if self._count < self._each:
            return
        self._means.append(self._sum / self._count)
        self._sum, self._count = 0.0, 0
        if len(self._means) == _POINTS:
            self._means = [(self._means[at] + self._means[at + 1]) / 2 for at in range(0, _POINTS, 2)]
            self._each *= 2

    @property
    def points(self) -> tuple[float, ...]:
        """Means, oldest first. The last may be over fewer values than the others."""
        return (*self._means, self._sum / self._count) if self._count else tuple(self._means)
