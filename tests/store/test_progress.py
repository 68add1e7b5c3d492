"""Promises: the line of a run's progress has step, time, held-out accuracy, reward, length, staleness and what is
slowest, in 120 characters at most whatever the numbers are; what it leaves out first is what matters least.
"""

from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.store.series.metrics import StepMetrics
from stretto.store.series.progress import LEGEND, LONGEST, RunProgress, brief, clock, lesson_line, seconds_left
from tests.store.lines import evaluation_line, step_line

BUSY = {"engine-0": 0.89, "engine-1": 0.93, "trainer": 0.74, "rewards": 0.2, "conductor": None}


def step(number: int, busy: Mapping[str, float | None] = BUSY, **changed: float) -> StepMetrics:
    """Steps of a tenth of a second, with 1,400 tokens trained and 1,800 generated in each."""
    numbers: dict[str, float] = {
        "rl_seconds": 0.1 * number,
        "generated_tokens": 1800 * number,
        "trained_tokens": 1400,
        "reward": 0.95,
    }
    numbers |= {"length_mean": 24.4, "staleness_mean": 1.6, "staleness_max": 2, "max_staleness": 2.0}
    return step_line(number, busy=busy, **(numbers | changed))


def test_an_accuracy_without_one_verdict_is_unknown() -> None:
    progress = RunProgress(4)
    progress.step(step(1))
    progress.evaluated(evaluation_line(0, 0.0, undecided=511))
    assert " | held-out 0.0 % | " in progress.line()
    progress.evaluated(evaluation_line(0, 0.0, undecided=512))
    assert " | held-out – | " in progress.line()


def test_a_line_has_what_one_wants_to_know() -> None:
    progress = RunProgress(2700)
    assert progress.line() == ""
    progress.evaluated(evaluation_line(0, 0.924))
    for number in range(1, 323):
        progress.step(step(number))
    assert progress.line() == (
        "step 322/2700 0:32 left 3:58 | held-out 92.4 % | reward .95 | len 24 | stale 1.6/2 | gen 18k t/s 91 % | "
        "train 14k 74 %"
    )


@pytest.mark.parametrize(
    ("busy", "end"),
    [
        (
            {"engine-0": 0.5, "trainer": 0.75, "rewards": 0.97, "workflow": 0.2},
            " | gen 50 % | train 75 % | rewards 97 %",
        ),
        ({"engine-0": 0.5, "trainer": 0.75, "rewards": 0.7}, " | gen 50 % | train 75 %"),
        ({"rewards": 0.7}, " | rewards 70 %"),
        ({}, ""),
    ],
)
def test_a_role_that_is_busier_than_engines_and_trainer_is_named(busy: dict[str, float | None], end: str) -> None:
    progress = RunProgress(0)
    progress.step(step(7, busy))
    assert progress.line() == f"step 7 0:01 | reward .95 | len 24 | stale 1.6/2{end}"


def test_a_line_that_is_too_long_leaves_out_length_then_staleness_then_what_the_trainer_does() -> None:
    progress = RunProgress(1_000_000)
    progress.evaluated(evaluation_line(0, 1.0))
    busy = {"engine-0": 0.99, "trainer": 0.99, "workflow": 1.0}
    for number in (900_000, 900_001):
        progress.step(step(number, busy, staleness_mean=12.5, max_staleness=16.0))
    assert progress.line() == (
        "step 900001/1000000 25:00:00 left 2:46:40 | held-out 100.0 % | reward .95 | gen 18k t/s 99 % | workflow 100 %"
    )


NUMBERS = st.floats(allow_nan=False, allow_infinity=False)


@given(
    st.integers(0, 1 << 62),
    st.integers(0, 1 << 62),
    NUMBERS,
    NUMBERS,
    NUMBERS,
    st.floats(0, 1e9),
    st.text(max_size=400),
)
def test_no_line_is_longer_whatever_the_numbers_are(
    number: int, steps: int, reward: float, length: float, staleness: float, seconds: float, role: str
) -> None:
    progress = RunProgress(steps)
    progress.evaluated(evaluation_line(0, 0.5))
    for at in (number, number + 1):
        progress.step(
            step(at, {role: 1.0}, reward=reward, length_mean=length, staleness_mean=staleness, rl_seconds=seconds)
        )
    assert 0 < len(progress.line()) <= LONGEST
    assert progress.line().startswith("step ")


def test_the_legend_and_the_line_of_a_lesson_are_no_longer() -> None:
    assert len(LEGEND) <= LONGEST
    assert (
        lesson_line("warm start", 3, 4, 90.0, 0.5, 0.75)
        == "warm start 3/4 1:30 left 0:30 | loss 0.5000 | accuracy 75.0 %"
    )


def test_a_number_has_two_digits() -> None:
    numbers = (0.0, 0.052, -0.25, 1.0, 9.96, 1000, -1.4e6, 3e12)
    assert [brief(number) for number in numbers] == ["0", ".052", "-.25", "1", "10", "1k", "-1.4M", "3000G"]


def test_the_time_that_is_left_is_known_from_the_second_step_on() -> None:
    assert [seconds_left(step, 4, 6.0 * step) for step in (1, 2, 4, 5)] == [None, 12.0, 0.0, None]


def test_a_duration_has_hours_where_it_has_any() -> None:
    assert [clock(seconds) for seconds in (0, 59.6, 3599, 3600)] == ["0:00", "1:00", "59:59", "1:00:00"]
