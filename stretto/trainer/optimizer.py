"""Parameters with their optimizer: what a policy and a critic have in common."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from stretto.core.errors import TrainingDiverged
from stretto.model.hf.layers import decoder_layers
from stretto.trainer.config import OptimizerConfig
from stretto.trainer.parallel.ranks import ALONE, Ranks


@dataclass(frozen=True)
class OptimizerStep:
    """What one optimizer step did: the gradient's global norm before clipping, and whether it was finite and taken."""

    grad_norm: float
    taken: bool


class Optimizer:
    """AdamW over the parameters of `trained` that need a gradient, divided over the ranks.

    A step whose gradient is not finite is not taken and is counted; `max_bad_steps` of them in a row end the training.
    """

    def __init__(self, trained: nn.Module, config: OptimizerConfig, ranks: Ranks = ALONE) -> None:
        ranks.divide(trained, decoder_layers(trained))
        self.trained = trained
        self.config = config
        self.ranks = ranks
        self.bad_steps_in_a_row = 0
        self.optimizer = _adamw(trained, config)

    @property
    def device(self) -> torch.device:
        return next(self.trained.parameters()).device

    def step(self, learning_rate: float, training_step: int) -> OptimizerStep:
        """Clip the accumulated gradient by its global norm, update the parameters, clear the gradient.

        The gradient is the sum of what all ranks have accumulated, so they all take the step or none does.

        Raises:
            TrainingDiverged: this was the last bad step in a row that the recipe allows.
        """
        norm = float(self.ranks.whole(nn.utils.clip_grad_norm_(self._parameters(), self.config.max_grad_norm)))
        taken = math.isfinite(norm)
        if taken:
            for group in self.optimizer.param_groups:
                group["lr"] = learning_rate
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.bad_steps_in_a_row = 0 if taken else self.bad_steps_in_a_row + 1
        if self.bad_steps_in_a_row >= self.config.max_bad_steps:
            raise TrainingDiverged(training_step, self.bad_steps_in_a_row)
        return OptimizerStep(norm, taken)

    def _parameters(self) -> list[Tensor]:
        return [parameter for group in self.optimizer.param_groups for parameter in group["params"]]


def learning_rate(config: OptimizerConfig, step: int, steps: int) -> float:
    """The learning rate of step 0, 1, ..., steps - 1: a linear warm-up to the top, then constant, or down towards 0.

    >>> config = OptimizerConfig(learning_rate=1.0, warmup_steps=2, schedule="linear")
    >>> [learning_rate(config, step, 6) for step in range(6)]
    [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]
    """
    if step < config.warmup_steps:
        return config.learning_rate * (step + 1) / config.warmup_steps
    done = min(1.0, (step - config.warmup_steps) / max(1, steps - config.warmup_steps))
    match config.schedule:
        case "constant":
            return config.learning_rate
        case "linear":
            return config.learning_rate * (1 - done)
        case "cosine":
            return config.learning_rate * 0.5 * (1 + math.cos(math.pi * done))


def _adamw(model: nn.Module, config: OptimizerConfig) -> torch.optim.AdamW:
    """AdamW; norms and biases (vectors) do not decay."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    betas = (config.beta1, config.beta2)
    return torch.optim.AdamW(groups, lr=config.learning_rate, betas=betas, eps=config.eps, fused=True)
