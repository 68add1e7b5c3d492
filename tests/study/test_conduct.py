"""Promises of a study under way.

- Runs that are finished are kept; the others are trained, in the order of the study; a failure is told, and never
  counts as an accuracy.
- A stop ends it after the runs under way, and the next start goes on with them.
- A folder of another study, of other files or in use is refused; one that was killed while it was made is taken up.
- Table, JSON and picture say the same, with intervals over the finished runs; the seconds to a target too, where there
  is one and all of them reach it.
- `stretto study` trains in processes of its own, and prints one JSON object.
"""

import asyncio
import json
import os
import shutil
import signal
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import pytest

from stretto.core.errors import RunFolderError
from stretto.launch.recipe.recipe import load_recipe
from stretto.processes.stopping import StopSignal
from stretto.store.config import StoreConfig
from stretto.store.ending import ENDING, Ending
from stretto.store.ledger.ledger import Ledger
from stretto.store.run_folder import RunFolder
from stretto.store.series.metrics import EvaluationLine, MetricsLog
from stretto.store.totals import TOTALS, Totals
from stretto_app.study import command
from stretto_app.study import conduct as runner
from stretto_app.study.command import perform
from stretto_app.study.conduct import StudyProgress, TrainProcesses, conduct, side_by_side
from stretto_app.study.definition import PlannedRun, load_study
from stretto_app.study.folder import StudyFolder
from stretto_app.study.summary import summarise, table
from tests.kills import killed_at_each_write
from tests.launch.running import TINY, Ended, Laboratory
from tests.store.make import Make

BODY = """
seeds = 2
[settings]
trainer.steps = 2
[grid]
rollout.max_staleness = [0, 8]
"""
SECONDS = 2.0  # of every run


@dataclass
class Scribe(TrainProcesses):
    """Trains by writing down what a run of two steps would: seed s ends at an accuracy of s / 10, and by staleness 8 at
    half of that. It stops the study, or fails, at the run of this number."""

    folder: StudyFolder
    stops_at: int | None = None
    fails_at: int | None = None
    trained: list[str] = field(default_factory=list)

    async def train(self, run: PlannedRun, stop: StopSignal) -> str | None:
        self.trained.append(run.digest)
        if len(self.trained) == self.stops_at:
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.wait_for(stop.unless(asyncio.Event().wait()), 10)
            return "was killed by SIGTERM"
        if len(self.trained) == self.fails_at:
            return "ended with exit code 1: the disk is full"
        accuracy = run.seed / 10 / (2 if run.recipe.rollout.max_staleness else 1)
        with RunFolder.create(self.folder.run(run)) as folder, closing(Ledger(folder.ledger, StoreConfig())) as ledger:
            for step in (1, 2):
                group = Make.group(f"0.{step}.0", Make.trajectory(f"0.{step}.0", versions=(step - 1,)))
                ledger.issue(group.id, Make.prompt, 1, step - 1)
                ledger.buffer(group)
                ledger.commit_batch(Make.batch(step, group))
                ledger.record_update(Make.update(step))
            ledger.put(TOTALS, Totals(max_staleness=8, generated=10, recomputed=1, rl_seconds=SECONDS))
            ledger.put(ENDING, Ending("finished"))
            log = MetricsLog(folder.metrics)
            for step, measured in ((0, 0.0), (2, accuracy)):
                log.append(EvaluationLine(step, step, 2.0 * step, SECONDS * step / 2, measured, 16))
        return None


@pytest.fixture
def study(tmp_path: Path) -> Path:
    path = tmp_path / "mine.toml"
    path.write_text(f'recipe = "{TINY}"\n{BODY}')
    return path


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """No picture, which takes longer than all else."""
    monkeypatch.setattr(command, "draw", lambda path, result: None)


