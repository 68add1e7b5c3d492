"""The planned run in numbers: model shape, lengths, and settings that cost time or memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from stretto.core.records import Record
from stretto.engine.config import EngineConfig
from stretto.rollout.config import RolloutConfig
from stretto.trainer.config import TrainerConfig
from stretto_foresight.planner.lengths import Lengths

BYTES: Mapping[str, int] = {"float32": 4, "bfloat16": 2, "float16": 2}


class ModelShape(Record, frozen=True):
    """Shape of a decoder-only transformer. `parameters` counts tied embeddings once.

    Example: Qwen2.5-7B is ``ModelShape(7_615_616_512, 28, 3584, 28, 4, 128, 152_064, tied=False)``.
    """

    parameters: int
    layers: int
    hidden_size: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    tied: bool

    @property
    def embedding(self) -> int:
        """Number of weights of the embedding, equal to that of the output matrix."""
        return self.vocab_size * self.hidden_size

    @property
    def body(self) -> int:
        """Number of weights that every token is multiplied with, without the output matrix."""
        return self.parameters - self.embedding * (1 if self.tied else 2)

    @property
    def width(self) -> int:
        """Width of all attention heads together."""
        return self.heads * self.head_dim

    def cache_bytes(self, dtype: str) -> int:
        """KV cache bytes of one token in all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim * BYTES[dtype]


@dataclass(frozen=True)
class Job:
    """A recipe as the planner sees it. `recomputes`: its objective needs log-probabilities of the policy before the
    step; `converses`: it has a workflow."""

    shape: ModelShape
    lengths: Lengths
    rollout: RolloutConfig
    engine: EngineConfig
    trainer: TrainerConfig
    longest: int  # tokens of the longest prompt with the longest completion
    recomputes: bool = False
    converses: bool = False
    reward_workers: int = 1

    @property
    def completions(self) -> int:
        """Number of completions in one batch."""
        return self.rollout.batch_size * self.rollout.group_size

    @property
    def proximal(self) -> float:
        """Share of a step's tokens whose proximal log-probabilities need an extra forward pass (AReaL, section 5.2);
        the first minibatch gets them from its own."""
        return (self.trainer.minibatches - 1) / self.trainer.minibatches if self.recomputes else 0.0

    @property
    def in_rounds(self) -> bool:
        """Whether groups begin and end together; see `Recipe.in_rounds`."""
        return not self.converses and self.engine.in_rounds(self.rollout.staleness_bounds[1] == 0)

    def with_settings(
        self, rollout: Mapping[str, object], engine: Mapping[str, object], trainer: Mapping[str, object]
    ) -> Job:
        """The job with these settings changed."""
        return replace(
            self,
            rollout=self.rollout.model_copy(update=dict(rollout)),
            engine=self.engine.model_copy(update=dict(engine)),
            trainer=self.trainer.model_copy(update=dict(trainer)),
        )
