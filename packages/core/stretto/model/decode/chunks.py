"""Chunks of decode attention on a GPU: the cached tokens of each row are cut into chunks of about equal length.

    rows     a a a a a a a a a a        chunks of 4, at most 8     a a a a | a a a a | a a
             b b                                                   b b
             c c c c c                                             c c c c | c
                                                                   (three places are left empty)

The number of places for chunks depends only on the number of rows, so one captured CUDA graph serves all steps with
that many rows. All chunks of a step have about the same length, chosen by the tokens to read; long rows have more
chunks.

Axes: N place for a chunk, R row.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Chunks:
    """The chunks of one step.

    Example: the drawing above is ``cut([0, 0, 0], [10, 2, 5], most=8, grain=4)``: items ``(0, 0, 4) (0, 4, 8)
    (0, 8, 10) (1, 0, 2) (2, 0, 4) (2, 4, 5)`` and two empty places, bounds ``0 3 4 6``.
    """

    items: Ints  # [N, 3] row, first token, end token (exclusive); zeros for empty places
    bounds: Ints  # [R + 1], row r has the chunks bounds[r] to bounds[r + 1] - 1


def cut(firsts: Ints, ends: Ints, most: int, grain: int) -> Chunks:
    """Cut the tokens ``firsts[r] <= p < ends[r]`` of each row into chunks.

    Args:
        firsts: [R], first token to read of each row.
        ends: [R], exclusive ends, greater than `firsts`.
        most: number of places for chunks; greater than R.
        grain: chunk lengths are multiples of this many tokens, except the last of a row.
    """
    seen = ends - firsts
    # ceil(seen / length) < seen / length + 1, so all rows together have at most total / length + R chunks.
    grains = -(-int(seen.sum()) // (grain * (most - len(ends))))
    length = grain * grains
    counts = -(-seen // length)
    bounds = np.concatenate([[0], counts.cumsum()])
    rows = np.arange(len(ends)).repeat(counts)
    starts = firsts[rows] + (np.arange(len(rows)) - bounds[rows]) * length
    items = np.zeros((most, 3), np.int64)
    items[: len(rows)] = np.stack([rows, starts, np.minimum(starts + length, ends[rows])], axis=1)
    return Chunks(items, bounds)
