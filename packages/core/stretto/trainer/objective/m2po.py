"""M2PO's token mask, the only part of a loss that needs a whole minibatch.

Axes: N loss token of the whole minibatch; K loss token in one of the two quadrants in which PPO clips.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, TypeAlias

from pydantic import Field

if TYPE_CHECKING:
    from torch import Tensor

#: Maps log(policy / anchor) [N] and advantages [N] to the tokens that stay in the loss, [N] bool.
Selection: TypeAlias = "Callable[[Tensor, Tensor], Tensor]"
Threshold = Annotated[float, Field(gt=0, description="largest mean of (log ratio)^2 over the tokens in the quadrants")]


def m2po_mask(log_ratio: Tensor, advantages: Tensor, *, threshold: Threshold = 0.04) -> Tensor:
    """Keep as many tokens as possible such that the mean of (log u)^2 over kept tokens in the quadrants is at most
    `threshold`; returns the kept tokens, [N] bool.

    M2PO, arXiv 2510.01161, algorithm 1. The quadrants are those in which PPO clips: A > 0 and u > 1, or A < 0 and u <
    1. All other tokens stay, since their gradient pulls the policy back towards the anchor. Tokens with equal (log u)^2
    stay or leave together, so the choice does not depend on their order.
    """
    moment_N = log_ratio.square()
    inside = log_ratio * advantages > 0
    sorted_K = moment_N[inside].sort().values
    mean_K = sorted_K.cumsum(0) / inside[inside].cumsum(0)
    stays = int((mean_K <= threshold).sum())  # the mean of the k smallest never falls with k
    if stays == len(sorted_K):
        return inside.new_ones(inside.shape)
    return ~inside | (moment_N < sorted_K[stays])
