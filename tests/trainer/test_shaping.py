"""Promises: the overlong penalty by hand at its corners; overlong, bias, scale, clip in this order; defaults change
nothing."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.trainer.objective.advantages import Shaping, overlong, shaped


def test_the_overlong_penalty_by_hand() -> None:
    # DAPO's numbers: 20,480 tokens of which the last 4,096 cost
    lengths = (1, 16_384, 18_432, 20_480, 30_000)
    assert [overlong(n, 20_480, 4_096, 1.0) for n in lengths] == [0.0, 0.0, -0.5, -1.0, -1.0]
    assert overlong(18_432, 20_480, 4_096, penalty=0.5) == -0.25
    assert overlong(20_480, 20_480, 0, 1.0) == 0.0


def test_overlong_then_bias_then_scale_then_clip() -> None:
    shaping = Shaping(bias=-0.5, scale=10.0, clip=7.0, overlong_buffer=4, overlong_penalty=2.0)
    assert shaped(1.0, 6, 10, shaping) == 5.0
    assert shaped(1.0, 8, 10, shaping) == -5.0  # (1 - 1 - 0.5) * 10
    assert shaped(1.0, 10, 10, shaping) == -7.0
    assert shaped(9.0, 1, 10, shaping) == 7.0


@given(st.floats(-1e6, 1e6), st.integers(0, 99))
def test_the_defaults_change_nothing(reward: float, length: int) -> None:
    assert shaped(reward, length, 99, Shaping()) == reward


@given(st.integers(0, 50), st.integers(1, 50))
def test_a_longer_answer_never_loses_less(length: int, buffer: int) -> None:
    assert overlong(length + 1, 50, buffer, 1.0) <= overlong(length, 50, buffer, 1.0)
    assert overlong(50, 50, buffer, 3.0) == pytest.approx(-3.0)
