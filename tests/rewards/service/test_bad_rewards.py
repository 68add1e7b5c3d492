"""Rewards as they should not be, one row each.

Promises: what a reward returns instead of a number is named and is no verdict; what it raises is no verdict either;
what it writes, or does to what it was given, harms nobody; numbers of numpy are numbers, and arrays of no dimensions
too; beyond a million a number is no reward.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from stretto.core.records import Outcome
from stretto.rewards.service.judging import judge
from stretto.rewards.service.wire import ScoreItem, Worth

ITEM = ScoreItem(prompt="3+8=", completion="11", answer="11")
WORTH = Worth(right=1.0, wrong=0.0)


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
    "a NaN of numpy": (lambda: np.float64("nan"), "returned nan"),
    "a tensor with a gradient": (LikeATensor, "returned LikeATensor"),
    "a generator": (lambda: (number for number in (1.0,)), "returned generator"),
    "an exception as a value": (lambda: ValueError("no"), "returned ValueError"),
    "a division by zero": (lambda: 1 / 0, "raised ZeroDivisionError"),
    "exit": (raising(SystemExit(0)), "raised SystemExit"),
    "interrupt": (raising(KeyboardInterrupt()), "raised KeyboardInterrupt"),
    "no end of a generator": (raising(StopIteration()), "raised StopIteration"),
    "an exception that cannot be pickled": (raising(Unpicklable(1, 2)), ": cannot travel"),
    "endless recursion": (deep, "raised RecursionError"),
    "out of memory": (raising(MemoryError()), "raised MemoryError"),
}


@pytest.mark.parametrize("value", [np.float32(1.0), np.bool_(True), np.array(1.0), np.int64(1)])
def test_a_scalar_of_numpy_is_the_number_that_it_holds(value: object) -> None:
    def reward(prompt: str, completion: str, answer: str) -> Any:
        return value

    assert judge(reward, ITEM, WORTH).reward == 1.0


@pytest.mark.parametrize("name", NO_VERDICT)
def test_what_is_no_number_is_no_verdict_and_says_why(name: str) -> None:
    reward, reason = NO_VERDICT[name]
    verdict = judge(lambda prompt, completion, answer: reward(), ITEM, WORTH)
    assert (verdict.outcome, verdict.reward) == (Outcome.UNDECIDED, None)
    assert reason in verdict.reason


NUMBERS: list[tuple[Any, float]] = [
    (np.float64(0.75), 0.75),
    (np.float32(0.75), 0.75),
    (np.int64(-3), -3.0),
    (np.bool_(True), 1.0),
    (np.array(0.75), 0.75),
    (True, 1.0),
    (0, 0.0),
    (-3, -3.0),
    (1e6, 1e6),
]


@pytest.mark.parametrize(("value", "worth"), NUMBERS)
def test_what_is_a_number_is_the_reward(value: Any, worth: float) -> None:
    assert judge(lambda prompt, completion, answer: value, ITEM, WORTH).reward == worth


def test_megabytes_that_are_printed_are_no_part_of_the_verdict(capsys: pytest.CaptureFixture[str]) -> None:
    def loud(prompt: str, completion: str, answer: str) -> bool:
        print("x" * (2 << 20))
        sys.stderr.write("y" * (2 << 20))
        return completion == answer

    assert judge(loud, ITEM, WORTH).outcome is Outcome.RIGHT
    assert len(capsys.readouterr().out) > 2 << 20


def test_a_reward_cannot_change_what_it_judges() -> None:
    def greedy(prompt: str, completion: str, answer: str) -> bool:
        with pytest.raises(AttributeError):
            ITEM.answer = completion  # type: ignore[misc]
        answer += completion
        return answer == "1111"

    assert judge(greedy, ITEM, WORTH).outcome is Outcome.RIGHT
    assert ITEM.answer == "11"
