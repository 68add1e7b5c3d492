"""The sections of a recipe as classes, so that editors can complete and check their keys.

Example::

    from stretto import sections

    trainer = sections.TrainerConfig(steps=100, learning_rate=1e-3)
    rollout = sections.RolloutConfig(batch_size=4, group_size=8, max_staleness=2)

A mistake in a section that is created alone raises pydantic's ``ValidationError``, which names the key. A section given
as a dict, as in ``stretto.Recipe(trainer={"steps": 100}, ...)``, is validated with the whole recipe: a
`stretto.RecipeError` then has the mistakes of all sections, with what is allowed and the nearest key.
"""

from __future__ import annotations

from stretto.engine.config import EngineConfig
from stretto.launch.recipe.sections import EvaluationConfig, LoggingConfig, ModelConfig, SamplingConfig
from stretto.loop.config import DeadlinesConfig
from stretto.model.hf.config import BuildConfig
from stretto.rewards.config import RewardPart, RewardsConfig
from stretto.rollout.arithmetic import ArithmeticTask
from stretto.rollout.config import RolloutConfig
from stretto.rollout.tasks import DatasetTask, GymSource, JsonlTask, ProgramsTask, RowsSource
from stretto.store.config import StoreConfig
from stretto.trainer.config import LoraConfig, SupervisedConfig, TrainerConfig

__all__ = [
    "ArithmeticTask",
    "BuildConfig",
    "DatasetTask",
    "DeadlinesConfig",
    "EngineConfig",
    "EvaluationConfig",
    "GymSource",
    "JsonlTask",
    "LoggingConfig",
    "LoraConfig",
    "ModelConfig",
    "ProgramsTask",
    "RewardPart",
    "RewardsConfig",
    "RolloutConfig",
    "RowsSource",
    "SamplingConfig",
    "StoreConfig",
    "SupervisedConfig",
    "TrainerConfig",
]
