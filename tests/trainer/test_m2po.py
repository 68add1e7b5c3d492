"""Promises: M2PO's choice by hand; it is the largest choice within the threshold; tokens that are pulled back towards
the anchor stay; the order of the tokens, hence the packing, makes no difference."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stretto.trainer.objective.m2po import m2po_mask
from tests.tolerances import rounding

ROWS = st.lists(st.tuples(st.floats(-1, 1), st.sampled_from([-1.0, 0.0, 2.0])), max_size=12)


def test_the_choice_by_hand() -> None:
    # (log u)^2 of those in the quadrants: 0.01 0.04 0.25; means of the smallest: 0.01, 0.025, 0.1. The last pulls back.
    log_ratio = torch.tensor([0.1, -0.2, 0.5, -0.9])
    scores = torch.tensor([1.0, -1.0, 1.0, 1.0])
    assert m2po_mask(log_ratio, scores, threshold=0.04).tolist() == [True, True, False, True]
    assert m2po_mask(log_ratio, scores, threshold=0.02).tolist() == [True, False, False, True]
    assert m2po_mask(log_ratio, scores, threshold=0.2).tolist() == [True] * 4
    assert m2po_mask(log_ratio, scores, threshold=0.001).tolist() == [False, False, False, True]


def test_equal_moments_stay_or_leave_together() -> None:
    log_ratio, scores = torch.tensor([0.1, 0.3, 0.3]), torch.ones(3)
    # with one of the two the mean would be 0.05
    assert m2po_mask(log_ratio, scores, threshold=0.05).tolist() == [True, False, False]


def test_on_the_anchor_and_without_tokens_everything_stays() -> None:
    assert m2po_mask(torch.zeros(3), torch.ones(3), threshold=0.01).tolist() == [True] * 3
    assert m2po_mask(torch.zeros(0), torch.zeros(0), threshold=0.01).tolist() == []


@given(ROWS, st.sampled_from([0.01, 0.04, 0.3]))
def test_what_stays_keeps_the_threshold_and_one_more_would_not(rows: list[tuple[float, float]], most: float) -> None:
    log_ratio, scores = torch.tensor([row[0] for row in rows]), torch.tensor([row[1] for row in rows])
    kept = m2po_mask(log_ratio, scores, threshold=most)
    inside = log_ratio * scores > 0
    assert kept[~inside].all()
    moments = log_ratio.square()
    stay, leave = moments[kept & inside], moments[inside & ~kept]
    if len(stay):
        assert float(stay.mean()) <= most + rounding()
    if len(leave):
        assert stay.max().item() < leave.min().item() if len(stay) else True
        together = torch.cat([stay, leave[leave == leave.min()]])
        assert float(together.mean()) > most - rounding()


@given(ROWS, st.integers(0, 9))
def test_the_order_makes_no_difference(rows: list[tuple[float, float]], seed: int) -> None:
    log_ratio, scores = torch.tensor([row[0] for row in rows]), torch.tensor([row[1] for row in rows])
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed))
    kept = m2po_mask(log_ratio, scores, threshold=0.04)
    assert torch.equal(m2po_mask(log_ratio[order], scores[order], threshold=0.04), kept[order])


@pytest.mark.parametrize("threshold", [0.0, 1e-9])
def test_an_unreachable_threshold_leaves_only_what_is_pulled_back(threshold: float) -> None:
    kept = m2po_mask(torch.tensor([0.5, -0.5]), torch.ones(2), threshold=threshold)
    assert kept.tolist() == [False, True]
