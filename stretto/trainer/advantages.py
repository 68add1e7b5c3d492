"""Advantages: one number per trajectory, one function per equation.

There is no critic, and discount and lambda are 1 (AReaL, appendix B.1): every token of a trajectory has the advantage
of its reward. A group whose rewards are all equal says nothing, and gets zeros.

All functions take the rewards of each group of a batch and return advantages of the same shape.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from stretto.trainer.config import AlgorithmConfig

Groups = Sequence[Sequence[float]]


def group_normalised(rewards: Groups, eps: float) -> list[list[float]]:
    """GRPO (DeepSeekMath, arXiv 2402.03300, section 4.1.2): (r - mean) / (std + eps), population std.

    >>> group_normalised([[1.0, 0.0, 0.0, 1.0], [1.0, 1.0]], eps=0.0)
    [[1.0, -1.0, -1.0, 1.0], [0.0, 0.0]]
    """
    advantages = []
    for centred in group_centred(rewards):
        deviation = math.sqrt(math.fsum(a * a for a in centred) / len(centred)) if centred else 0.0
        advantages.append([a / (deviation + eps) if deviation else 0.0 for a in centred])
    return advantages


def group_centred(rewards: Groups) -> list[list[float]]:
    """Dr. GRPO (arXiv 2503.20783, section 3.2): r - mean."""
    return [[r - math.fsum(group) / len(group) if _differs(group) else 0.0 for r in group] for group in rewards]


def leave_one_out(rewards: Groups) -> list[list[float]]:
    """RLOO (arXiv 2402.14740, equation 10): r - mean of the other rewards; 0 for an only child.

    >>> leave_one_out([[1.0, 0.0, 0.0], [1.0]])
    [[1.0, -0.5, -0.5], [0.0]]
    """
    return [
        [a * len(group) / (len(group) - 1) if len(group) > 1 else 0.0 for a in group]
        for group in group_centred(rewards)
    ]


def batch_normalised(rewards: Groups, tokens: Sequence[Sequence[int]], eps: float) -> list[list[float]]:
    """AReaL, appendix B.1: (r - mean) / (std + eps) over all tokens of the batch; long answers weigh more.

    `tokens` holds the loss tokens of each trajectory. The rewards of a trajectory without any count nothing.
    """
    pairs = [(r, n) for group, counts in zip(rewards, tokens, strict=True) for r, n in zip(group, counts, strict=True)]
    total = sum(n for _, n in pairs)
    if not total or not _differs([r for r, n in pairs if n]):
        return [[0.0] * len(group) for group in rewards]
    mean = math.fsum(r * n for r, n in pairs) / total
    deviation = math.sqrt(math.fsum(n * (r - mean) ** 2 for r, n in pairs) / total)
    return [[(r - mean) / (deviation + eps) for r in group] for group in rewards]


def advantages(config: AlgorithmConfig, rewards: Groups, tokens: Sequence[Sequence[int]]) -> list[list[float]]:
    """The advantages that the recipe asks for."""
    match config.advantages:
        case "group":
            return group_normalised(rewards, config.advantage_eps)
        case "group_mean":
            return group_centred(rewards)
        case "leave_one_out":
            return leave_one_out(rewards)
        case "batch":
            return batch_normalised(rewards, tokens, config.advantage_eps)


def _differs(rewards: Sequence[float]) -> bool:
    """Exact, so that rounding in a mean never makes a signal out of equal rewards."""
    return any(r != rewards[0] for r in rewards)
