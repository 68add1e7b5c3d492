"""A model with its optimizer: what reinforcement learning and learning from examples have in common."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from stretto.core.records import Sampling
from stretto.model.logprobs import PackedTokens, TokenLogprobs, check_policy, token_logprobs
from stretto.model.onednn import use_onednn
from stretto.trainer.config import OptimizerConfig
from stretto.trainer.stepper import Stepper

#: The model's own distribution; how long answers may become makes no difference to it.
UNCHANGED = Sampling(max_tokens=1)


class Learner(Stepper):
    """Forward, backward by the caller, step.

    Example::

        (-learner.logprobs(packed).logprobs.mean()).backward()
        learner.step(learning_rate=1e-4, training_step=0)

    The model stays in evaluation mode: with dropout the policy that is trained would not be the one that sampled.
    """

    def __init__(self, model: PreTrainedModel, config: OptimizerConfig, sampling: Sampling = UNCHANGED) -> None:
        """Raises ModelFolderError when `check_policy` refuses the model, ValueError for a temperature of 0 or less."""
        if sampling.temperature <= 0:
            raise ValueError(f"log-probabilities need a temperature above 0, not {sampling.temperature}")
        model.eval()
        check_policy(model)
        use_onednn(model)
        super().__init__(model, config)
        self.model = model
        self.sampling = sampling

    def logprobs(self, packed: PackedTokens, *, entropy: bool = False) -> TokenLogprobs:
        """log p of the wanted tokens, [N], as they are drawn; the body runs in `config.dtype`, the rest in float32."""
        half = self.config.dtype != "float32"
        with torch.autocast(self.model.device.type, dtype=torch.bfloat16, enabled=half):
            return token_logprobs(self.model, packed, self.sampling, entropy=entropy)
