"""Stops at random moments: within 10 seconds, resumable, with no process, file, lock or contradiction left behind.

Two of the fifty stops of `benchmarks.stops`, the second of the run that the first has stopped.
"""

from __future__ import annotations

from pathlib import Path

from benchmarks.stops import stops
from tests.launch.running import Laboratory


def test_a_run_that_is_stopped_again_and_again_is_always_left_whole(laboratory: Laboratory, tmp_path: Path) -> None:
    found = stops(Laboratory(tmp_path, laboratory.cache, warm=True), numbers=(3, 4), seed=1)
    assert {stop.number: stop.problems for stop in found} == dict.fromkeys((3, 4), ())
