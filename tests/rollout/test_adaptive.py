"""Promises of ``rollout.max_staleness = "auto"``:

- the bound stays within the limits of the recipe, whatever is measured;
- the response is monotone: of two measurements that differ in one value, the one with more mismatch never gives the
  larger bound; without mismatch a starved trainer gets the largest, with mismatch above the limit the smallest;
- between the two thresholds, and while it is held after a change, it stays: no oscillation;
- it follows from the measurements alone, and a step that is seen twice counts once.
"""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.rollout.adaptive import LIMITS, AdaptiveBound, adapted, mismatch

measurements = st.fixed_dictionaries(
    {},
    optional={
        "effective_samples": st.floats(0.0, 1.0),
        "kl_behavior": st.floats(0.0, 10.0),
        "clip_fraction": st.floats(0.0, 1.0),
        "outlier_fraction": st.floats(0.0, 1.0),
        "loss": st.floats(-1.0, 1.0),
    },
)
states = st.builds(
    AdaptiveBound, bound=st.integers(1, 12), mismatch=st.floats(0.0, 2.0), held=st.integers(0, 4), probing=st.booleans()
)


def run(values: list[float], low: int = 1, high: int = 16, starved: bool = True) -> list[int]:
    """The bounds after steps with these divergences."""
    state, bounds = AdaptiveBound(low), []
    for step, value in enumerate(values, start=1):
        state = adapted(state, step, {"kl_behavior": value}, starved, low, high)
        bounds.append(state.bound)
    return bounds


def test_without_mismatch_the_bound_doubles_as_soon_as_a_change_may_have_shown() -> None:
    # 1 -> 2 at step 1, held 3 steps; -> 4 at step 4, held 5; -> 8 at step 9, held 9; -> 16 at step 18.
    assert run([0.0] * 18) == [2, 2, 2, 4, 4, 4, 4, 4, 8, 8, 8, 8, 8, 8, 8, 8, 8, 16]


def test_once_it_has_been_lowered_it_is_halved_and_grows_by_one() -> None:
    state = AdaptiveBound(8)
    # The mismatch is capped at 2: smoothed 0.5, 0.875, 1.16. Lowered at the third step, and held for 9.
    for step in (1, 2, 3):
        state = adapted(state, step, {"kl_behavior": 1.0}, True, 1, 8)
    assert (state.bound, state.held, state.probing) == (4, 9, False)
    for step in range(4, 4 + 9):
        state = adapted(state, step, {"kl_behavior": 0.0}, True, 1, 8)
    assert state.bound == 5  # by one, and not twice as many
    assert state.worst == "kl_behavior 0"


def test_a_single_bad_step_lowers_nothing() -> None:
    assert run([0.02, 0.02, 0.02, 50.0, 0.02, 0.02], starved=False) == [1] * 6
    state = adapted(AdaptiveBound(8, mismatch=0.49), 1, {"kl_behavior": 50.0}, True, 1, 8)
    assert (state.bound, round(state.mismatch, 4)) == (8, 0.8675)


def test_between_the_thresholds_and_without_need_it_stays() -> None:
    assert set(run([0.0375] * 60)[8:]) == {run([0.0375] * 8)[-1]}  # three quarters of the limit
    assert set(run([0.0] * 60, starved=False)) == {1}


@given(state=states, metrics=measurements, starved=st.booleans(), low=st.integers(0, 4), more=st.integers(0, 12))
def test_it_never_leaves_its_limits(
    state: AdaptiveBound, metrics: dict[str, float], starved: bool, low: int, more: int
) -> None:
    high = low + more
    state = AdaptiveBound(min(max(state.bound, low), high), state.mismatch, state.held, state.probing)
    for step in range(1, 12):
        state = adapted(state, step, metrics, starved, low, high)
        assert low <= state.bound <= high
        assert 0 <= state.mismatch <= 2


@given(state=states, metrics=measurements, name=st.sampled_from(sorted(LIMITS)), more=st.floats(0.0, 5.0))
def test_more_mismatch_never_gives_the_larger_bound(
    state: AdaptiveBound, metrics: dict[str, float], name: str, more: float
) -> None:
    metrics = {"kl_behavior": 0.0, name: LIMITS[name].none} | metrics
    worse = metrics | {name: metrics[name] + more * (LIMITS[name].limit - LIMITS[name].none)}
    one, other = (adapted(state, 1, found, True, 1, 16) for found in (metrics, worse))
    assert other.bound <= one.bound


@given(start=st.integers(1, 16), bad=st.floats(1.05, 5.0))
def test_it_collapses_only_where_the_measurements_say_so(start: int, bad: float) -> None:
    state = AdaptiveBound(start)
    for step in range(1, 80):
        state = adapted(state, step, {"effective_samples": 1 - 0.2 * bad}, True, 1, 16)
    assert state.bound == 1
    for step in range(80, 500):
        state = adapted(state, step, {"effective_samples": 1.0}, True, 1, 16)
    assert state.bound == 16


@given(values=st.lists(st.floats(0.0, 0.3), min_size=40, max_size=120))
def test_after_a_change_it_is_held_until_the_change_has_shown(values: list[float]) -> None:
    bounds = run(values)
    changes = [step for step, (before, after) in enumerate(pairwise(bounds), start=1) if before != after]
    for first, second in pairwise(changes):
        assert second - first >= max(bounds[first - 1], bounds[first]) + 1


def test_a_step_that_is_seen_twice_counts_once_and_one_without_measurements_changes_nothing() -> None:
    state = adapted(AdaptiveBound(4), 7, {"kl_behavior": 0.04}, True, 1, 8)
    assert adapted(state, 7, {"kl_behavior": 9.0}, True, 1, 8) == state
    assert adapted(state, 8, {"loss": 0.1, "kl_behavior": None}, True, 1, 8) == state


@pytest.mark.parametrize(
    ("metrics", "expected"),
    [
        ({"effective_samples": 0.9}, 0.5),  # (0.9 - 1) / (0.8 - 1)
        ({"kl_behavior": 0.05}, 1.0),
        ({"clip_fraction": 0.025, "outlier_fraction": 0.02}, 0.5),  # 0.025 / 0.05 before 0.02 / 0.1
        ({"kl_behavior": 7.0}, 2.0),
    ],
)
def test_the_mismatch_is_the_value_that_is_nearest_to_its_limit(metrics: dict[str, float], expected: float) -> None:
    found = mismatch(metrics)
    assert found is not None
    assert found[0] == pytest.approx(expected)
