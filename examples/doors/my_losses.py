"""A loss: a quadratic penalty instead of the clip keeps PPO's ratio near 1.

[algorithm]
loss = { kind = "my_losses:quadratic", width = 0.2 }
"""

from __future__ import annotations

from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from stretto.trainer.objective.decoupled_ppo import Terms, proximal_ratio
from stretto.trainer.objective.tokens import LossTokens

Width = Annotated[float, Field(gt=0, description="distance from 1 at which a ratio is not pushed further")]


def quadratic(policy_logprobs: Tensor, tokens: LossTokens, *, width: Width = 0.2) -> Terms:
    """u A - |A| (u - 1)^2 / (2 width): the gradient vanishes where u has moved by `width` in the direction of A.

    Simple Policy Optimization, arXiv 2401.16025.
    """
    ratio = proximal_ratio(policy_logprobs, tokens)
    penalty = tokens.advantages.abs() * (ratio - 1).square() / (2 * width)
    objective = ratio * tokens.advantages - penalty
    return Terms(objective, ratio.detach(), torch.zeros_like(ratio, dtype=torch.bool))
