"""The planned run in numbers: model shape, lengths, and settings that cost time or memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from stretto.engine.config import EngineConfig
from stretto.model.hf.shape import ModelShape
from stretto.rollout.config import RolloutConfig
from stretto.trainer.config import TrainerConfig
from stretto_foresight.planner.lengths import Lengths


@dataclass(frozen=True)
class Job:
    """A recipe as the planner sees it. `recomputes`: the objective needs proximal log-probabilities. `converses`: it
    has a workflow of several turns. `reference`: shape of a second model; `critic`: the trainer has one."""

    shape: ModelShape
    lengths: Lengths
    rollout: RolloutConfig
    engine: EngineConfig
    trainer: TrainerConfig
    longest: int  # tokens of the longest prompt plus the longest completion
    recomputes: bool = False
    converses: bool = False
    reference: ModelShape | None = None
    critic: bool = False
    reward_workers: int = 1

    @property
    def completions(self) -> int:
        """Number of completions in one batch."""
        return self.rollout.batch_size * self.rollout.group_size

    @property
    def proximal(self) -> float:
        """Share of a step's tokens whose proximal log-probabilities need an extra forward pass (AReaL, section 5.2).
        The first minibatch gets them from its own forward pass."""
        return (self.trainer.minibatches - 1) / self.trainer.minibatches if self.recomputes else 0.0

    @property
    def in_rounds(self) -> bool:
        """Whether the groups of a batch begin and end together; see `Recipe.in_rounds`."""
        return not self.converses and self.engine.in_rounds(self.rollout.staleness_bounds[1] == 0)

    def with_settings(
        self, rollout: Mapping[str, object], engine: Mapping[str, object], trainer: Mapping[str, object]
    ) -> Job:
        """Return a copy of the job with these settings of its sections changed."""
        return replace(
            self,
            rollout=self.rollout.model_copy(update=dict(rollout)),
            engine=self.engine.model_copy(update=dict(engine)),
            trainer=self.trainer.model_copy(update=dict(trainer)),
        )
