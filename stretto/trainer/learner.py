"""A model with its optimizer: what reinforcement learning and supervised fine-tuning have in common."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from stretto.core.errors import TrainingDiverged
from stretto.core.records import Sampling
from stretto.model.logprobs import PackedTokens, TokenLogprobs, check_policy, token_logprobs
from stretto.model.onednn import use_onednn
from stretto.trainer.config import OptimizerConfig

#: The model's own distribution; how long answers may become makes no difference to it.
UNCHANGED = Sampling(max_tokens=1)


@dataclass(frozen=True)
class OptimizerStep:
    """What one optimizer step did: the gradient's global norm before clipping, and whether it was finite and taken."""

    grad_norm: float
    taken: bool


class Learner:
    """Forward, backward by the caller, step.

    Example::

        (-learner.logprobs(packed).logprobs.mean()).backward()
        learner.step(learning_rate=1e-4, training_step=0)

    The model stays in evaluation mode: with dropout the policy that is trained would not be the one that sampled.
    A step whose gradient is not finite is not taken and is counted; `max_bad_steps` of them in a row end the training.
    """

    def __init__(self, model: PreTrainedModel, config: OptimizerConfig, sampling: Sampling = UNCHANGED) -> None:
        """Raises ModelFolderError when `check_policy` refuses the model, ValueError for a temperature of 0 or less."""
        if sampling.temperature <= 0:
            raise ValueError(f"log-probabilities need a temperature above 0, not {sampling.temperature}")
        model.eval()
        check_policy(model)
        use_onednn(model)
        self.model = model
        self.config = config
        self.sampling = sampling
        self.bad_steps_in_a_row = 0
        self.optimizer = _adamw(model, config)

    def logprobs(self, packed: PackedTokens, *, entropy: bool = False) -> TokenLogprobs:
        """log p of the wanted tokens, [N], as they are drawn; the body runs in `config.dtype`, the rest in float32."""
        half = self.config.dtype != "float32"
        with torch.autocast(self.model.device.type, dtype=torch.bfloat16, enabled=half):
            return token_logprobs(self.model, packed, self.sampling, entropy=entropy)

    def step(self, learning_rate: float, training_step: int) -> OptimizerStep:
        """Clip the accumulated gradient by its global norm, update the parameters, clear the gradient.

        Raises:
            TrainingDiverged: this was the last bad step in a row that the recipe allows.
        """
        norm = float(nn.utils.clip_grad_norm_(self._parameters(), self.config.max_grad_norm))
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
