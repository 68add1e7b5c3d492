"""The gradient of a loss, accumulated micro-batch by micro-batch. Used by the trainer of a recipe and by the verbs of
the Python API (`stretto_verbs`).

Axes: N loss token, M scored token (a token whose log-probability is wanted, in the loss or not).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from stretto.trainer.batch.minibatch import MicroBatch, Minibatch
from stretto.trainer.metrics import Meter
from stretto.trainer.objective.algorithm import AlgorithmConfig
from stretto.trainer.objective.decoupled_ppo import anchor_logprobs
from stretto.trainer.objective.losses import evaluate, objective
from stretto.trainer.objective.tokens import LossTokens
from stretto.trainer.optimizer import Learner
from stretto.trainer.outcomes import TokenMeter
from stretto.trainer.reference import Reference

#: Gradient of each trained parameter, in the model's order; None where there is none.
Gradient = list[Tensor | None]


def gradient_of(model: nn.Module) -> Gradient:
    """The gradients now held by the model's trained parameters, not copied."""
    return [parameter.grad for parameter in model.parameters() if parameter.requires_grad]


def set_gradient(model: nn.Module, gradient: Gradient) -> None:
    """Replace the gradients of the model's trained parameters, in the order of `gradient_of`. A gradient with another
    layout in memory than its parameter is copied: torch's fused AdamW goes through both by address, and would pair
    other numbers."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for parameter, one in zip(trained, gradient, strict=True):
        if one is not None and one.shape == parameter.shape and one.stride() != parameter.stride():
            one = torch.empty_like(parameter).copy_(one)
        parameter.grad = one


@contextmanager
def whole_gradient(model: nn.Module) -> Iterator[None]:
    """Context manager: the gradient computed in the block is added to the gradient before it. If the block raises, the
    gradient before it is restored."""
    held = gradient_of(model)
    try:
        set_gradient(model, [None] * len(held))
        yield
        new = gradient_of(model)
        sums = [b if a is None else a if b is None else a + b for a, b in zip(held, new, strict=True)]
    except BaseException:
        sums = held
        raise
    finally:
        set_gradient(model, sums)


class Gradients:
    """The gradient of an algorithm's loss in the parameters of a learner.

    Example: the gradient of one minibatch, and a step along it::

        Gradients(learner, algorithm).accumulate(part, Meter(), first=True)
        learner.step(1e-4, 0)
    """

    def __init__(self, learner: Learner, algorithm: AlgorithmConfig, reference: Reference | None = None) -> None:
        """Prepare the loss of `algorithm`. `reference`: the reference policy, needed if the loss has a KL term, else
        None."""
        self._learner, self._anchor, self._reference = learner, algorithm.loss.anchor, reference
        self._objective = objective(algorithm)
        self._entropy = algorithm.entropy or algorithm.entropy_bonus > 0

    @torch.no_grad()
    def evaluated(self, part: Minibatch) -> list[Tensor]:
        """Log-probabilities of the scored tokens [M] of each micro-batch by the present policy, without a gradient."""
        return [self._learner.logprobs(micro.packed).logprobs for micro in part.micro_batches]

    def accumulate(
        self,
        part: Minibatch,
        meter: Meter,
        *,
        first: bool,
        proximal: Sequence[Tensor] | None = None,
        kept: TokenMeter | None = None,
    ) -> list[Tensor]:
        """Add the gradient of one minibatch to the parameters' gradients; returns the log-probabilities of the scored
        tokens [M] of each micro-batch, detached.

        Args:
            meter: gets the metrics.
            first: no parameter has been updated in this step, so the present policy is the proximal policy.
            proximal: log-probabilities of the loss tokens [N] of each micro-batch by the policy before the step; None
                if `first`, or if the loss has another anchor.
            kept: gets the per-token results; None: they are not wanted.

        Raises:
            RecipeError: a user's loss, selection or correction raised.
        """
        selected, found = self._selected(part), list[Tensor]()
        for index, micro in enumerate(part.micro_batches):
            scored, entropy = self._learner.logprobs(micro.packed, entropy=self._entropy)
            policy, entropy = of_loss(micro, scored), None if entropy is None else of_loss(micro, entropy)
            before = policy.detach() if first else (proximal[index] if proximal is not None else None)
            own = policy.detach() if before is None else before
            behavior = micro.behavior_logprobs if len(micro.behavior_logprobs) else own  # unknown: nothing to correct
            tokens = LossTokens(
                behavior_logprobs=behavior,
                anchor_logprobs=anchor_logprobs(self._anchor, policy.detach(), before, behavior, micro.staleness),
                advantages=micro.advantages,
                scale=micro.scale,
                sequences=micro.sequences,
                kept=selected[index],
                reference_logprobs=of_loss(micro, self._reference.logprobs(micro.packed)) if self._reference else None,
            )
            loss = evaluate(self._objective, policy, tokens, entropy)
            self._learner.ranks.reduces(self._learner.trained, last=index == len(part.micro_batches) - 1)
            loss.value.backward()
            meter.computed(loss, len(policy), entropy)
            if kept is not None:
                kept.computed(loss, micro.advantages, before)
            if before is not None and len(micro.behavior_logprobs):
                meter.compared(micro, before)
            found.append(scored.detach())
        return found

    def _selected(self, part: Minibatch) -> Sequence[Tensor | None]:
        """For each micro-batch, which of its loss tokens the loss's selection keeps, [N] bool; None if it has no
        selection."""
        if self._objective.selection is None:
            return [None] * len(part.micro_batches)
        ranks = self._learner.ranks
        pairs = zip(self.evaluated(part), part.micro_batches, strict=True)
        ratios = [of_loss(micro, logprobs) - micro.behavior_logprobs for logprobs, micro in pairs]
        own = torch.cat(ratios)
        log_ratios, start = ranks.all_gather(own)
        advantages, _ = ranks.all_gather(torch.cat([micro.advantages for micro in part.micro_batches]))
        kept = self._objective.selection(log_ratios, advantages)[start : start + len(own)]
        return list(kept.split([len(ratio) for ratio in ratios]))


def of_loss(micro: MicroBatch, scored: Tensor) -> Tensor:
    """Select the values of the loss tokens [N] from the values of all scored tokens [M]."""
    return scored if micro.chosen is None else scored.index_select(0, micro.chosen)
