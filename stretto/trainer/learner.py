"""A policy with its optimizer: what reinforcement learning and learning from examples have in common."""

from __future__ import annotations

from transformers import PreTrainedModel

from stretto.core.records import Sampling
from stretto.model.hf.layers import checkpoint_activations
from stretto.model.packed.logprobs import PackedTokens, TokenLogprobs
from stretto.trainer.config import OptimizerConfig
from stretto.trainer.optimizer import Optimizer
from stretto.trainer.parallel.ranks import ALONE, Ranks
from stretto.trainer.policy import Policy

#: The model's own distribution; how long answers may become makes no difference to it.
UNCHANGED = Sampling(max_tokens=1)


class Learner(Optimizer):
    """Forward, backward by the caller, step.

    Example::

        (-learner.logprobs(packed).logprobs.mean()).backward()
        learner.step(learning_rate=1e-4, training_step=0)
    """

    def __init__(
        self, model: PreTrainedModel, config: OptimizerConfig, sampling: Sampling = UNCHANGED, ranks: Ranks = ALONE
    ) -> None:
        """Raises ModelFolderError when `check_policy` refuses the model, ValueError for a temperature of 0 or less."""
        self._policy = Policy(model, config, sampling)
        if config.activation_checkpointing:
            checkpoint_activations(model)
        super().__init__(self._policy, config, ranks)
        self.model = model

    def logprobs(self, packed: PackedTokens, *, entropy: bool = False) -> TokenLogprobs:
        """log p of the wanted tokens, [N], as they are drawn."""
        return self._policy(packed, entropy=entropy)  # type: ignore[no-any-return]
