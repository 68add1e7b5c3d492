"""Stops at random moments: within 10 seconds, resumable, with no process, file, lock or contradiction left behind.

Three of the fifty stops of `benchmarks.stops`, each of the run that the one before it has stopped.
"""

from pathlib import Path

import pytest

from benchmarks.stops import stops
from tests.launch.running import Laboratory


@pytest.mark.long
def test_a_run_that_is_stopped_again_and_again_is_always_left_whole(laboratory: Laboratory, tmp_path: Path) -> None:
    found = stops(Laboratory(tmp_path, laboratory.cache, warm=True), numbers=(3, 4, 5), seed=1)
    assert {stop.number: stop.problems for stop in found} == dict.fromkeys((3, 4, 5), ())
