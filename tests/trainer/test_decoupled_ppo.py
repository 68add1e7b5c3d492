"""Promises: A-3PO's interpolation by hand; it lies between the two policies; what the version in training sampled has
the logged value."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from stretto.trainer.objective.decoupled_ppo import interpolated
from tests.tolerances import near, rounding

EXACT = rounding(size=9)


def test_the_interpolation_by_hand() -> None:
    # staleness 0, 1, 3: shares 0, 1/2, 3/4 of the way from -2 to -1
    got = interpolated(torch.full((3,), -1.0), torch.full((3,), -2.0), torch.tensor([0.0, 1.0, 3.0]))
    assert got.tolist() == [-2.0, -1.5, -1.25]


@given(st.floats(-9, 0), st.floats(-9, 0), st.integers(0, 50))
def test_it_lies_between_the_two_and_nears_the_policy_with_age(policy: float, behavior: float, staleness: int) -> None:
    ages = torch.tensor([float(staleness), float(staleness + 1)])
    younger, older = interpolated(torch.full((2,), policy), torch.full((2,), behavior), ages).tolist()
    low, high = min(policy, behavior), max(policy, behavior)
    assert low - EXACT <= younger <= high + EXACT
    assert abs(older - policy) <= abs(younger - policy) + EXACT


@given(st.floats(-9, 0), st.integers(0, 9))
def test_where_the_policies_agree_so_does_the_anchor(logprob: float, staleness: int) -> None:
    got = interpolated(torch.tensor([logprob]), torch.tensor([logprob]), torch.tensor([float(staleness)]))
    assert got.item() == near(logprob)
