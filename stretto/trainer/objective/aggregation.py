"""What each token weighs in the objective of a minibatch: one coefficient per answer, all its loss tokens alike.

Known before anything is computed, from the loss tokens of *all* answers of the minibatch: so micro-batches add up to
the exact mean, however the answers were packed. Minibatches are about equal in tokens, not in answers. Means over
answers therefore divide by the answers of a minibatch *on average*, those of the batch / its minibatches: every answer
of a batch weighs the same, whichever minibatch it is in.
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


def sequence_mean(lengths: Sequence[int], answers: float) -> list[float]:
    """1 / (answers * loss tokens of the answer): every answer weighs the same (GRPO, arXiv 2402.03300, equation 3).

    >>> sequence_mean([1, 4], answers=2)
    [0.5, 0.125]
    """
    return [1 / (answers * length) for length in lengths]


def fixed_length(lengths: Sequence[int], answers: float, longest: int) -> list[float]:
    """1 / (answers * longest): a token weighs the same in every step (Dr. GRPO, arXiv 2503.20783, section 3.2).

    >>> fixed_length([1, 3], answers=2, longest=4)
    [0.125, 0.125]
    """
    return [1 / (answers * longest)] * len(lengths)


def coefficients(aggregation: Aggregation, lengths: Sequence[int], answers: float, longest: int) -> list[float]:
    """The coefficients that the recipe asks for; `answers` are those of a minibatch on average, `longest` is the most
    tokens that an answer may have."""
    match aggregation:
        case "token_mean":
            return token_mean(lengths)
        case "sequence_mean":
            return sequence_mean(lengths, answers)
        case "fixed_length":
            return fixed_length(lengths, answers, longest)
