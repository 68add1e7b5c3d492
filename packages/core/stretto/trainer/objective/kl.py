"""Estimators of KL(policy || reference) from sampled tokens (Schulman, 2020, "Approximating KL divergence").

x = reference / policy at the sampled token, for tokens that the policy itself sampled:

    k1 = -log x                unbiased; its gradient is the score, whose mean is zero, so as a loss it trains nothing
    k2 = (log x)^2 / 2         biased; its gradient is k1 times the score, whose mean is the gradient of the divergence
    k3 = x - 1 - log x         unbiased, never negative (GRPO, arXiv 2402.03300, equation 4)

Axes: N loss token.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

from stretto.trainer.objective.tokens import bounded

if TYPE_CHECKING:
    from torch import Tensor

#: Maps log policy [N] and log reference [N] to an estimate [N], differentiable with respect to the first.
Divergence: TypeAlias = "Callable[[Tensor, Tensor], Tensor]"


def k1(policy_logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    return policy_logprobs - reference_logprobs


def k2(policy_logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    return (policy_logprobs - reference_logprobs).square() / 2


def k3(policy_logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    log_x = bounded(reference_logprobs - policy_logprobs, lowest=-math.inf)
    return log_x.expm1() - log_x
