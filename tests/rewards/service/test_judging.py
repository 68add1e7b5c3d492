"""What a reward returns becomes a verdict.

Promises: a bool is worth what the recipe says; a number within ±1e6 is the reward, of numpy too; everything else, and
every exception, is undecided with its reason and place, and never a zero; what a reward writes, or does to what it was
given, harms nobody.
"""

import json
import sys
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.core.records import Outcome, Verdict
from stretto.rewards.service.judging import judge, undecided, verdict_of
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


class Scalar:
    """As numpy and torch have them: no float, but one can be had."""

    shape = ()

    def item(self) -> float:
        return 0.5


NUMBERS: list[tuple[Any, float]] = [
    *[(np.float64(0.75), 0.75), (np.float32(0.75), 0.75), (np.int64(-3), -3.0), (np.array(0.75), 0.75)],
    *[(np.bool_(True), 5.0), (np.bool_(False), -5.0), (0, 0.0), (1e6, 1e6), (Scalar(), 0.5)],
]


@pytest.mark.parametrize(("value", "worth"), NUMBERS)
def test_a_scalar_of_an_array_library_is_the_number_that_it_holds(value: Any, worth: float) -> None:
    assert judge(lambda prompt, completion, answer: value, ITEM, PAPER).reward == worth


class Unpicklable(Exception):
    def __init__(self, needed: object, also: object) -> None:
        super().__init__("cannot travel")
        self.inside = lambda: (needed, also)


class LikeATensor:
    """A number with a history, as a tensor with a gradient is one."""

    requires_grad = True

    def __float__(self) -> float:
        return 1.0


def raising(error: BaseException) -> Callable[[], Any]:
    def reward() -> Any:
        raise error

    return reward


def deep(level: int = 0) -> Any:
    return deep(level + 1)


NO_VERDICT: dict[str, tuple[Callable[[], Any], str]] = {
    "None": (lambda: None, "returned NoneType"),
    "a text": (lambda: "1", "returned str"),
    "NaN": (lambda: float("nan"), "returned nan"),
    "infinity": (lambda: float("-inf"), "returned -inf"),
    "a huge integer": (lambda: 10**400, "beyond any float"),
    "a list": (lambda: [1.0, 1.0], "returned list"),
    "a dict": (lambda: {"reward": 1.0}, "returned dict"),
    "a complex number": (lambda: 1j, "returned complex"),
    "an array": (lambda: np.array([1.0]), "returned ndarray"),
    "a text of numpy": (lambda: np.str_("1"), "returned str"),
    "a number that overflows sums": (lambda: 1e308, "returned 1e+308; it must lie between ±1e+06"),
    "a small number that overflows sums": (lambda: -1_000_001, "returned -1e+06; it must lie between ±1e+06"),
    "a number just beyond the bound": (lambda: 1e6 + 1, "returned 1e+06; it must lie between ±1e+06"),
    "a NaN of numpy": (lambda: np.float64("nan"), "returned nan"),
    "a tensor with a gradient": (LikeATensor, "returned LikeATensor"),
    "a generator": (lambda: (number for number in (1.0,)), "returned generator"),
    "an exception as a value": (lambda: ValueError("no"), "returned ValueError"),
    "a division by zero": (lambda: 1 / 0, "raised ZeroDivisionError"),
    "no end of a generator": (raising(StopIteration()), "raised StopIteration"),
    "an exception that cannot be pickled": (raising(Unpicklable(1, 2)), ": cannot travel"),
    "endless recursion": (deep, "raised RecursionError"),
    "out of memory": (raising(MemoryError()), "raised MemoryError"),
}


@pytest.mark.parametrize("name", NO_VERDICT)
def test_what_is_no_number_is_no_verdict_and_says_why(name: str) -> None:
    reward, reason = NO_VERDICT[name]
    verdict = judge(lambda prompt, completion, answer: reward(), ITEM, PAPER)
    assert (verdict.outcome, verdict.reward) == (Outcome.UNDECIDED, None)
    assert verdict.reason.startswith("the reward r")
    assert reason in verdict.reason


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


def test_a_reason_is_never_a_whole_document() -> None:
    def raising(prompt: str, completion: str, answer: str) -> bool:
        raise ValueError("x" * 10**6)

    assert len(judge(raising, ITEM, PAPER).reason) == 300


def test_megabytes_that_are_printed_are_no_part_of_the_verdict(capsys: pytest.CaptureFixture[str]) -> None:
    def loud(prompt: str, completion: str, answer: str) -> bool:
        print("x" * (2 << 20))
        sys.stderr.write("y" * (2 << 20))
        return completion == answer

    assert judge(loud, ITEM, PAPER).outcome is Outcome.RIGHT
    assert len(capsys.readouterr().out) > 2 << 20


def test_a_reward_cannot_change_what_it_judges() -> None:
    def greedy(prompt: str, completion: str, answer: str) -> bool:
        with pytest.raises(AttributeError):
            ITEM.answer = completion  # type: ignore[misc]
        answer += completion
        return answer == "1111"

    assert judge(greedy, ITEM, PAPER).outcome is Outcome.RIGHT
    assert ITEM.answer == "11"


def test_a_reason_with_half_a_character_can_be_sent_and_kept() -> None:
    def reward(prompt: str, completion: str, answer: str) -> float:
        raise ValueError("bad name \ud800")

    verdict = judge(reward, ITEM, PAPER)
    assert verdict.reason.endswith("bad name \\ud800")
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(verdict), type=Verdict) == verdict
    assert undecided("\ud800" * 300).reason == ("\\ud800" * 300)[:300]
