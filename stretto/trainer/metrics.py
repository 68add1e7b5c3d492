"""The measurements of one training step, gathered micro-batch by micro-batch. Formulas: docs/metrics.md."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean

import torch
from torch import Tensor

from stretto.trainer.critic import explained_variance
from stretto.trainer.losses import DIAGNOSTICS, Loss
from stretto.trainer.stepper import OptimizerStep

_NAMES = {
    "clipped": "clip_fraction",
    "capped": "capped_fraction",
    "ratio": "ratio_mean",
    "behavior_weight": "behavior_weight_mean",
    "kl_behavior": "kl_behavior",
}


class Meter:
    """Adds up; means are over loss tokens unless `docs/metrics.md` says otherwise.

    A measurement that nothing was measured for is absent, never zero: `behavior_logprob_error` without on-policy
    tokens, `entropy` and `kl_reference` unless they are asked for, all of the loss's when no token was trained on.
    """

    def __init__(self) -> None:
        self._losses: list[Tensor] = []
        self._sums: list[Tensor] = []
        self._tokens = 0
        self._entropy: list[Tensor] = []
        self._kl_reference: list[Tensor] = []
        self._error: list[Tensor] = []
        self._agreeing: list[Tensor] = []
        self._steps: list[OptimizerStep] = []
        self._value_losses: list[float] = []
        self._critic_steps: list[OptimizerStep] = []
        self._explained = math.nan
        self._penalised: float | None = None

    def learned(self, loss: Loss, tokens: int, entropy: Tensor | None) -> None:
        """A micro-batch of `tokens` loss tokens has been through the loss."""
        self._losses.append(loss.value.detach())
        self._sums.append(loss.sums)
        self._tokens += tokens
        if loss.kl_reference is not None:
            self._kl_reference.append(loss.kl_reference)
        if entropy is not None:
            self._entropy.append(entropy.detach().sum())

    def agreed(self, behavior_logprobs: Tensor, proximal_logprobs: Tensor, on_policy: Tensor) -> None:
        """Compare trainer and engine where both speak of the same version."""
        difference = (behavior_logprobs - proximal_logprobs).abs()
        self._error.append(difference.masked_fill(~on_policy, 0.0).sum())
        self._agreeing.append(on_policy.sum())

    def stepped(self, step: OptimizerStep) -> None:
        self._steps.append(step)

    def judged(self, values: Sequence[float], returns: Sequence[float]) -> None:
        """What a critic has said of the batch before the step, and what it should have said."""
        self._explained = explained_variance(values, returns)

    def penalised(self, divergence: float) -> None:
        """The mean divergence from the reference policy by which the rewards were lowered."""
        self._penalised = divergence

    def fitted(self, loss: float, step: OptimizerStep) -> None:
        """The critic has taken a step."""
        self._value_losses.append(loss)
        self._critic_steps.append(step)

    def metrics(self) -> dict[str, float]:
        steps = [*self._steps, *self._critic_steps]
        measured: dict[str, float] = {"bad_steps": float(sum(not step.taken for step in steps))}
        if norms := [step.grad_norm for step in self._steps if step.taken]:
            measured["grad_norm"] = fmean(norms)
        if self._tokens:
            measured["loss"] = _total(self._losses) / len(self._steps)
            sums = torch.stack(self._sums).sum(0).tolist()
            measured |= {_NAMES[name]: total / self._tokens for name, total in zip(DIAGNOSTICS, sums, strict=True)}
        if self._entropy:
            measured["entropy"] = _total(self._entropy) / self._tokens
        if self._value_losses:
            measured["value_loss"] = fmean(self._value_losses)
            measured["explained_variance"] = self._explained
        if self._kl_reference:
            measured["kl_reference"] = _total(self._kl_reference) / self._tokens
        if self._penalised is not None:
            measured["kl_reference"] = self._penalised
        if agreeing := _total(self._agreeing):
            measured["behavior_logprob_error"] = _total(self._error) / agreeing
        return {name: value for name, value in measured.items() if math.isfinite(value)}


def _total(values: list[Tensor]) -> float:
    return float(torch.stack(values).sum()) if values else 0.0
