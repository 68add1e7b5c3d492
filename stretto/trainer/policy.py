"""A policy as one module: its forward is all that is asked of it, so that ranks can gather what that needs."""

from __future__ import annotations

import torch
from torch import nn
from transformers import PreTrainedModel

from stretto.core.records import Sampling
from stretto.model.kernels.choice import TRAINING
from stretto.model.kernels.matmul import use_onednn
from stretto.model.packed.logprobs import PackedTokens, TokenLogprobs, check_policy, token_logprobs
from stretto.trainer.config import OptimizerConfig


class Policy(nn.Module):
    """A model and the distribution that is drawn from it.

    The model stays in evaluation mode: with dropout the policy that is trained would not be the one that sampled.
    """

    def __init__(self, model: PreTrainedModel, config: OptimizerConfig, sampling: Sampling) -> None:
        """`model` must be loaded with the packed attention. Raises ModelFolderError when `check_policy` refuses it,
        ValueError for a temperature of 0 or less."""
        if sampling.temperature <= 0:
            raise ValueError(f"log-probabilities need a temperature above 0, not {sampling.temperature}")
        super().__init__()
        model.eval()
        check_policy(model)
        use_onednn(model, TRAINING)
        self.model = model
        self._sampling, self._half = sampling, config.dtype != "float32"

    def forward(self, packed: PackedTokens, *, entropy: bool = False) -> TokenLogprobs:
        """log p of the wanted tokens, [N], as they are drawn. Products of matrices run in `config.dtype`, that of the
        output matrix included; the logarithms of what it gives are taken in float32."""
        with torch.autocast(self.model.device.type, dtype=torch.bfloat16, enabled=self._half):
            logprobs, entropies = token_logprobs(self.model, packed, self._sampling, entropy=entropy)
        # Copies: of a view of what it returned a divided module would not see the gradient coming.
        return TokenLogprobs(logprobs.clone(), None if entropies is None else entropies.clone())
