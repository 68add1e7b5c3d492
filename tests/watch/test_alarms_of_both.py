"""Promises: the pages, `stretto inspect` and the line of a training judge the same evidence: each number that an alarm
reads is read by all of them, and each alarm that one raises is raised by all.
"""

import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from stretto.core.records import State
from stretto.store.series.metrics import MetricsLog, StepMetrics
from stretto_report.audit.alarms import AlarmWatch, findings_of_run
from stretto_report.audit.evidence import READ
from stretto_report.dashboard.terminal import progress
from stretto_report.dashboard.terminal.progress import LineDisplay
from stretto_report.outlets import follower as outlets
from stretto_report.outlets.follower import AlarmFollower
from stretto_report.watch.index.columns import Cache
from stretto_report.watch.index.steps import Steps
from stretto_report.watch.runs.catalog import Catalog
from stretto_report.watch.runs.run import WatchedRun
from tests.store.lines import step_line
from tests.store.make import PROMPT, Make, ledger_at

WELL: dict[str, Any] = {"accuracy": 0.5, "reward": 0.5, "length_mean": 3.0, "truncated": 0.0, "undecided": 0.0}
TRAINER = {name.removeprefix("trainer."): 0.01 for name in READ if name.startswith("trainer.")} | {"bad_steps": 0.0}

#: By the alarm: what is ill from step 21 on.
ILL: dict[str, dict[str, Any]] = {
    "undecided": {"undecided": 0.9, "undecided_reason": "timeout after 1 s"},
    "truncated": {"truncated": 0.9, "accuracy": 0.1},
    "accuracy_falling": {"accuracy": 0.0},
    "length_explosion": {"length_mean": 300.0},
    "staleness_at_bound": {"staleness_mean": 4.0, "busy": {"trainer": 0.4}},
    "exploding_gradient": {"trainer": TRAINER | {"grad_norm": 1e6}},
    "dead_gradient": {"trainer": TRAINER | {"grad_norm": 0.0}},
    "bad_steps": {"trainer": TRAINER | {"bad_steps": 1.0}},
    "policy_apart": {"trainer": TRAINER | {"kl_behavior": 9.0}},
    "mismatch": {"trainer": TRAINER | {"behavior_logprob_error": 9.0}},
    "canary_drifting": {"canary": {"engine-0": 0.9}},
}


def step(number: int, ill: dict[str, Any]) -> StepMetrics:
    base = WELL | {"trainer": TRAINER, "canary": {"engine-0": 0.01}, "max_staleness": 4.0, "busy": {"trainer": 1.0}}
    return step_line(number, **(base | (ill if number > 20 else {})))


def watched(folder: Path, cache: Path) -> WatchedRun:
    run = Catalog([folder], cache=cache).all()[0]
    while run.advance(1.0):
        pass
    return run


@pytest.mark.parametrize("name", ILL)
def test_an_alarm_of_one_reader_is_an_alarm_of_each(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "recipe.toml").write_text("[rollout]\nmax_staleness = 4\n[trainer]\nsteps = 40\n")
    with ledger_at(folder / "ledger.sqlite") as ledger:
        ledger.put("ending", {"how": "finished", "reason": ""})
    log, live = MetricsLog(folder / "metrics.jsonl"), AlarmWatch(folder)
    for number in range(1, 41):
        log.append(line := step(number, ILL[name]))
        live.step(line)
    found = findings_of_run(folder)
    assert name in {alarm.name for alarm in found.alarms}
    assert live.findings() == found
    # the pages say also whether the run is dead
    pages = watched(folder, tmp_path / "cache").findings()
    assert (pages.alarms, pages.not_measured, pages.checks) == (found.alarms, found.not_measured, found.checks + 1)


def refuse_all(folder: Path) -> str:
    """Fill the ledger of a run that has no step; returns what its alarm says."""
    folder.mkdir(exist_ok=True)
    (folder / "recipe.toml").write_text("[rollout]\nbatch_size = 8\ngroup_size = 2\n")
    with ledger_at(folder / "ledger.sqlite") as ledger:
        for number in range(33):  # four batches, behind a group that is kept in part
            ledger.issue(group := f"0.{number}.0", PROMPT, 2, 0)
            members = [Make.trajectory(group, member) for member in range(2)]
            if not number:
                ledger.buffer(Make.group(group, members.pop(0)))
            reason = f"mine:all: reward 0.{number}" if number > 9 else "truncated: too long"  # fewer, but the same
            for one in members:
                ledger.settle(one.id, State.FILTERED, reason, one)
    return "all of the last 64 completions were filtered, most often by mine:all: reward 0.32"


def test_filters_that_refuse_all_groups_are_an_alarm_of_each_before_the_first_step(tmp_path: Path) -> None:
    told = refuse_all(folder := tmp_path / "run")
    readers = (findings_of_run(folder), AlarmWatch(folder).findings(), watched(folder, tmp_path / "cache").findings())
    assert [[alarm.message for alarm in one.alarms if alarm.name == "all_filtered"] for one in readers] == [[told]] * 3


@pytest.mark.parametrize("steps", [0, 1])
def test_an_alarm_between_two_steps_is_told_live(tmp_path: Path, steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "recipe.toml").write_text("[rollout]\nbatch_size = 8\ngroup_size = 2\n")
    output = io.StringIO()
    display = LineDisplay(40, Console(file=output, width=200), seconds=0.0, alarms=AlarmWatch(tmp_path))
    follower = AlarmFollower(tmp_path)
    for number in range(steps):
        display.step(step(number + 1, {}))
    before = len(output.getvalue().splitlines())
    display.refresh()
    assert follower.new(()) == []
    told = refuse_all(tmp_path)
    display.refresh()
    assert (len(output.getvalue().splitlines()), follower.new(())) == (before, [])  # asked every five seconds
    for module in (progress, outlets):
        monkeypatch.setattr(module, "_ALARM_SECONDS", 0.0)
    display.say("8 groups were filtered")
    display.refresh()
    assert [told in line for line in output.getvalue().splitlines()[before:]] == [False, True]
    assert [alarm.message for alarm in follower.new(())] == [told]


def test_the_pages_read_each_number_that_an_alarm_reads(tmp_path: Path) -> None:
    MetricsLog(tmp_path / "metrics.jsonl").append(step(1, {}))
    steps = Steps(tmp_path / "metrics.jsonl", Cache(tmp_path / "cache"))
    steps.advance()
    assert set(steps.series) >= READ


def test_the_reason_of_what_is_undecided_outlives_the_cache(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path / "metrics.jsonl")
    log.append(step(1, {}))
    log.append(step(21, ILL["undecided"]))
    steps = Steps(tmp_path / "metrics.jsonl", Cache(tmp_path / "cache"))
    steps.advance()
    steps.keep()
    assert Steps(tmp_path / "metrics.jsonl", Cache(tmp_path / "cache")).undecided_reason == "timeout after 1 s"
