"""Advantages of whole completions, one function per equation, and the shaped rewards from which they are computed.
`estimators.py` gives them names; `returns.py` has token-level returns.

`rewards` are the rewards of each group of a batch. The result has one number per completion, in the same nesting. A
group of equal rewards gets zeros from every function that only compares within groups. Before that, rewards are shaped:

    shaped = clip((reward + overlong(length) + bias) * scale, -clip, clip)
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from pydantic import BaseModel, Field

from stretto.core.states import LARGEST_REWARD, bounded_reward


class Shaping(BaseModel, extra="forbid", frozen=True, ser_json_inf_nan="constants"):
    """`[algorithm.shaping]`: changes to rewards before advantages are computed; the defaults change nothing."""

    scale: float = Field(1.0, gt=0, le=LARGEST_REWARD, description="multiplies the reward")
    bias: float = Field(
        0.0, ge=-LARGEST_REWARD, le=LARGEST_REWARD, description="added to the reward before it is scaled"
    )
    clip: float = Field(math.inf, gt=0, description="largest shaped reward, in either direction")
    overlong_buffer: int = Field(0, ge=0, description="last tokens of sampling.max_tokens with a penalty; 0: none")
    overlong_penalty: float = Field(1.0, ge=0, le=LARGEST_REWARD, description="penalty of the longest completion")


def overlong(length: int, longest: int, buffer: int, penalty: float) -> float:
    """The penalty, 0 or negative, for a completion of `length` tokens: 0 up to `longest - buffer` tokens, then falling
    linearly to -penalty at `longest` and beyond. A `buffer` of 0: no penalty.

    DAPO, arXiv 2503.14476, equation 13 (its L_max and L_cache are `longest` and `buffer`).

    >>> [overlong(length, longest=10, buffer=4, penalty=1.0) for length in (6, 7, 10)]
    [0.0, -0.25, -1.0]
    """
    over = min(length - (longest - buffer), buffer)
    return -penalty * over / buffer if over > 0 else 0.0


def shaped(reward: float, length: int, longest: int, shaping: Shaping) -> float:
    """The shaped reward of a completion of `length` tokens. `longest`: ``sampling.max_tokens``. Rewards beyond ±1e6,
    possible only in old run folders, are clipped first."""
    added = overlong(length, longest, shaping.overlong_buffer, shaping.overlong_penalty)
    return min(max((bounded_reward(reward) + added + shaping.bias) * shaping.scale, -shaping.clip), shaping.clip)


Groups = Sequence[Sequence[float]]


def group_normalised(rewards: Groups, eps: float) -> list[list[float]]:
    """GRPO (DeepSeekMath, arXiv 2402.03300, section 4.1.2): (r - mean) / (std + eps) over the rewards of a group,
    population std; 0 in a group of equal rewards or of one.

    >>> group_normalised([[1.0, 0.0, 0.0, 1.0], [1.0, 1.0]], eps=0.0)
    [[1.0, -1.0, -1.0, 1.0], [0.0, 0.0]]
    """
    advantages = []
    for centred in group_centred(rewards):
        deviation = _norm(centred)
        advantages.append([a / (deviation + eps) if deviation else 0.0 for a in centred])
    return advantages


def group_centred(rewards: Groups) -> list[list[float]]:
    """Dr. GRPO (arXiv 2503.20783, section 3.2): r - mean of its group's rewards; 0 in a group of equal rewards."""
    return [[r - math.fsum(group) / len(group) if _differs(group) else 0.0 for r in group] for group in rewards]


def leave_one_out(rewards: Groups) -> list[list[float]]:
    """RLOO (arXiv 2402.14740, equation 10): r - mean of the other rewards of its group; 0 in a group of one.

    >>> leave_one_out([[1.0, 0.0, 0.0], [1.0]])
    [[1.0, -0.5, -0.5], [0.0]]
    """
    return [
        [a * len(group) / (len(group) - 1) if len(group) > 1 else 0.0 for a in group]
        for group in group_centred(rewards)
    ]


def lite_ppo(rewards: Groups, eps: float) -> list[list[float]]:
    """LitePPO (arXiv 2508.08221): (r - mean of the group) / (std of all rewards of the batch + eps), population std; 0
    in a group of equal rewards.

    >>> lite_ppo([[4.0, 0.0], [2.0, 2.0]], eps=0.0)   # mean 2, variance (4 + 4) / 4 = 2
    [[1.414213562373095, -1.414213562373095], [0.0, 0.0]]
    """
    (everyone,) = group_centred([[r for group in rewards for r in group]])
    deviation = _norm(everyone)
    return [[a / (deviation + eps) if deviation else 0.0 for a in group] for group in group_centred(rewards)]


def batch_normalised(rewards: Groups, tokens: Sequence[Sequence[int]], eps: float) -> list[list[float]]:
    """AReaL, appendix B.1: (r - mean) / (std + eps) over all tokens of the batch, population std; long completions
    weigh more. All 0 if the rewards of completions with loss tokens are equal.

    `tokens`: number of loss tokens of each completion; without loss tokens it does not count in mean and std.
    """
    pairs = [(r, n) for group, counts in zip(rewards, tokens, strict=True) for r, n in zip(group, counts, strict=True)]
    total = sum(n for _, n in pairs)
    if not total or not _differs([r for r, n in pairs if n]):
        return [[0.0] * len(group) for group in rewards]
    mean = math.fsum(r * n for r, n in pairs) / total
    deviation = math.sqrt(math.fsum(n * (r - mean) ** 2 for r, n in pairs) / total)
    return [[(r - mean) / (deviation + eps) for r in group] for group in rewards]


def reinforce_pp_baseline(rewards: Groups, tokens: Sequence[Sequence[int]], eps: float) -> list[list[float]]:
    """REINFORCE++ with a baseline (arXiv 2501.03262): r - mean of the group, then normalised over all tokens of the
    batch by `batch_normalised`."""
    return batch_normalised(group_centred(rewards), tokens, eps)


def _norm(centred: Sequence[float]) -> float:
    """Population standard deviation of numbers whose mean is 0; 0 for none."""
    return math.sqrt(math.fsum(a * a for a in centred) / len(centred)) if centred else 0.0


def _differs(rewards: Sequence[float]) -> bool:
    """Whether the rewards are not all equal. The comparison is exact, so that rounding in a mean never turns equal
    rewards into a signal."""
    return any(r != rewards[0] for r in rewards)
