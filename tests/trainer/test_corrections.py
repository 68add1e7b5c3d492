"""Promises: each correction by hand; without bounds all of them are the plain weight; where the anchor is the policy
that sampled none of them does anything; a masked weight may be infinite."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from stretto.trainer.objective import corrections
from stretto.trainer.objective.corrections import Correction
from stretto.trainer.objective.tokens import LossTokens
from tests.tolerances import near
from tests.trainer.packed_tokens import logs, tokens

LOGS = st.lists(st.tuples(st.floats(-4, -0.01), st.floats(-4, -0.01)), min_size=1, max_size=8)


def pair(anchor: Tensor, behavior: Tensor, lengths: list[int] | None = None) -> LossTokens:
    return tokens([1.0] * len(anchor), anchor, behavior=behavior, lengths=lengths)


def test_a_mask_by_hand() -> None:
    given = pair(logs(0.4, 0.1, 0.9, 0.3), logs(0.2, 0.5, 0.1, 0.2))  # w = 2, 0.2, 9, 1.5
    weights = corrections.mask(given, low=0.5, high=5.0)
    assert weights.weight.tolist() == near([2.0, 0.0, 0.0, 1.5])
    assert weights.corrected.tolist() == [False, True, True, False]
    assert corrections.mask(given, low=0.0, high=5.0).weight.tolist() == near([2.0, 0.2, 0.0, 1.5])


def test_an_infinite_weight_is_masked_too() -> None:
    weights = corrections.mask(pair(torch.tensor([-0.1]), torch.tensor([-400.0])), low=0.0, high=5.0)
    assert weights.weight.tolist() == [0.0]


def test_a_truncation_by_hand() -> None:
    weights = corrections.truncate(pair(logs(0.4, 0.1, 0.9), logs(0.2, 0.5, 0.1)), high=2.5)
    assert weights.weight.tolist() == near([2.0, 0.2, 2.5])
    assert weights.corrected.tolist() == [False, False, True]


def test_without_a_correction_every_weight_is_one() -> None:
    weights = corrections.uncorrected(pair(logs(0.4, 0.2), logs(0.2, 0.2)))  # w = 2, 1
    assert weights.weight.tolist() == [1.0, 1.0]
    assert weights.corrected.tolist() == [True, False]


def test_kpop_by_hand() -> None:
    # rare: p = 0.002, q = 0.001, twice as likely: D(p||q) = 0.002 ln 2 + 0.998 ln(0.998 / 0.999) = 0.0004
    # likely: p = 0.99, q = 0.5, twice as likely too: D(q||p) = 0.5 ln(0.5 / 0.99) + 0.5 ln(0.5 / 0.01) = 1.6
    given = pair(logs(0.002, 0.99), logs(0.001, 0.5))
    weights = corrections.kpop(given, threshold=0.1)
    assert weights.weight.tolist() == near([2.0, 0.0])
    forward = 0.99 * math.log(0.99 / 0.5) + 0.01 * math.log(0.01 / 0.5)
    backward = 0.5 * math.log(0.5 / 0.99) + 0.5 * math.log(0.5 / 0.01)
    assert forward < backward
    assert corrections.kpop(given, threshold=backward + 1e-3).weight.tolist() == near([2.0, 1.98])
    assert corrections.kpop(given, threshold=backward - 1e-3).corrected.tolist() == [False, True]
    # the divergence the other way round counts as much
    assert corrections.kpop(pair(logs(0.5), logs(0.99)), threshold=backward - 1e-3).corrected.tolist() == [True]


def test_kpop_bears_tokens_that_are_certain() -> None:
    weights = corrections.kpop(pair(torch.tensor([0.0, 0.0]), torch.tensor([0.0, -50.0])), threshold=0.1)
    assert weights.weight.tolist() == [1.0, 0.0]


def test_a_sequence_mask_by_hand() -> None:
    # answer 1: w = 4 and 0.25, geometric mean 1: stays; answer 2: w = 2 and 1.125, geometric mean 1.5: leaves
    given = pair(logs(0.8, 0.1, 0.4, 0.45), logs(0.2, 0.4, 0.2, 0.4), lengths=[2, 2])
    weights = corrections.sequence_mask(given, low=0.8, high=1.4)
    assert weights.weight.tolist() == near([4.0, 0.25, 0.0, 0.0])
    assert weights.corrected.tolist() == [False, False, True, True]
    assert corrections.sequence_mask(given, low=0.8, high=1.6).corrected.tolist() == [False] * 4
    assert corrections.sequence_mask(given, low=0.999, high=1.6).corrected.tolist() == [False] * 4


WIDE: dict[str, Correction] = {
    "mask": partial(corrections.mask, low=0.0, high=math.inf),
    "truncate": partial(corrections.truncate, high=math.inf),
    "kpop": partial(corrections.kpop, threshold=math.inf),
    "sequence_mask": partial(corrections.sequence_mask, low=0.0, high=math.inf),
}
NARROW: dict[str, Correction] = {
    "none": corrections.uncorrected,
    "mask": partial(corrections.mask, low=0.999, high=1.001),
    "truncate": partial(corrections.truncate, high=1.001),
    "kpop": partial(corrections.kpop, threshold=1e-6),
    "sequence_mask": partial(corrections.sequence_mask, low=0.999, high=1.001),
}


@pytest.mark.parametrize("name", WIDE)
@given(rows=LOGS)
def test_without_bounds_it_is_the_plain_weight(name: str, rows: list[tuple[float, float]]) -> None:
    anchor, behavior = (torch.tensor(column) for column in zip(*rows, strict=True))
    weights = WIDE[name](pair(anchor, behavior))
    assert torch.equal(weights.weight, (anchor - behavior).exp())
    assert not weights.corrected.any()


@pytest.mark.parametrize("name", NARROW)
@given(rows=LOGS)
def test_where_the_anchor_sampled_there_is_nothing_to_correct(name: str, rows: list[tuple[float, float]]) -> None:
    anchor = torch.tensor([row[0] for row in rows])
    weights = NARROW[name](pair(anchor, anchor))
    assert weights.weight.tolist() == [1.0] * len(rows)
    assert not weights.corrected.any()


@given(LOGS)
def test_on_answers_of_one_token_a_sequence_mask_is_a_mask(rows: list[tuple[float, float]]) -> None:
    anchor, behavior = (torch.tensor(column) for column in zip(*rows, strict=True))
    given = pair(anchor, behavior, lengths=[1] * len(rows))
    one, other = corrections.sequence_mask(given, low=0.5, high=2.0), corrections.mask(given, low=0.5, high=2.0)
    assert torch.equal(one.weight, other.weight)
    assert torch.equal(one.corrected, other.corrected)
