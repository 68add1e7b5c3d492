"""A policy to stay close to: evaluated like the one that is trained, and never changed."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedModel

from stretto.core.records import Sampling
from stretto.model.layers import decoder_layers
from stretto.model.logprobs import PackedTokens
from stretto.trainer.config import OptimizerConfig
from stretto.trainer.policy import Policy
from stretto.trainer.ranks import ALONE, Ranks


class ReferencePolicy:
    """Its log-probabilities are of the distribution that the engines' setting gives *this* model."""

    def __init__(
        self, model: PreTrainedModel, config: OptimizerConfig, sampling: Sampling, ranks: Ranks = ALONE
    ) -> None:
        """`model` must be loaded with the packed attention. Raises ModelFolderError when `check_policy` refuses it."""
        self._policy = Policy(model.requires_grad_(False), config, sampling)
        ranks.divide(self._policy, decoder_layers(model))

    @torch.no_grad()
    def logprobs(self, packed: PackedTokens) -> Tensor:
        """log p of the wanted tokens, [N]."""
        return self._policy(packed).logprobs  # type: ignore[no-any-return]