def test_a_study_by_hand(study: Path, tmp_path: Path) -> None:
    result, code = perform(str(study), tmp_path / "out", runner=Scribe)
    assert code == 0
    synchronous, stale = result.cells
    assert synchronous.accuracy is not None
    assert stale.accuracy is not None
    assert synchronous.accuracy.mean == pytest.approx(0.15)  # seeds 1 and 2: 0.1 and 0.2
    assert stale.accuracy.mean == pytest.approx(0.075)
    # t = 12.706, s = 0.0707, divided by √2
    assert synchronous.accuracy.high == pytest.approx(0.15 + 12.706 * 0.070711 / 2**0.5, abs=1e-4)
    assert [point.at for point in synchronous.by_step] == [0, 2]
    assert (result.trajectories, result.clock) == (2 * 2 * 4, SECONDS)
    assert str(stale.trained_per_second) == "1 ± 0"  # 2 tokens in 2 seconds
    assert stale.wasted is not None
    assert [run.seed for run in stale.runs] == [1, 2]
    written = json.loads((tmp_path / "out" / "results.json").read_text())
    assert written["cells"][1]["accuracy"]["mean"] == pytest.approx(0.075)
    rows = (tmp_path / "out" / "table.md").read_text().splitlines()
    assert rows[0].startswith("| max_staleness | seeds | accuracy | accuracy at 2.0 s | seconds |")
    assert rows[3].startswith("| 8 | 2 | 0.075 ± 0.318 | 0.075 ± 0.318 | 2 ± 0 | 1 ± 0 |")
    assert (tmp_path / "out" / "results.png").read_bytes().startswith(b"\x89PNG")


def work_on(study: Path, out: Path, scribe: Callable[[StudyFolder], Scribe] = Scribe, seeds: int = 2) -> StudyProgress:
    """A start of the study, without its table and picture."""
    loaded = load_study(study, seeds)
    with StudyFolder.take(out, loaded) as folder:
        return asyncio.run(conduct(loaded, folder, scribe(folder), lambda text: None))


def test_finished_runs_are_kept_and_more_seeds_are_added(study: Path, tmp_path: Path) -> None:
    first = work_on(study, tmp_path / "out", seeds=1)
    scribes: list[Scribe] = []

    def watched(folder: StudyFolder) -> Scribe:
        scribes.append(Scribe(folder))
        return scribes[-1]

    second = work_on(study, tmp_path / "out", watched, seeds=3)
    assert (len(first.finished), len(second.finished)) == (2, 6)
    assert not set(scribes[0].trained) & first.finished.keys()


@pytest.mark.usefixtures("undrawn")
def test_a_failed_run_is_told_and_is_no_accuracy(study: Path, tmp_path: Path) -> None:
    result, code = perform(str(study), tmp_path / "out", runner=lambda folder: Scribe(folder, fails_at=2))
    assert code == 1
    (how,) = result.cells[1].failed.values()
    assert how == "ended with exit code 1: the disk is full"
    assert result.cells[1].accuracy is not None
    assert result.cells[1].accuracy.mean == pytest.approx(0.1)  # of seed 2 alone
    assert result.cells[1].accuracy.high is None
    assert "| 8 | 1 (1 failed) | 0.1 |" in (tmp_path / "out" / "table.md").read_text()
    again = work_on(study, tmp_path / "out")
    assert (again.exit_code, again.failed) == (0, {})


def test_a_study_that_was_stopped_goes_on(study: Path, tmp_path: Path) -> None:
    stopped = work_on(study, tmp_path / "out", lambda folder: Scribe(folder, stops_at=2))
    assert stopped.exit_code == 128 + signal.SIGTERM
    assert (len(stopped.finished), stopped.failed) == (1, {})
    resumed = work_on(study, tmp_path / "out")
    assert (resumed.exit_code, len(resumed.finished)) == (0, 4)


