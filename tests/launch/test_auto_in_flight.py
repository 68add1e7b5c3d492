"""Promises of a recipe with ``rollout.max_in_flight = "auto"``: what can not be is refused with place, value and remedy
before anything starts; what a run needs at most is checked for the largest number."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from stretto.core.errors import RecipeError
from stretto.launch.preflight.checks import check_in_flight
from stretto.rollout.config import RolloutConfig
from tests.launch.test_recipe import merged, message, write

REFUSED = {
    "bounds in the wrong order": (
        'max_in_flight = "auto"\nmax_in_flight_min = 300',
        ["rollout: max_in_flight_min = 300 is more than max_in_flight_max = 256", "lower the first"],
    ),
    "misspelt": ('max_in_flight = "atuo"', ["rollout.max_in_flight: 'atuo'", "valid integer or 'auto'"]),
    "in a run that can be repeated": (
        'max_in_flight = "auto"\nmax_staleness = 0',
        ['rollout.max_in_flight = "auto" follows what the engines tell', "give a number"],
    ),
    "a bound that is unknown": ("max_in_flight_most = 3", ["rollout.max_in_flight_most: unknown key; did you mean"]),
}


@pytest.mark.parametrize(("keys", "expected"), REFUSED.values(), ids=REFUSED)
def test_what_can_not_be_is_refused(tmp_path: Path, keys: str, expected: Sequence[str]) -> None:
    told = message(write(tmp_path, merged(f"[rollout]\n{keys}")))
    assert len(told.splitlines()) == 1
    assert not [part for part in expected if part not in told], told


def test_the_largest_number_has_to_fit_into_the_queue_of_an_engine() -> None:
    """An engine queues 65,536 completions: 8,192 groups of 8."""
    check_in_flight(RolloutConfig(max_in_flight="auto", max_in_flight_max=8192))
    with pytest.raises(RecipeError, match=r"rollout.max_in_flight_max: 8,193 groups of 8 \(group_size\)"):
        check_in_flight(RolloutConfig(max_in_flight="auto", max_in_flight_max=8193))
