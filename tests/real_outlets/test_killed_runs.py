"""Promises, with the real packages, offline: a run that is killed five times, and resumed after each, has each step and
each evaluation once and in order in W&B, MLflow, trackio and TensorBoard, as they read it back. The run is a real one;
its followers find the tools behind its own packages.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from stretto.store import lock
from stretto.store.run_folder import RunFolder
from stretto.store.series.metrics import EvaluationLine, read_metrics
from stretto_report.outlets.follower import read_cursor
from stretto_report.outlets.role import ALL_SENT, MODULE, FollowerSpec
from tests.launch.running import TINY, default_dispositions
from tests.outlets.recorded import RecordedRun, evaluation, sample, step
from tests.real_outlets.test_tools import READ_BACK, SOURCES, command, follow, offline

TOOLS = ("wandb", "mlflow", "trackio", "tensorboard")
KILLS, FURTHER_STEPS = 5, 10
OVERRIDES = (
    'rewards.function="tests.launch.rewards_for_tests:slow"',
    "trainer.checkpoint_every=4",
    "trainer.keep_versions=2",
    "evaluation.every=6",
)
_ENDLESS = 100_000
_PATIENCE = 400.0
#: The packages of the tools, behind those of the run, whose versions are other ones.
_BEHIND = "import os, sys\nsys.path.append(os.environ['TOOLS'])\n"


@dataclass(frozen=True)
class Training:
    """A run in ``run`` of a folder, where the tools keep what they have."""

    folder: Path
    tools: Path  # the interpreter that has them

    @property
    def run(self) -> RunFolder:
        return RunFolder(self.folder / "run")

    def start(self, steps: int, *words: str) -> subprocess.Popen[bytes]:
        """``stretto train``, its output in a file."""
        told = [f"logging.to={json.dumps(TOOLS)}", 'logging.project="project"', f"trainer.steps={steps}"]
        train = [sys.executable, "-m", "stretto_app.cli.main", "train", str(TINY), *OVERRIDES, *told, *words]
        with (self.folder / "said.txt").open("ab") as said, default_dispositions():
            return subprocess.Popen(
                [*train, "--run-dir", "run", "--no-plots"],
                cwd=self.folder,
                env=self._behind(),
                stdout=said,
                stderr=said,
            )

    def _behind(self) -> Mapping[str, str]:
        found = [str(self.tools), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
        packages = subprocess.run(found, capture_output=True, text=True, check=True).stdout.strip()
        (self.folder / "behind").mkdir(exist_ok=True)
        (self.folder / "behind" / "sitecustomize.py").write_text(_BEHIND)
        paths = {"PYTHONPATH": f"{SOURCES}{os.pathsep}{self.folder / 'behind'}", "TOOLS": packages}
        return offline(self.folder) | paths | {"STRETTO_CACHE": str(self.folder / "cache")}

    def sent(self) -> dict[str, int]:
        """The newest step that each tool has noted."""
        return {tool: read_cursor(self.run.outlets / f"{tool}.json").sent.get("step", 0) for tool in TOOLS}

    def has_handed_on(self, before: Mapping[str, int]) -> bool:
        """Whether each tool has noted a step more."""
        return all(step > before[tool] for tool, step in self.sent().items())

    def hand_on_the_rest(self, tool: str) -> None:
        """A run waits for its tools at its end for a while only."""
        until, ours = os.pipe()
        os.close(ours)
        spec = FollowerSpec(tool, str(self.run.path), "project", "", (), until)
        try:
            words = self.tools, "-m", MODULE, msgspec.json.encode(spec).decode()
            command(self.folder, *words, inherited=(until,), code=ALL_SENT)
        finally:
            os.close(until)

    def curve(self, tool: str, name: str) -> list[int]:
        """The steps of a curve, as the tool reads them."""
        if tool == "tensorboard":
            found = EventAccumulator(str(self.run.path / tool), size_guidance={"scalars": 0}).Reload()
            return [point.step for point in found.Scalars(name)]
        told: dict[str, Any] = json.loads(command(self.folder, self.tools, READ_BACK, tool).splitlines()[-1])
        return [step for step, its, _ in told["points"] if its == name]


def wait_until(condition: Callable[[], bool], process: subprocess.Popen[bytes], training: Training) -> None:
    until = time.monotonic() + _PATIENCE
    while not condition():
        assert process.poll() is None, (training.folder / "said.txt").read_text()[-3000:]
        assert time.monotonic() < until, training.sent()
        time.sleep(0.02)


@pytest.mark.timeout(3600)
def test_each_step_is_in_every_tool_once_after_the_run_was_killed_five_times(tools: Path, tmp_path: Path) -> None:
    training = Training(tmp_path, tools)
    words: Sequence[str] = ()
    for _ in range(KILLS):
        before = training.sent()
        with training.start(_ENDLESS, *words) as process:
            try:
                wait_until(partial(training.has_handed_on, before), process, training)
            finally:
                process.kill()
        while lock.is_held(training.run.path):
            time.sleep(0.02)
        words = ("--resume",)
    done = read_metrics(training.run.metrics)[0][-1].step
    with training.start(last := done + FURTHER_STEPS, *words) as process:
        assert process.wait(_PATIENCE) == 0, (tmp_path / "said.txt").read_text()[-3000:]
    evaluations: list[EvaluationLine] = read_metrics(training.run.metrics)[1]
    for tool in TOOLS:
        training.hand_on_the_rest(tool)
        assert training.curve(tool, "reward") == [*range(1, last + 1)], tool
        assert training.curve(tool, "evaluation/accuracy") == sorted({line.step for line in evaluations}), tool


@pytest.mark.timeout(900)
@pytest.mark.parametrize("tool", ["wandb", "mlflow", "trackio"])
def test_points_that_a_process_did_not_note_before_it_died_come_once(tools: Path, tool: str, tmp_path: Path) -> None:
    """An evaluation that ends late is of an earlier step than the newest point."""
    run = RecordedRun(tmp_path / "run")
    run.append(step(1), step(2), step(3), step(4), evaluation(2))
    run.samples.append([sample(1)])
    follow(tools, tool, run)
    cursor = run.folder.outlets / f"{tool}.json"
    noted = cursor.read_bytes()
    run.append(evaluation(3), step(5), step(6))
    follow(tools, tool, run)
    cursor.write_bytes(noted)
    run.metrics.append(step(7))
    follow(tools, tool, run)
    training = Training(tmp_path, tools)
    assert training.curve(tool, "reward") == [*range(1, 8)]
    assert training.curve(tool, "evaluation/accuracy") == [2, 3]
