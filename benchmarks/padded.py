"""The same training step as commonly written with transformers' `Trainer`: rows padded on the right to the longest, one
forward pass each, log-probabilities by a softmax over the logits of the answers, AdamW.

The objective is the one of `recipes/arithmetic.toml`: decoupled PPO with one minibatch, the exact mean over all loss
tokens, advantages r - group mean. The tests compare its loss and its weights with those of `stretto.trainer`.

Axes: B row, L longest row, A longest answer, V vocabulary.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from stretto.core.records import Batch
from stretto.trainer.batch.samples import Sample, samples_of
from stretto.trainer.config import TrainerConfig
from stretto.trainer.objective.algorithm import AlgorithmConfig


class PaddedTrainer:
    """Trainer with the objective and optimizer of stretto's, whose rows go through the model padded, as in
    transformers' `Trainer`. Example: ``PaddedTrainer(model, config, algorithm, longest=144, rows=16).train(batch)``"""

    def __init__(
        self,
        model: PreTrainedModel,
        config: TrainerConfig,
        algorithm: AlgorithmConfig,
        longest: int,
        rows: int,
        *,
        by_length: bool = False,
    ) -> None:
        """`model` has one of transformers' own attentions; `rows` go through it together, drawn in random order as
        `Trainer` does by default, or sorted by length (its ``group_by_length``)."""
        self._model, self._config, self._algorithm = model, config, algorithm
        self._longest, self._rows, self._by_length = longest, rows, by_length
        self._half = config.dtype != "float32"
        matrices = [p for p in model.parameters() if p.dim() >= 2]
        vectors = [p for p in model.parameters() if p.dim() < 2]
        self._optimizer = torch.optim.AdamW(
            [
                {"params": matrices, "weight_decay": config.weight_decay},
                {"params": vectors, "weight_decay": 0.0},
            ],
            lr=config.learning_rate,
            betas=(config.beta1, config.beta2),
            eps=config.eps,
            fused=True,
        )

    def train(self, batch: Batch) -> float:
        """Do one optimizer step; return the loss."""
        rows = list(samples_of(batch, self._algorithm, self._longest).samples)
        random.Random(batch.version).shuffle(rows)
        if self._by_length:
            rows.sort(key=lambda row: -len(row.token_ids))
        tokens = sum(len(row.loss_positions) for row in rows)
        total = 0.0
        for first in range(0, len(rows), self._rows):
            loss = self._loss(rows[first : first + self._rows]) / tokens
            loss.backward()
            total += float(loss.detach())
        nn.utils.clip_grad_norm_(self._model.parameters(), self._config.max_grad_norm)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return total

    def _loss(self, rows: Sequence[Sample]) -> Tensor:
        """Minus the sum of the objective over the tokens in the loss of these rows."""
        prompt = min(row.prompt_tokens for row in rows)
        device = self._model.device
        ids_BL = _padded([[int(token) for token in row.token_ids] for row in rows], 0).to(device)
        seen_BL = _padded([[1] * len(row.token_ids) for row in rows], 0).to(device)
        answers = [[0.0] * (row.prompt_tokens - prompt) for row in rows]
        behavior_BA, scores_BA, mask_BA = (
            _padded([[*one, *map(float, values)] for one, values in zip(answers, columns, strict=True)], 0.0).to(device)
            for columns in (
                [row.behavior_logprobs for row in rows],
                [row.advantages for row in rows],
                [[1.0] * len(row.loss_positions) for row in rows],
            )
        )
        kept = ids_BL.shape[1] - prompt + 1  # logits of the answers alone, and of the token before them
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=self._half):
            logits_BAV = self._model(ids_BL, attention_mask=seen_BL, use_cache=False, logits_to_keep=kept).logits
        logprobs_BA = -functional.cross_entropy(
            logits_BAV[:, :-1].float().flatten(0, 1), ids_BL[:, prompt:].flatten(), reduction="none"
        ).view(len(rows), -1)
        loss: Any = self._algorithm.loss
        assert loss.kind == "decoupled_ppo"
        anchor_BA = logprobs_BA.detach()
        ratio_BA = (logprobs_BA - anchor_BA).exp()
        weight_BA = (anchor_BA - behavior_BA).exp()
        cap = getattr(self._algorithm.correction, "high")  # noqa: B009 - of whichever kind it is
        weight_BA = weight_BA.masked_fill(weight_BA > cap, 0.0)
        clipped_BA = ratio_BA.clamp(1 - loss.clip_low, 1 + loss.clip_high)
        surrogate_BA = torch.minimum(ratio_BA * scores_BA, clipped_BA * scores_BA)
        return -(mask_BA * weight_BA * surrogate_BA).sum()


def _padded(rows: Sequence[Sequence[float]], filler: float) -> Tensor:
    longest = max(len(row) for row in rows)
    return torch.tensor([[*row, *[filler] * (longest - len(row))] for row in rows])