@pytest.mark.usefixtures("undrawn")
def test_seconds_to_a_target_are_those_of_the_first_evaluation_that_reached_it(study: Path, tmp_path: Path) -> None:
    """0.1 and 0.2 after 2 s without staleness, half of that with it: one of the first two reaches 0.15. A study is not
    known by its target."""
    result, _ = perform(str(study), tmp_path / "out", runner=Scribe)
    for target, told in (("0.15", ["1 of 2 runs reach it", "0 of 2 runs reach it"]), ("0.05", ["2 ± 0", "2 ± 0"])):
        study.write_text(f'recipe = "{TINY}"\ntarget = {target}\n{BODY}')
        result, _ = perform(str(study), tmp_path / "out", runner=Scribe)
        head, _, *rows = table(result).splitlines()
        assert head.endswith(f"| seconds to {float(target):.0%} |")
        assert [row.split(" | ")[-1].removesuffix(" |") for row in rows] == told
    assert [cell.reached for cell in result.cells] == [2, 2]


def test_a_folder_that_cannot_be_read_is_a_failed_run_among_others(study: Path, tmp_path: Path) -> None:
    damaged = min(work_on(study, tmp_path / "out", seeds=1).finished)
    ledger = tmp_path / "out" / "runs" / damaged / "ledger.sqlite"
    for file in ledger.parent.glob("ledger.sqlite*"):
        file.unlink()
    ledger.write_bytes(b"no database" * 1000)
    again = work_on(study, tmp_path / "out")
    assert again.exit_code == 1
    assert (list(again.failed), len(again.finished)) == ([damaged], 3)
    assert str(ledger) in again.failed[damaged]
    assert ledger.read_bytes().startswith(b"no database")


class Hasty(Scribe):
    """Is asked to stop twice."""

    async def train(self, run: PlannedRun, stop: StopSignal) -> str | None:
        os.kill(os.getpid(), signal.SIGINT)
        while not stop.requested:
            await asyncio.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.sleep(10)
        return None


def test_a_second_request_to_stop_ends_the_study_at_once(study: Path, tmp_path: Path) -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job is to ignore it
    try:
        with pytest.raises(SystemExit) as ended:
            perform(str(study), tmp_path / "out", seeds=1, runner=Hasty)
    finally:
        signal.signal(signal.SIGINT, before)
    assert ended.value.code == 130
    StudyFolder.take(tmp_path / "out", load_study(study, seeds=1)).close()  # it is free again


def test_a_study_without_finished_runs_has_a_table_too(study: Path, tmp_path: Path) -> None:
    assert table(summarise(load_study(study), StudyProgress())).splitlines()[2] == "| 0 | 0 |  |  |  |  |  |  |  |"


def test_the_folder_of_another_study_is_refused(study: Path, tmp_path: Path) -> None:
    mine, other = load_study(study, seeds=1), load_study(study, seeds=1, steps=7)
    StudyFolder.take(tmp_path / "out", mine).close()
    with pytest.raises(RunFolderError, match=r"holds the study 'mine' with digest \w+, and this one's is \w+"):
        StudyFolder.take(tmp_path / "out", other)
    with pytest.raises(RunFolderError, match="is not empty and holds no study"):
        StudyFolder.take(tmp_path, mine)
    StudyFolder.take(tmp_path / "out", mine).close()  # a refusal has let it go
    (tmp_path / "out" / "study.json").write_bytes(b'{"name": "\xff"}')
    with pytest.raises(RunFolderError, match=r"study\.json: cannot be read"):
        StudyFolder.take(tmp_path / "out", mine)


def test_a_study_that_was_killed_while_it_made_its_folder_is_taken_up_again(study: Path, tmp_path: Path) -> None:
    loaded, out, kills = load_study(study, seeds=1), tmp_path / "out", 0
    for number in killed_at_each_write(lambda: StudyFolder.take(out, loaded)):
        kills = number
        StudyFolder.take(out, loaded).close()
        assert (out / "study.toml").read_text() == loaded.text
        assert json.loads((out / "study.json").read_text())["digest"] == loaded.digest
        shutil.rmtree(out)
    assert kills >= 8  # the folder, its lock, three folders and two files, which get their names


