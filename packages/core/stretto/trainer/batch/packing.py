"""Decide which sequences are computed together: minibatches (optimizer), shares (ranks), micro-batches (memory).

Pure functions from lengths (tokens) to lists of indices.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence


def micro_batches(lengths: Sequence[int], capacity: int, fewest: int = 1) -> list[list[int]]:
    """Algorithm 1 (AReaL, appendix B.3): indices of the sequences of each micro-batch.

    Sequences are placed longest first. A sequence opens a new micro-batch if there are fewer than `fewest`, or if none
    has room for it. Otherwise, of the micro-batches with room, it joins the one with the fewest sequences. A
    micro-batch exceeds `capacity` (tokens) only if it consists of a single longer sequence.

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
    """Divide sequences into `count` parts with about equal token totals: longest first, each into the lightest part.

    No part is empty: with fewer sequences there are fewer parts. Indices within a part are ascending.

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


def balanced(lengths: Sequence[int], count: int) -> list[list[int]]:
    """Divide sequences into `count` parts with nearly equal token totals, by the largest differencing method; parts may
    be empty.

    Karmarkar and Karp, 1982: start with one division per sequence, in which one part has the sequence and the others
    are empty. While there are several divisions, merge the two whose parts differ most: the heaviest part of one with
    the lightest part of the other, and so on. Totals never differ by more than the longest sequence. Indices within a
    part are ascending.

    >>> balanced([8, 7, 6, 5, 4], 2)   # 8 + 6 and 7 + 5 + 4: more equal than `minibatches`
    [[0, 2], [1, 3, 4]]
    """
    empty: list[tuple[int, list[int]]] = [(0, [])] * (count - 1)
    divisions = [(-length, index, [*empty, (length, [index])]) for index, length in enumerate(lengths)]
    heapq.heapify(divisions)  # heap key: minus the difference, then the index as tie-break
    while len(divisions) > 1:
        (_, index, first), (_, _, second) = heapq.heappop(divisions), heapq.heappop(divisions)
        laid = [(a + b, left + right) for (a, left), (b, right) in zip(first, reversed(second), strict=True)]
        laid.sort(key=lambda part: part[0])
        heapq.heappush(divisions, (laid[0][0] - laid[-1][0], index, laid))
    parts = divisions[0][2] if divisions else [*empty, (0, [])]
    return [sorted(part) for _, part in parts]


def shares(lengths: Sequence[int], capacity: int, fewest: int, ranks: int) -> list[list[list[int]]]:
    """The micro-batches of each rank, as indices into `lengths`. Every rank gets the same number, because all ranks run
    each forward pass together; some may be empty. `fewest`: least number per rank.

    >>> shares([5, 9, 3, 4], capacity=10, fewest=1, ranks=2)   # 9 | nothing and 5, 4 | 3
    [[[1], []], [[0, 3], [2]]]
    """
    own = [
        [[part[i] for i in pack] for pack in micro_batches([lengths[i] for i in part], capacity, fewest)]
        for part in balanced(lengths, ranks)
    ]
    most = max(map(len, own))
    return [packs + [[]] * (most - len(packs)) for packs in own]
