"""Promises of `benchmarks.quick`: a ratio that has fallen by more than a tenth is found, noise is not; the results page
shows the course of each ratio."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import quick, report
from benchmarks.quick import BENCHMARKS, compare, course, fell
from benchmarks.quick_rows import COMMANDS, COURSE, TEN, last_points

STEADY = [0.98, 0.99, 1.0, 1.01, 1.02]


def point(commit: str, **ratios: list[float]) -> dict[str, Any]:
    return {"version": "0.1.0", "commit": commit, "measured": "2026-11-26", "ratios": ratios}


@pytest.mark.parametrize(
    ("now", "slower"),
    [
        (STEADY, False),
        ([0.92 * ratio for ratio in STEADY], False),  # less than a tenth
        ([0.88 * ratio for ratio in STEADY], True),
        ([0.5, 0.85, 0.85, 1.0, 1.1], False),  # the better half is as before
        ([2 * ratio for ratio in STEADY], False),
    ],
)
def test_a_regression_is_more_than_a_tenth_and_more_than_noise(now: list[float], slower: bool) -> None:
    assert fell(STEADY, now) is slower


def test_each_of_the_ten_has_a_name_and_a_benchmark() -> None:
    assert list(TEN) == list(BENCHMARKS)
    assert len(TEN) == 10


def test_a_ratio_is_compared_with_its_own_last_point() -> None:
    points = [point("a", server=[1.0], help=[0.5]), point("b", server=[2.0])]
    assert last_points(points) == {"server": [2.0], "help": [0.5]}


@pytest.fixture
def recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A record of one point, and a benchmark that measures nothing."""
    monkeypatch.setattr(report, "RESULTS", tmp_path / "benchmarks" / "results")
    report.save("quick", {"course": [point("a", server=STEADY)]})


@pytest.mark.parametrize(("factor", "bad"), [(1.0, False), (0.8, True)])
@pytest.mark.usefixtures("recorded")
def test_what_is_slower_than_on_record_fails(
    factor: float, bad: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = [factor * ratio for ratio in STEADY]
    monkeypatch.setattr(quick, "measured", lambda name, packages: runs)
    assert compare(["server"], None) == ({"server": runs}, bad)
    assert ("SLOWER" in capsys.readouterr().out) is bad
    assert course() == json.loads((report.RESULTS / "quick.json").read_text())["results"]["course"]


def test_the_page_shows_the_course_of_a_ratio() -> None:
    (row,) = COURSE["quick"]({"course": [point("a", server=[0.5]), point("b"), point("c", server=[0.4, 0.6, 0.55])]})
    assert str(row) == (
        "| server under 64 streams, of the engine alone | 0.55, 0.1.0 (c, 2026-11-26) | 0.1.0 (a, 2026-11-26): 0.5 "
        "| × 1.10 |"
    )


def test_the_page_shows_the_newest_costs_of_commands() -> None:
    named = ("--help", "train, to its first line")
    costs = {
        day: {"commands": {name: {"cpu": cpu, "most": 0.5} for name in named}} for day, cpu in (("a", 0.4), ("b", 0.3))
    }
    help, begins = COMMANDS["commands"](costs)
    assert (help.what, help.ours) == ("CPU seconds, median and most: `stretto --help`", "0.30, 0.50")
    assert (begins.what, begins.peer) == ("″: `stretto train, to its first line`", "goal: 1")
