"""Which sequences are computed together: minibatches for the optimizer, micro-batches for the memory.

Pure functions from lengths (tokens) to lists of indices.
"""

from __future__ import annotations

from collections.abc import Sequence


def micro_batches(lengths: Sequence[int], capacity: int, fewest: int = 1) -> list[list[int]]:
    """Algorithm 1 (AReaL, appendix B.3): indices of the sequences of each micro-batch.

    Longest first. A sequence opens a new micro-batch while there are fewer than `fewest` or when none has room for
    it; otherwise it joins, of those with room, the one with the fewest sequences. A sequence longer than `capacity`
    is alone: nothing else ever exceeds it.

    >>> micro_batches([5, 9, 3, 4], capacity=10)   # 9 | 5, 4 | 3
    [[1], [0, 3], [2]]
    """
    batches: list[list[int]] = []
    room: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        fits = [b for b, left in enumerate(room) if lengths[index] <= left]
        if len(batches) < fewest or not fits:
            batches.append([index])
            room.append(capacity - lengths[index])
        else:
            chosen = min(fits, key=lambda b: len(batches[b]))
            batches[chosen].append(index)
            room[chosen] -= lengths[index]
    return batches


def minibatches(lengths: Sequence[int], count: int) -> list[list[int]]:
    """`count` parts of about equal token totals: longest first, each into the lightest part.

    Fewer parts when there are fewer sequences; none is empty. Indices within a part are ascending.

    >>> minibatches([8, 7, 6, 5, 4], 2)   # 8 + 5 + 4 and 7 + 6
    [[0, 3, 4], [1, 2]]
    """
    parts: list[list[int]] = [[] for _ in range(min(count, len(lengths)))]
    totals = [0] * len(parts)
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        lightest = min(range(len(parts)), key=lambda part: (totals[part], len(parts[part])))
        parts[lightest].append(index)
        totals[lightest] += lengths[index]
    return [sorted(part) for part in parts]
