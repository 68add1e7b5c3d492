"""How good a model is, from several completions of each question: avg@n, pass@k, maj@n, and how sure that is."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from stretto.core.records import Outcome

_Z = 1.959963984540054  # of a 95% interval


def pass_at(k: int, right: int, samples: int) -> float:
    """The chance that one of `k` completions is right, drawn without replacement from `samples` of which `right` are:
    ``1 - C(samples - right, k) / C(samples, k)``, without bias (Chen et al., arXiv 2107.03374, section 2.1).

    >>> pass_at(2, right=1, samples=4)
    0.5

    Raises:
        ValueError: `k` is more than `samples`, or less than 1.
    """
    if not 1 <= k <= samples:
        raise ValueError(f"pass@{k} needs {k} completions or more of each question, there are {samples}")
    return 1.0 - math.comb(samples - right, k) / math.comb(samples, k)


def sizes(samples: int) -> list[int]:
    """The k of pass@k that are shown: powers of two, and all completions.

    >>> sizes(6)
    [1, 2, 4, 6]
    """
    return sorted({2**power for power in range(samples.bit_length()) if 2**power <= samples} | {samples})


def majority(outcomes: Sequence[Outcome], finals: Sequence[str | None]) -> float:
    """Whether the answer that most completions give is right; of several with as many, the share that is.

    Right completions give one answer, the gold one; wrong ones give their final answer as text. Undecided ones, and
    wrong ones without a final answer, give none.

    >>> majority([Outcome.RIGHT, Outcome.WRONG, Outcome.WRONG], ["1/2", "3", "3"])
    0.0
    """
    votes: Counter[str | None] = Counter()  # None: the gold answer
    for outcome, final in zip(outcomes, finals, strict=True):
        if outcome is Outcome.RIGHT:
            votes[None] += 1
        elif outcome is Outcome.WRONG and final is not None:
            votes[final] += 1
    most = max(votes.values(), default=0)
    return 1.0 / sum(count == most for count in votes.values()) if most and votes[None] == most else 0.0


def interval(shares: Sequence[float]) -> tuple[float, float]:
    """A 95% interval of the mean of `shares`, one for each question: Wilson's, for as many questions as there are, or
    for more where completions of one question differ (the design effect of clusters; Miller, arXiv 2411.00640, section
    2.2, has the variance). Nothing is known of an interval without questions: it is (0, 1).

    With one completion for each question it is Wilson's interval.
    """
    count = len(shares)
    if not count:
        return 0.0, 1.0
    mean = math.fsum(shares) / count
    variance = math.fsum((share - mean) ** 2 for share in shares) / count
    effective = count * max(1.0, mean * (1.0 - mean) / variance) if variance > 0 else float(count)
    spread = _Z * math.sqrt(mean * (1.0 - mean) / effective + (_Z / (2.0 * effective)) ** 2)
    middle = mean + _Z * _Z / (2.0 * effective)
    scale = 1.0 + _Z * _Z / effective
    return max(0.0, (middle - spread) / scale), min(1.0, (middle + spread) / scale)
