"""A critic: estimates the value of the state before each token, and learns from the returns.

Its body starts as a copy of the initial policy. Its head, a linear map to one number, starts as zero, so the advantages
of the first step are those of a run without a critic.

Axes: T packed token, N loss token, W width of the model.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from stretto.core.records import Batch, StopReason
from stretto.model.hf.layers import checkpoint_activations
from stretto.model.kernels import TRAINING, use_onednn
from stretto.model.packed.logprobs import PackedTokens, hidden_states
from stretto.trainer.batch.minibatch import Minibatch, score_tokens
from stretto.trainer.batch.paths import PathTokens
from stretto.trainer.config import CriticConfig, TrainerConfig
from stretto.trainer.objective.returns import Column, Doubles
from stretto.trainer.optimizer import Optimizer, OptimizerStep, learning_rate
from stretto.trainer.ranks import ALONE, Ranks, on_meta_device


def value_loss(values: Tensor, before: Tensor, returns: Tensor, clip: float) -> Tensor:
    """max((V - R)^2, (V_before + clip(V - V_before, -clip, clip) - R)^2) / 2 for each loss token, [N]. V: `values`,
    with a gradient; V_before: `before`, the critic's before the step; R: `returns`.

    PPO's clipped value loss as in OpenAI's baselines (arXiv 2005.12729, section 3).
    """
    near = before + (values - before).clamp(-clip, clip)
    return torch.maximum((values - returns).square(), (near - returns).square()) / 2


class Critic(Optimizer):
    """A value model with its optimizer.

    Example::

        values = critic.token_values(batch)             # before the step
        loss, step = critic.fit(part, 7, version=6)      # beside each optimizer step of the policy
    """

    def __init__(
        self, model: PreTrainedModel, config: TrainerConfig, settings: CriticConfig, ranks: Ranks = ALONE
    ) -> None:
        """Shard the critic over the ranks. `model`: a copy of the initial policy for the critic alone, loaded with
        packed attention. `config`: optimizer settings, except for the learning rate of `settings`. Raises RecipeError
        if the ranks cannot divide the model, ModelFolderError if its folder lacks a weight (`Ranks.shard`)."""
        self._values, self._steps = _StateValues(model, config, ranks), config.steps
        self._clip, self._truncated = settings.clip, settings.truncated
        optimizer = config.model_copy(update={"learning_rate": settings.learning_rate})
        super().__init__(self._values, model, optimizer, ranks, (self._values.head,))

    def values(self, packed: PackedTokens) -> Tensor:
        """V of the state before each wanted token, [N], float32, differentiable."""
        return self._values(packed)  # type: ignore[no-any-return]

    def token_values(self, batch: Batch) -> dict[str, Doubles]:
        """V of the state before each sampled token of the batch, even if too old to be trained on, by path id. With
        ``truncated = "bootstrap"``, truncated paths also have V of the state after the last token, as their last entry.
        All ranks must call it."""
        capacity = self.config.micro_batch_tokens
        return score_tokens(batch, capacity, self.device, self.values, self._continues, self.ranks)

    def _continues(self, path: PathTokens) -> bool:
        """Whether the state after the path's last token has a value: for truncated paths, with ``truncated =
        "bootstrap"``."""
        return path.stop_reason is StopReason.LENGTH and self._truncated == "bootstrap"

    def fit(self, part: Minibatch, step: int, *, version: int) -> tuple[Tensor, OptimizerStep]:
        """Take one optimizer step towards the returns of a minibatch; returns the loss of this rank's share (averaged
        as the policy's loss) and the step. `step`: number of the training step, for the error. `version`: the policy's
        version before the step, for the learning-rate schedule. Raises TrainingDiverged after `max_bad_steps`
        non-finite gradients in a row."""
        losses: list[Tensor] = []
        for index, micro in enumerate(part.micro_batches):
            self.ranks.reduces(self.trained, last=index == len(part.micro_batches) - 1)
            each = value_loss(self.values(micro.packed), micro.values, micro.returns, self._clip)
            loss = (micro.scale * each).sum()
            loss.backward()
            losses.append(loss.detach())
        rate = learning_rate(self.config, version, self._steps)
        return torch.stack(losses).sum(), self.step(rate, step)


class _StateValues(nn.Module):
    """A value model: the body of `model` with a linear map to one number in place of the output matrix."""

    def __init__(self, model: PreTrainedModel, config: TrainerConfig, ranks: Ranks = ALONE) -> None:
        super().__init__()
        model.eval()
        if not on_meta_device(model):
            use_onednn(model, TRAINING)
        if config.activation_checkpointing:
            checkpoint_activations(model)
        assert isinstance(model.base_model, PreTrainedModel), type(model.base_model)
        self.body = model.base_model
        self.head = _ValueHead(model.config.get_text_config().hidden_size, 1, device=model.device)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)
        self._half, self._context = config.dtype != "float32" and ranks.count == 1, ranks.context

    def forward(self, packed: PackedTokens) -> Tensor:
        """V of the state before each wanted token of all ranks' parts of the row, [N], float32."""
        with torch.autocast(self.body.device.type, dtype=torch.bfloat16, enabled=self._half):
            own = packed.divided(self._context)
            before = own.before if own.part is None else own.part.before
            hidden_NW = hidden_states(self.body, own).index_select(0, before)
        values: Tensor = self.head(hidden_NW)
        return values if own.part is None else own.part.joined(values)


class _ValueHead(nn.Linear):
    """A map to one number, in float32."""

    def forward(self, hidden_NW: Tensor) -> Tensor:
        return hidden_NW.float() @ self.weight[0] + self.bias


def explained_variance(values: Column, returns: Column) -> float:
    """1 - Var(R - V) / Var(R) for values V and returns R of the same tokens: 1 for a perfect critic, 0 for a constant
    one; NaN for fewer than two tokens, or if the returns are all equal.

    >>> explained_variance([1.0, 1.0], [0.0, 2.0]), explained_variance([0.5, 1.5], [0.0, 2.0])
    (0.0, 0.75)
    """
    wanted = np.asarray(returns, np.float64)
    if len(wanted) < 2 or bool((wanted == wanted[0]).all()):
        return math.nan
    return 1 - float(np.var(wanted - np.asarray(values, np.float64)) / np.var(wanted))
