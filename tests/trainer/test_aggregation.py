"""Promises: coefficients by hand; means are means; an answer weighs the same in a step, whichever minibatch it is in;
Dr. GRPO's do not depend on how long the answers are."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stretto.core.records import Sampling
from stretto.trainer.batch.samples import Sample
from stretto.trainer.config import TrainerConfig
from stretto.trainer.objective.aggregation import Aggregation, coefficients, fixed_length, sequence_mean
from stretto.trainer.objective.algorithm import AlgorithmConfig
from stretto.trainer.objective.decoupled_ppo import token_mean
from stretto.trainer.trainer import Trainer
from tests.tolerances import near
from tests.trainer.tiny import tiny

LENGTHS = st.lists(st.integers(1, 40), min_size=1, max_size=8)


def test_coefficients_by_hand() -> None:
    assert token_mean([2, 6]) == [0.125, 0.125]
    assert sequence_mean([2, 8], trajectories=2) == [0.25, 0.0625]
    assert fixed_length([2, 6], trajectories=2, longest=8) == [0.0625, 0.0625]


@given(LENGTHS)
def test_means_of_a_constant_are_the_constant(lengths: list[int]) -> None:
    for scales in (token_mean(lengths), sequence_mean(lengths, len(lengths))):
        assert sum(c * n for c, n in zip(scales, lengths, strict=True)) == pytest.approx(1)


@given(LENGTHS)
def test_where_every_answer_has_the_full_length_all_three_agree(lengths: list[int]) -> None:
    full = [7] * len(lengths)
    assert token_mean(full) == pytest.approx(sequence_mean(full, len(full)))
    assert token_mean(full) == pytest.approx(fixed_length(full, len(full), longest=7))


@given(LENGTHS)
def test_with_a_fixed_length_a_token_weighs_the_same_whatever_the_others_are(lengths: list[int]) -> None:
    assert fixed_length(lengths, 8, 40) == fixed_length([1] * len(lengths), 8, 40)


def test_the_recipe_chooses() -> None:
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
