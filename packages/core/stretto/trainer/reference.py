"""The reference policy of a KL term: it is evaluated in the same way as the trained policy, and never trained."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedModel

from stretto.core.records import Batch, Sampling
from stretto.model.packed.logprobs import PackedTokens
from stretto.trainer.adapters import without_adapters
from stretto.trainer.batch.minibatch import score_tokens
from stretto.trainer.config import OptimizerConfig
from stretto.trainer.objective.returns import Doubles
from stretto.trainer.optimizer import Learner, Policy
from stretto.trainer.ranks import ALONE, Ranks


class ReferencePolicy:
    """A reference policy that is a separate model, evaluated with the engines' sampling settings."""

    def __init__(
        self, model: PreTrainedModel, config: OptimizerConfig, sampling: Sampling, ranks: Ranks = ALONE
    ) -> None:
        """Shard `model` over the ranks, and freeze it, in place; it must be loaded with packed attention.

        Several ranks hold its parameters in the dtype of computation, in which they would be gathered anyway, so the
        results are the same.

        Raises:
            ModelFolderError: `check_policy` refuses the model, or the folder of a model on the meta device lacks a
                weight.
            RecipeError: the ranks cannot divide the model's matrices, or its heads.
            ValueError: the temperature is 0 or less.
        """
        if ranks.count > 1 and config.dtype != "float32":
            for parameter in model.parameters():
                parameter.data = parameter.data.to(getattr(torch, config.dtype))
        self._policy = Policy(model.requires_grad_(False), config, sampling, ranks)
        self._config, self._ranks = config, ranks
        ranks.shard(self._policy, model)
        self._policy.check()

    @torch.no_grad()
    def logprobs(self, packed: PackedTokens) -> Tensor:
        """Log-probabilities [N] of the wanted tokens, without a gradient."""
        return self._policy(packed).logprobs  # type: ignore[no-any-return]

    def token_logprobs(self, batch: Batch) -> dict[str, Doubles]:
        """Log-probabilities of all sampled tokens of `batch`, those too old for training included, by path id. All
        ranks must call it."""
        device = self._policy.model.device
        return score_tokens(batch, self._config.micro_batch_tokens, device, self.logprobs, ranks=self._ranks)


class WithoutAdapters:
    """A reference policy that is the trained model with its adapters disabled: the initial policy, without a second
    model in memory."""

    def __init__(self, learner: Learner) -> None:
        self._learner = learner

    @torch.no_grad()
    def logprobs(self, packed: PackedTokens) -> Tensor:
        """Log-probabilities [N] of the wanted tokens, without a gradient."""
        with without_adapters(self._learner.model):
            return self._learner.logprobs(packed).logprobs

    def token_logprobs(self, batch: Batch) -> dict[str, Doubles]:
        """Log-probabilities of all sampled tokens of `batch`, those too old for training included, by path id. All
        ranks must call it."""
        config, device = self._learner.config, self._learner.model.device
        return score_tokens(batch, config.micro_batch_tokens, device, self.logprobs, ranks=self._learner.ranks)


#: A reference policy of the trainer.
Reference = ReferencePolicy | WithoutAdapters