def test_a_study_file_of_somebody_else_is_no_folder_that_was_killed(study: Path, tmp_path: Path) -> None:
    (tmp_path / "out" / "runs").mkdir(parents=True)
    (tmp_path / "out" / "study.toml").write_text("mine")
    with pytest.raises(RunFolderError, match=r"holds no study \(study\.toml"):
        StudyFolder.take(tmp_path / "out", load_study(study, seeds=1))


def test_a_folder_in_use_is_refused(study: Path, tmp_path: Path) -> None:
    loaded = load_study(study, seeds=1)
    with StudyFolder.take(tmp_path / "out", loaded), pytest.raises(RunFolderError, match="is in use by process"):
        StudyFolder.take(tmp_path / "out", loaded)


def test_a_run_that_listens_on_a_port_of_its_recipe_is_trained_alone() -> None:
    cpu = ["engine.device=cpu", "trainer.device=cpu"]
    agents = ["workflow.kind=agent", 'workflow.command=["true"]']
    listening = ["logging.prometheus_port=9400"], ["cluster.listen=127.0.0.1:9400"], [*agents, "gateway.port=9400"]
    free = agents, ["cluster.listen=127.0.0.1:0"], ["gateway.port=9400"]  # without agents there is no gateway
    assert [side_by_side([load_recipe(TINY, [*cpu, *settings])], 3) for settings in listening] == [1, 1, 1]
    assert [side_by_side([load_recipe(TINY, [*cpu, *settings])], 3) for settings in free] == [3, 3, 3]


@pytest.mark.usefixtures("undrawn")
def test_as_many_runs_are_trained_at_a_time_as_the_cores_carry_or_as_are_asked_for(study: Path, tmp_path: Path) -> None:
    assert side_by_side([run.recipe for run in load_study(study).runs], 3) == 3
    alone = ["engine.transport=tcp"], ["engine.device=cpu", "trainer.device=cpu", "engine.threads=256"]
    assert [side_by_side([load_recipe(TINY, settings)]) for settings in alone] == [1, 1]
    assert side_by_side([load_recipe(TINY, alone[0])], 3) == 1, "it has ports of its own"
    at_once, most = 0, 0

    class Counting(Scribe):
        async def train(self, run: PlannedRun, stop: StopSignal) -> str | None:
            nonlocal at_once, most
            at_once += 1
            most = max(most, at_once)
            await asyncio.sleep(0)
            failure = await super().train(run, stop)
            at_once -= 1
            return failure

    _, code = perform(str(study), tmp_path / "out", jobs=3, runner=Counting)
    assert (code, most) == (0, 3)


def test_the_command_trains_in_processes_of_its_own(
    laboratory: Laboratory, door: Callable[..., Ended], study: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An interpreter that writes down what it is asked for stands for the one that would import all of it anew."""
    study.write_text(study.read_text().replace("[0, 8]", "[1]").replace("steps = 2", "steps = 1"))
    words, asked = ("study", study, "--out", tmp_path / "out", "--seeds", "1", "--json"), tmp_path / "asked"
    (interpreter := tmp_path / "python").write_text(f'#!/bin/sh\nprintf "%s\\n" "$@" > {asked}\nexit 3\n')
    interpreter.chmod(0o755)
    with monkeypatch.context() as patched:
        patched.setattr(runner, "sys", SimpleNamespace(executable=str(interpreter)))
        failed = door(*words)
    assert failed.code == 1
    assert "ended with exit code 3" in failed.out
    *started, train, recipe, option, folder, plots = asked.read_text().splitlines()
    assert (started, plots) == (["-m", "stretto_app.cli.main"], "--no-plots")
    assert laboratory.run(train, recipe, option, folder, plots).code == 0
    (cell,) = json.loads(door(*words).well())["cells"]
    (run,) = cell["runs"]
    assert (cell["name"], run["trajectories"]) == ("max_staleness = 1", 8)
    assert Path(folder) == tmp_path / "out" / "runs" / run["digest"]
    assert (Path(folder) / "recipe.toml").is_file()
    assert door("study", study.with_name("nothing.toml")).code == 2
