"""The mean over a minibatch, as one coefficient per trajectory, which is the weight of each of its loss tokens. Of a
trajectory that branches, each path with loss tokens counts as one.

Coefficients are computed from the whole minibatch first, so micro-batches sum to the exact mean in any packing.
Minibatches are about equal in tokens, not in trajectories. Means over trajectories therefore divide by the *average*
number of trajectories per minibatch, so that a trajectory weighs the same in any minibatch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from stretto.trainer.objective.decoupled_ppo import token_mean

Aggregation = Literal["token_mean", "sequence_mean", "fixed_length"]


def sequence_mean(lengths: Sequence[int], trajectories: float) -> list[float]:
    """1 / (trajectories * loss tokens of the trajectory) for each of `lengths`, loss tokens of a trajectory: every
    trajectory weighs the same (GRPO, arXiv 2402.03300, equation 3). `trajectories`: mean number per minibatch.

    >>> sequence_mean([1, 4], trajectories=2)
    [0.5, 0.125]
    """
    return [1 / (trajectories * length) for length in lengths]


def fixed_length(lengths: Sequence[int], trajectories: float, longest: int) -> list[float]:
    """1 / (trajectories * longest) for each of `lengths`: a token weighs the same in every step (Dr. GRPO, arXiv
    2503.20783, section 3.2). `trajectories`: mean number per minibatch; `longest`: ``sampling.max_tokens``.

    >>> fixed_length([1, 3], trajectories=2, longest=4)
    [0.125, 0.125]
    """
    return [1 / (trajectories * longest)] * len(lengths)


def coefficients(
    aggregation: Aggregation | Literal["sum"], lengths: Sequence[int], trajectories: float, longest: int
) -> list[float]:
    """The weight of each loss token in the summed loss, one number per trajectory; empty without trajectories.
    `lengths`: loss tokens of each trajectory of a minibatch, at least 1; `trajectories`: mean number per minibatch;
    `longest`: ``sampling.max_tokens``. "sum" gives factors of 1."""
    match aggregation:
        case "token_mean":
            return token_mean(lengths) if lengths else []
        case "sequence_mean":
            return sequence_mean(lengths, trajectories)
        case "fixed_length":
            return fixed_length(lengths, trajectories, longest)
        case "sum":
            return [1.0] * len(lengths)
