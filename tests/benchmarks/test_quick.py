"""Promises of `benchmarks.quick`: a ratio that has fallen by more than a tenth is found, noise is not; what is compared
with nothing is said, and is no success; the results page shows the course of each ratio."""

import json
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from benchmarks import quick, report
from benchmarks.quick import BENCHMARKS, course, fell
from benchmarks.quick_rows import COMMANDS, COURSE, RATIOS, Ratios, last_points
from tests.launch.running import Laboratory

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


def test_each_ratio_has_a_name_and_a_benchmark() -> None:
    assert list(RATIOS) == list(BENCHMARKS)


def test_a_ratio_is_compared_with_its_own_last_point() -> None:
    points = [point("a", server=[1.0], help=[0.5]), point("b", server=[2.0])]
    assert last_points(points) == {"server": [2.0], "help": [0.5]}


@pytest.fixture
def recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A record of one point."""
    monkeypatch.setattr(report, "RESULTS", tmp_path / "benchmarks" / "results")
    report.save("quick", {"course": [point("a", server=STEADY)]})


def ended(monkeypatch: pytest.MonkeyPatch, here: Ratios | str, there: Ratios | str, *words: str) -> int:
    """Exit code of the command; the ratio is `here` with the packages of this tree, and `there` with others."""
    monkeypatch.setattr(quick, "measured", lambda name, packages: here if packages == quick.ROOT else there)
    monkeypatch.setattr(quick, "tree_of", lambda revision: nullcontext(Path("other")))
    monkeypatch.setattr(quick, "commit", lambda revision="HEAD": "12345678")
    monkeypatch.setattr(sys, "argv", ["quick", "--only", "server", *words])
    return quick.main()


@pytest.mark.parametrize("words", [(), ("--against", "HEAD")])
@pytest.mark.parametrize(("now", "code"), [(STEADY, 0), ([0.8 * ratio for ratio in STEADY], 1), ("it fails", 1)])
@pytest.mark.usefixtures("recorded")
def test_what_is_slower_or_fails_ends_with_1(
    now: Ratios | str,
    code: int,
    words: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert ended(monkeypatch, now, STEADY, *words) == code
    said = capsys.readouterr().out
    assert ("SLOWER" in said or "FAILED" in said) is bool(code)
    assert course() == json.loads((report.RESULTS / "quick.json").read_text())["results"]["course"]


@pytest.mark.usefixtures("recorded")
def test_a_ratio_that_another_commit_cannot_measure_ends_with_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ended(monkeypatch, STEADY, "no such module", "--against", "HEAD") == 2
    assert "compared with nothing (cannot be measured on HEAD): server" in capsys.readouterr().out


def test_a_commit_without_a_package_is_not_measured_with_that_of_this_one(tmp_path: Path) -> None:
    assert str(quick.measured("help", tmp_path)).startswith("has no packages/cluster, packages/core")


def test_a_processor_without_a_record_is_told_how_to_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(report, "RESULTS", tmp_path / "benchmarks" / "results")
    assert ended(monkeypatch, STEADY, STEADY) == 2
    said = capsys.readouterr().out
    assert "compared with nothing (not on record for " in said
    assert "`make bench-quick RECORD=1`" in said
    assert ended(monkeypatch, STEADY, STEADY, "--record") == 0
    assert ended(monkeypatch, STEADY, STEADY) == 0


def test_a_commit_that_does_not_exist_is_a_mistake(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["quick", "--against", "nosuch"])
    with pytest.raises(SystemExit, match="2"):
        quick.main()


def test_a_run_of_a_benchmark_has_the_packages_of_the_other_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "other" / "stretto_app"
    (package / "cli").mkdir(parents=True)
    for file, text in (("__init__.py", ""), ("cli/__init__.py", ""), ("cli/main.py", "print('other')")):
        (package / file).write_text(text)
    monkeypatch.setenv("PYTHONPATH", str(package.parent))
    with Laboratory(tmp_path, tmp_path).start("--help") as command:
        assert command.end().well() == "other\n"


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
