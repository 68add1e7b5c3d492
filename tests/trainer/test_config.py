"""Promises: defaults are the paper's; a configuration survives its JSON text; unknown keys and values are refused."""

import math

import pytest
from pydantic import ValidationError

from stretto.trainer.config import SupervisedConfig, TrainerConfig
from stretto.trainer.objective.algorithm import AlgorithmConfig
from stretto.trainer.objective.corrections import CORRECTIONS
from stretto.trainer.objective.surrogates import LOSSES


def test_the_defaults_are_table_3_of_the_paper() -> None:
    config, algorithm = TrainerConfig(), AlgorithmConfig()
    assert (config.learning_rate, config.schedule, config.weight_decay) == (2e-5, "constant", 0.05)
    assert (config.beta1, config.beta2, config.eps, config.max_grad_norm) == (0.9, 0.95, 1e-5, 1.0)
    assert config.minibatches == 4
    assert algorithm.loss == LOSSES("decoupled_ppo", clip_low=0.2, clip_high=0.2)
    assert algorithm.correction == CORRECTIONS("mask", low=0.0, high=math.inf)


@pytest.mark.parametrize("config", [TrainerConfig(keep_versions="all"), AlgorithmConfig(), SupervisedConfig()])
def test_a_configuration_survives_its_json_text(config: TrainerConfig | AlgorithmConfig | SupervisedConfig) -> None:
    assert type(config).model_validate_json(config.model_dump_json()) == config


@pytest.mark.parametrize(
    "wrong",
    [{"step": 3}, {"steps": 0}, {"learning_rate": 0}, {"schedule": "steps"}, {"keep_versions": "some"}, {"eps": 1e-30}],
)
def test_what_a_recipe_must_not_say_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        TrainerConfig.model_validate(wrong)
