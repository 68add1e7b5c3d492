"""A policy to stay close to: evaluated like the one that is trained, and never changed."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel

from stretto.core.records import Batch, Sampling
from stretto.model.hf.layers import decoder_layers
from stretto.model.packed.logprobs import PackedTokens
from stretto.trainer.batch.scoring import ask
from stretto.trainer.config import OptimizerConfig
from stretto.trainer.learner import Learner
from stretto.trainer.parallel.adapters import without_adapters
from stretto.trainer.parallel.ranks import ALONE, Ranks
from stretto.trainer.policy import Policy


class Reference(Protocol):
    """What a trainer asks of a policy to stay close to."""

    def logprobs(self, packed: PackedTokens) -> Tensor:
        """log p of the wanted tokens, [N], without a gradient."""
        ...

    def answer_logprobs(self, batch: Batch) -> dict[str, list[float]]:
        """log p of each token of each answer of the batch, masked ones too, by the trajectory's id."""
        ...


class ReferencePolicy:
    """A policy of its own: log-probabilities of the distribution that the engines' setting gives *this* model."""

    def __init__(
        self, model: PreTrainedModel, config: OptimizerConfig, sampling: Sampling, ranks: Ranks = ALONE
    ) -> None:
        """`model` must be loaded with the packed attention. Raises ModelFolderError when `check_policy` refuses it."""
        self._policy, self._config, self._ranks = Policy(model.requires_grad_(False), config, sampling), config, ranks
        ranks.divide(self._policy, decoder_layers(model))

    @torch.no_grad()
    def logprobs(self, packed: PackedTokens) -> Tensor:
        return self._policy(packed).logprobs  # type: ignore[no-any-return]

    def answer_logprobs(self, batch: Batch) -> dict[str, list[float]]:
        device = self._policy.model.device
        return ask(batch, self._config.micro_batch_tokens, device, self.logprobs, ranks=self._ranks)


class WithoutAdapters:
    """What a policy with adapters is without them: the one that it began as, and no second model in memory."""

    def __init__(self, learner: Learner) -> None:
        self._learner = learner

    @torch.no_grad()
    def logprobs(self, packed: PackedTokens) -> Tensor:
        with without_adapters(self._learner.model):
            return self._learner.logprobs(packed).logprobs

    def answer_logprobs(self, batch: Batch) -> dict[str, list[float]]:
        config, device = self._learner.config, self._learner.model.device
        return ask(batch, config.micro_batch_tokens, device, self.logprobs, ranks=self._learner.ranks)
