"""The anchor: the policy around which a step's trust region lies, token by token.

recomputed     the policy before this training step (AReaL, section 5.2): for the first minibatch that of its own
               training forward, for the later ones a forward of their own before the first update
interpolated   between the policy that sampled and the one in training, by their versions (A-3PO): no forward
behavior       the policy that sampled: nothing is decoupled, as in PPO
"""

from __future__ import annotations

from typing import Literal

from torch import Tensor

Anchor = Literal["recomputed", "interpolated", "behavior"]


def interpolated(policy_logprobs: Tensor, behavior_logprobs: Tensor, staleness: Tensor) -> Tensor:
    """log behavior + d / (d + 1) (log policy - log behavior), [N], d = `staleness` in versions.

    A-3PO, arXiv 2512.06547: the share is (v_prox - v_behavior) / (v_policy - v_behavior). The version before the step,
    b, lies d steps after the one that sampled, and the policy that becomes b + 1 lies d + 1 after it. A token that
    version b itself sampled has the logged value.
    """
    share = staleness / (staleness + 1)
    return behavior_logprobs + share * (policy_logprobs - behavior_logprobs)
