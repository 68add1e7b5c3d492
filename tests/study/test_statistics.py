"""Promises of a study's statistics: the interval is Student's, a single run has none, and curves are compared where all
runs have a value."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto_app.study.statistics import Evaluated, Interval, accuracy_at, by_clock, by_step, interval, student_t

near = pytest.approx


@pytest.mark.parametrize(
    ("freedom", "t"), [(1, 12.7062), (2, 4.3027), (4, 2.7764), (9, 2.2622), (30, 2.0423), (999, 1.9623)]
)
def test_the_quantiles_are_those_of_the_printed_tables(freedom: int, t: float) -> None:
    assert student_t(freedom) == near(t, 1e-4)


def test_an_interval_by_hand() -> None:
    found = interval([1.0, 2.0, 3.0])  # s = 1, 4.3027 / √3 = 2.4841
    assert (found.mean, found.runs) == (2.0, 3)
    assert found.low == near(-0.4841, 1e-3)
    assert found.high == near(4.4841, 1e-3)


def test_a_single_run_has_no_interval() -> None:
    assert interval([0.7]) == Interval(0.7, None, None, 1)


@given(st.lists(st.floats(-1e3, 1e3), min_size=2, max_size=8), st.floats(-10, 10))
def test_an_interval_moves_with_its_values(values: list[float], by: float) -> None:
    one, moved = interval(values), interval([value + by for value in values])
    assert one.low is not None
    assert moved.low == near(one.low + by, 1e-6, 1e-6)


def curve(*points: tuple[int, float, float]) -> tuple[Evaluated, ...]:
    return tuple(Evaluated(*point) for point in points)


QUICK = curve((0, 0.0, 0.2), (10, 4.0, 0.6), (20, 8.0, 0.8))
SLOW = curve((0, 0.0, 0.4), (20, 20.0, 0.6))


def test_a_curve_over_steps_has_those_at_which_every_run_was_evaluated() -> None:
    points = by_step([QUICK, SLOW])
    assert [point.at for point in points] == [0, 20]
    assert [point.accuracy.mean for point in points] == near([0.3, 0.7])


def test_a_curve_over_the_clock_has_the_newest_value_of_every_run() -> None:
    points = by_clock([QUICK, SLOW], 8.0)
    assert (points[0].at, points[-1].at) == (0.0, 8.0)
    assert [points[0].accuracy.mean, points[-1].accuracy.mean] == near([0.3, 0.6])  # 0.8 and, still, 0.4


def test_nothing_is_known_before_the_first_evaluation() -> None:
    late = curve((5, 3.0, 0.5))
    assert accuracy_at(late, 2.9) is None
    assert by_clock([late], 6.0)[0].at == near(3.0)
