"""Metrics of one training step: summed over micro-batches on each rank, all-reduced at the end.

Formulas: docs/reference/metrics.md.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean

import torch
from torch import Tensor

from stretto.core.canary import Agreement
from stretto.trainer.batch.minibatch import MicroBatch
from stretto.trainer.critic import explained_variance
from stretto.trainer.objective.losses import DIAGNOSTICS, Loss
from stretto.trainer.objective.returns import Column
from stretto.trainer.optimizer import OptimizerStep
from stretto.trainer.ranks import Ranks

_NAMES = {
    "clipped": "clip_fraction",
    "capped": "capped_fraction",
    "ratio": "ratio_mean",
    "behavior_weight": "behavior_weight_mean",
    "kl_behavior": "kl_behavior",
    "outlier": "outlier_fraction",
}
_LARGEST = "largest error"
_SUMS = ("tokens", "loss", *DIAGNOSTICS, "entropy", "kl_reference", "error", "agreeing", "value_loss")


class Meter:
    """Accumulates the metrics of one step on one rank; means are over loss tokens unless `docs/reference/metrics.md`
    says otherwise.

    Metrics that were not measured are absent, never zero: `behavior_logprob_error` and its maximum without on-policy
    tokens, `entropy` and `kl_reference` if the recipe does not ask for them, all loss metrics if no token was trained.
    """

    def __init__(self) -> None:
        self._sums: dict[str, list[Tensor]] = {name: [] for name in _SUMS}
        self._errors: list[Tensor] = []  # largest error of each micro-batch
        self._by_sequence: list[tuple[tuple[str, ...], Tensor]] = []  # engines [S]; sum of errors, tokens [S, 2]
        self._steps: list[OptimizerStep] = []
        self._critic_steps: list[OptimizerStep] = []
        self._explained = math.nan
        self._kl_in_reward: float | None = None

    def computed(self, loss: Loss, tokens: int, entropy: Tensor | None) -> None:
        """Add the loss of a micro-batch of `tokens` loss tokens. `entropy`: of each token; None: not measured."""
        self._sums["loss"].append(loss.value.detach())
        self._sums["tokens"].append(loss.sums.new_full((), tokens))
        for name, diagnostic in zip(DIAGNOSTICS, loss.sums, strict=True):
            self._sums[name].append(diagnostic)
        if loss.kl_reference is not None:
            self._sums["kl_reference"].append(loss.kl_reference)
        if entropy is not None:
            self._sums["entropy"].append(entropy.detach().sum())

    def compared(self, micro: MicroBatch, proximal_logprobs: Tensor) -> None:
        """Add the absolute differences between the log-probabilities of engines and trainer, for tokens of the version
        before the step whose context this version has computed too (`MicroBatch.mixed`). `proximal_logprobs`: [N], by
        the trainer before the step."""
        on_policy = micro.staleness == 0 if micro.mixed is None else (micro.staleness == 0) & ~micro.mixed
        difference = (micro.behavior_logprobs - proximal_logprobs).abs().masked_fill(~on_policy, 0.0)
        sums_S = micro.sequences.sums(torch.stack([difference, on_policy.to(difference.dtype)], dim=1))
        self._by_sequence.append((micro.engines, sums_S))
        self._errors += [difference.max()] if len(difference) else []
        self._sums["error"].append(difference.sum())
        self._sums["agreeing"].append(on_policy.sum())

    def stepped(self, step: OptimizerStep) -> None:
        """Add an optimizer step of the policy, taken or skipped."""
        self._steps.append(step)

    def valued(self, values: Column, returns: Column) -> None:
        """Set the critic's values before the step, and their targets, of all loss tokens: for `explained_variance`."""
        self._explained = explained_variance(values, returns)

    def kl_in_reward(self, divergence: float) -> None:
        """Set the mean KL of the sampled tokens, not weighted. Called only if KL is subtracted from the rewards."""
        self._kl_in_reward = divergence

    def fitted(self, loss: Tensor, step: OptimizerStep) -> None:
        """Add an optimizer step of the critic, and the critic's loss over this rank's share."""
        self._sums["value_loss"].append(loss)
        self._critic_steps.append(step)

    def metrics(self, ranks: Ranks) -> dict[str, float]:
        """Metrics of the whole step by name, the same on every rank; all ranks must call it. Metrics that are not
        finite are left out."""
        steps = [*self._steps, *self._critic_steps]
        measured: dict[str, float] = {"bad_steps": float(sum(not step.taken for step in steps))}
        if norms := [step.grad_norm for step in self._steps if step.taken]:
            measured["grad_norm"] = fmean(norms)
        sums, largest = self._totals(ranks)
        if tokens := sums["tokens"]:
            measured["loss"] = sums["loss"] / max(1, len(self._steps))
            measured |= {name: sums[diagnostic] / tokens for diagnostic, name in _NAMES.items()}
            measured["effective_samples"] = sums["weight"] ** 2 / (tokens * sums["square"]) if sums["square"] else 0.0
            measured |= {name: sums[name] / tokens for name in ("entropy", "kl_reference") if self._sums[name]}
        if self._critic_steps:
            measured["value_loss"] = sums["value_loss"] / len(self._critic_steps)
            measured["explained_variance"] = self._explained
        if self._kl_in_reward is not None:
            measured["kl_reference"] = self._kl_in_reward
        if sums["agreeing"]:
            measured["behavior_logprob_error"] = sums["error"] / sums["agreeing"]
            errors, _ = ranks.all_gather(torch.tensor([largest], dtype=torch.float64))
            measured["behavior_logprob_error_max"] = float(errors.max())
        return {name: value for name, value in measured.items() if math.isfinite(value)}

    def agreement(self, ranks: Ranks, engines: Sequence[str]) -> tuple[Agreement, ...]:
        """Mean absolute difference of each engine's log-probabilities from the trainer's, over the tokens that
        `compared` counts; engines without such tokens are left out. `engines`: all engines of the batch, the same on
        every rank. All ranks must call it."""
        own = {name: [0.0, 0.0] for name in engines}
        names = [name for each, _ in self._by_sequence for name in each]
        sums = torch.cat([sums_S for _, sums_S in self._by_sequence]).tolist() if names else []
        for name, (error, tokens) in zip(names, sums, strict=True):
            own[name][0] += error
            own[name][1] += tokens
        totals = ranks.all_reduce(torch.tensor(list(own.values()), dtype=torch.float64).reshape(-1)).reshape(-1, 2)
        return tuple(
            Agreement(name, round(tokens), error / tokens)
            for name, (error, tokens) in zip(engines, totals.tolist(), strict=True)
            if name and tokens
        )

    def _totals(self, ranks: Ranks) -> tuple[dict[str, float], float]:
        """Every sum over micro-batches and ranks, by name, 0 for one that was not measured; and this rank's largest
        error."""
        # Read from the device once: each read waits for all that was launched.
        sums = {name: _sum(values).double() for name, values in self._sums.items() if values}
        sums |= {_LARGEST: torch.stack(self._errors).max().double()} if self._errors else {}
        found = dict(zip(sums, torch.stack(list(sums.values())).tolist(), strict=True)) if sums else {}
        own = [found.get(name, 0.0) for name in self._sums]
        totals = ranks.all_reduce(torch.tensor(own, dtype=torch.float64))
        return dict(zip(self._sums, totals.tolist(), strict=True)), found.get(_LARGEST, 0.0)


def _sum(values: list[Tensor]) -> Tensor:
    return values[0] if len(values) == 1 else torch.stack(values).sum()
