"""Promises: coefficients by hand; means are means; an answer weighs the same in a step, whatever its minibatch."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stretto.core.records import Sampling
from stretto.trainer.batch.samples import Sample
from stretto.trainer.config import TrainerConfig
from stretto.trainer.objective.aggregation import Aggregation, coefficients, sequence_mean
from stretto.trainer.objective.algorithm import AlgorithmConfig
from stretto.trainer.objective.decoupled_ppo import token_mean
from stretto.trainer.trainer import Trainer
from tests.tolerances import near
from tests.trainer.tiny import tiny

LENGTHS = st.lists(st.integers(1, 40), min_size=1, max_size=8)


@given(LENGTHS)
def test_means_of_a_constant_are_the_constant(lengths: list[int]) -> None:
    for scales in (token_mean(lengths), sequence_mean(lengths, len(lengths))):
        assert sum(c * n for c, n in zip(scales, lengths, strict=True)) == pytest.approx(1)


def test_coefficients_by_hand() -> None:
    assert coefficients("token_mean", [1, 3], 2, 8) == [0.25, 0.25]
    assert coefficients("sequence_mean", [1, 4], 2, 8) == [0.5, 0.125]
    assert coefficients("fixed_length", [1, 3], 2, 8) == [0.0625, 0.0625]


@pytest.mark.parametrize(("aggregation", "longer"), [("sequence_mean", 1), ("fixed_length", 10), ("token_mean", 10)])
def test_an_answer_of_1000_tokens_weighs_in_a_step_what_its_mean_says(aggregation: Aggregation, longer: int) -> None:
    """Beside ten of 100, from which minibatches of equal tokens part it."""
    rows = [answer(1000), *(answer(100, number) for number in range(1, 11))]
    config = AlgorithmConfig(aggregation=aggregation)
    trainer = Trainer(tiny(), TrainerConfig(learning_rate=1.0, minibatches=2), config, Sampling(max_tokens=1000))
    parts = trainer._minibatches(rows)
    assert sorted(len(part.ids) for part in parts) == [1, 10]
    weights = [micro.sequences.sums(micro.scale) for part in parts for micro in part.micro_batches]
    longest, *others = torch.cat(weights).tolist()
    assert others == near([longest / longer] * 10, 1000)


def answer(tokens: int, number: int = 0) -> Sample:
    places, numbers = tuple(range(1, tokens + 1)), (0.0,) * tokens
    return Sample(f"0/{number}", (0,) * (tokens + 1), 1, places, numbers, (0,) * tokens, numbers)
