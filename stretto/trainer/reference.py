"""A policy to stay close to: evaluated like the one that is trained, and never changed."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedModel

from stretto.core.records import Batch, Sampling
from stretto.model.logprobs import PackedTokens, check_policy, token_logprobs
from stretto.model.onednn import use_onednn
from stretto.trainer.asking import ask
from stretto.trainer.config import OptimizerConfig


class ReferencePolicy:
    """Its log-probabilities are of the distribution that the engines' setting gives *this* model."""

    def __init__(self, model: PreTrainedModel, config: OptimizerConfig, sampling: Sampling) -> None:
        """`model` must be loaded with the packed attention. Raises ModelFolderError when `check_policy` refuses it."""
        model.eval().requires_grad_(False)
        check_policy(model)
        use_onednn(model)
        self._model, self._sampling = model, sampling
        self._config, self._half = config, config.dtype != "float32"

    @torch.no_grad()
    def logprobs(self, packed: PackedTokens) -> Tensor:
        """log p of the wanted tokens, [N]."""
        with torch.autocast(self._model.device.type, dtype=torch.bfloat16, enabled=self._half):
            return token_logprobs(self._model, packed, self._sampling).logprobs

    def answer_logprobs(self, batch: Batch) -> dict[str, list[float]]:
        """log p of each token of each answer of the batch, masked ones too, by the trajectory's id."""
        return ask(batch, self._config.micro_batch_tokens, self._model.device, self.logprobs)
