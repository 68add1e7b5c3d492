"""A policy to stay close to: evaluated like the one that is trained, and never changed."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedModel

from stretto.core.records import Batch, Sampling
from stretto.model.layers import decoder_layers
from stretto.model.logprobs import PackedTokens
from stretto.trainer.asking import ask
from stretto.trainer.config import OptimizerConfig
from stretto.trainer.policy import Policy
from stretto.trainer.ranks import ALONE, Ranks


class ReferencePolicy:
    """Its log-probabilities are of the distribution that the engines' setting gives *this* model."""

    def __init__(
        self, model: PreTrainedModel, config: OptimizerConfig, sampling: Sampling, ranks: Ranks = ALONE
    ) -> None:
        """`model` must be loaded with the packed attention. Raises ModelFolderError when `check_policy` refuses it."""
        self._policy, self._config, self._ranks = Policy(model.requires_grad_(False), config, sampling), config, ranks
        ranks.divide(self._policy, decoder_layers(model))

    @torch.no_grad()
    def logprobs(self, packed: PackedTokens) -> Tensor:
        """log p of the wanted tokens, [N]."""
        return self._policy(packed).logprobs  # type: ignore[no-any-return]

    def answer_logprobs(self, batch: Batch) -> dict[str, list[float]]:
        """log p of each token of each answer of the batch, masked ones too, by the trajectory's id."""
        device = self._policy.model.device
        return ask(batch, self._config.micro_batch_tokens, device, self.logprobs, ranks=self._ranks)
