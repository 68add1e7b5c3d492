"""What each token weighs in the objective of a minibatch: one coefficient per answer, all its loss tokens alike.

Known before anything is computed, from the loss tokens of *all* answers of the minibatch: so micro-batches add up to
the exact mean, however the answers were packed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

Aggregation = Literal["token_mean", "sequence_mean", "fixed_length"]


def token_mean(lengths: Sequence[int]) -> list[float]:
    """1 / all loss tokens: a long answer weighs more (DAPO, arXiv 2503.14476, equation 8; AReaL).

    >>> token_mean([1, 3])
    [0.25, 0.25]
    """
    return [1 / sum(lengths)] * len(lengths)


def sequence_mean(lengths: Sequence[int]) -> list[float]:
    """1 / (answers * loss tokens of the answer): every answer weighs the same (GRPO, arXiv 2402.03300, equation 3).

    >>> sequence_mean([1, 4])
    [0.5, 0.125]
    """
    return [1 / (len(lengths) * length) for length in lengths]


def fixed_length(lengths: Sequence[int], longest: int) -> list[float]:
    """1 / (answers * longest): a token weighs the same in every step (Dr. GRPO, arXiv 2503.20783, section 3.2).

    >>> fixed_length([1, 3], longest=4)
    [0.125, 0.125]
    """
    return [1 / (len(lengths) * longest)] * len(lengths)


def coefficients(aggregation: Aggregation, lengths: Sequence[int], longest: int) -> list[float]:
    """The coefficients that the recipe asks for; `longest` is the most tokens that an answer may have."""
    match aggregation:
        case "token_mean":
            return token_mean(lengths)
        case "sequence_mean":
            return sequence_mean(lengths)
        case "fixed_length":
            return fixed_length(lengths, longest)
