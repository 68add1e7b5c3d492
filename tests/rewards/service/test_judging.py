"""What a reward returns becomes a verdict.

Promises: a bool is worth what the recipe says; a number within ±1e6 is the reward; everything else, and every
exception, is undecided with its reason, and never a zero.
"""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.core.records import Outcome, Verdict
from stretto.rewards.service.judging import judge, verdict_of
from stretto.rewards.service.wire import ScoreItem, Worth

PAPER = Worth(right=5.0, wrong=-5.0)
ITEM = ScoreItem(prompt="3+8=", completion="11", answer="11")


def test_a_bool_is_worth_what_the_recipe_says() -> None:
    assert verdict_of(True, PAPER) == Verdict(outcome=Outcome.RIGHT, reward=5.0)
    assert verdict_of(False, PAPER) == Verdict(outcome=Outcome.WRONG, reward=-5.0)


@given(st.floats(-1e6, 1e6) | st.integers(-(10**6), 10**6))
def test_a_number_is_the_reward_and_right_above_the_middle(value: float) -> None:
    verdict = verdict_of(value, PAPER)
    assert verdict.reward == value
    assert (verdict.outcome is Outcome.RIGHT) == (value > 0)


@pytest.mark.parametrize("value", [None, "1", math.nan, math.inf, -math.inf, 10**400, 1e6 + 1, -1e7, [1.0], 1j])
def test_anything_else_is_undecided_with_its_reason(value: object) -> None:
    verdict = verdict_of(value, PAPER)
    assert verdict.outcome is Outcome.UNDECIDED
    assert verdict.reward is None
    assert verdict.reason.startswith("the reward returned ")


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise RuntimeError


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (ValueError("no digits"), "the reward raised ValueError in {place}: no digits"),
        (SystemExit(), "the reward raised SystemExit in {place}"),
        (KeyboardInterrupt(), "the reward raised KeyboardInterrupt in {place}"),
        (Unspeakable(), "the reward raised Unspeakable in {place}: (its message cannot be shown)"),
    ],
)
def test_whatever_a_reward_raises_is_a_reason_with_file_and_line(error: BaseException, reason: str) -> None:
    def raising(prompt: str, completion: str, answer: str) -> bool:
        raise error

    reason = reason.format(place=f"{__file__}:{raising.__code__.co_firstlineno + 1}")
    verdict = judge(raising, ITEM, PAPER)
    assert (verdict.outcome, verdict.reward, verdict.reason) == (Outcome.UNDECIDED, None, reason)


def test_the_line_is_that_of_the_reward_whichever_library_raised() -> None:
    def raising(prompt: str, completion: str, answer: str) -> bool:
        return bool(json.loads(completion)["no such key"])

    place = f"{__file__}:{raising.__code__.co_firstlineno + 1}"
    assert judge(raising, ScoreItem("", "{", ""), PAPER).reason.startswith(
        f"the reward raised JSONDecodeError in {place}: "
    )


def test_what_is_no_verdict_is_told_with_the_place_of_the_function() -> None:
    def forgetful(prompt: str, completion: str, answer: str) -> None: ...

    place = f"({__file__}:{forgetful.__code__.co_firstlineno})"
    assert judge(forgetful, ITEM, PAPER).reason.endswith(place)  # type: ignore[arg-type]


class Scalar:
    """As numpy and torch have them: no float, but one can be had."""

    shape = ()

    def item(self) -> float:
        return 0.5


def test_a_scalar_of_an_array_library_is_the_number_it_holds() -> None:
    assert judge(lambda prompt, completion, answer: Scalar(), ITEM, PAPER).reward == 0.5  # type: ignore[arg-type]


def test_a_reason_is_never_a_whole_document() -> None:
    def raising(prompt: str, completion: str, answer: str) -> bool:
        raise ValueError("x" * 10**6)

    assert len(judge(raising, ITEM, PAPER).reason) == 300
