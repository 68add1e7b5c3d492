"""Promises, with the real packages, offline: what W&B, MLflow and trackio have of a run, as they read it back, is every
number once, at its step, the recipe, the tags, the tables and an alarm; a run that is resumed goes on in the same
curves. `wandb sync` of docs/reference/metrics.md uploads the files of all processes as one run, at the end or in
between.
"""

import json
import os
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest

from stretto.store.series.metrics import rewind_metrics
from stretto_report.outlets.follower import read_cursor
from stretto_report.outlets.role import ALL_SENT, MODULE, FollowerSpec
from tests.outlets.recorded import RecordedRun, evaluation, sample, step
from tests.real_outlets.wandb_server import WandbServer, wandb_server

READ_BACK = Path(__file__).parent / "programs" / "read_back.py"
ROOT = Path(__file__).parents[2]
#: The tools' environment has no stretto of its own: it imports that of this tree.
SOURCES = os.pathsep.join(map(str, (ROOT, ROOT / "application", *sorted(ROOT.glob("packages/*")))))
_PATIENCE = 300.0
_KILL_PATIENCE = 200.0


def offline(folder: Path) -> dict[str, str]:
    """The variables of processes that keep all in a folder."""
    its_own = {
        "PYTHONPATH": SOURCES,
        "WANDB_MODE": "offline",
        "MLFLOW_TRACKING_URI": f"sqlite:///{folder}/mlflow.db",
        "TRACKIO_DIR": str(folder / "trackio"),
    }
    return {**os.environ, **its_own}


def command(
    folder: Path, *words: str | Path, inherited: tuple[int, ...] = (), further: Mapping[str, str] = {}, code: int = 0
) -> str:
    """The output of a command in `folder`, where all tools keep what they have; `further` variables are its own. It
    ends with the exit code `code`."""
    done = subprocess.run(
        words,
        cwd=folder,
        env={**offline(folder), **further},
        pass_fds=inherited,
        capture_output=True,
        text=True,
        check=False,
        timeout=_PATIENCE,
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout


def follow(tools: Path, tool: str, run: RecordedRun) -> None:
    """Hand on everything that is there: the run has ended before the process begins."""
    until, ours = os.pipe()
    os.close(ours)
    spec = FollowerSpec(tool, str(run.folder.path), "project", "", ("baseline",), until)
    try:
        words = tools, "-m", MODULE, msgspec.json.encode(spec).decode()
        command(run.folder.path.parent, *words, inherited=(until,), code=ALL_SENT)
    finally:
        os.close(until)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("tool", ["wandb", "mlflow", "trackio"])
def test_a_tool_has_every_number_once_and_a_resumed_run_in_its_curves(tools: Path, tool: str, tmp_path: Path) -> None:
    run = RecordedRun(tmp_path / "run")
    run.append(evaluation(0, accuracy=0.5, prompts=800), step(1), step(2), step(3))
    run.samples.append([sample(1)])
    follow(tools, tool, run)
    rewind_metrics(run.folder.metrics, 2)  # a crash: step 3 is done again
    run.append(step(3, reward=0.75), step(4, reward=0.75), evaluation(4, prompts=800))
    run.samples.append([sample(4)])
    for _ in range(2):
        follow(tools, tool, run)

    found: dict[str, Any] = json.loads(command(tmp_path, tools, READ_BACK, tool).splitlines()[-1])
    points = [(number, name, value) for number, name, value in found["points"]]
    for name, expected in {
        "reward": [(1, 0.5), (2, 0.5), (3, 0.5), (4, 0.75)],
        "trainer/loss": [(number, 0.25) for number in range(1, 5)],
        "busy/engine-0": [(number, 0.75) for number in range(1, 5)],
        "evaluation/accuracy": [(0, 0.5), (4, 0.125)],
    }.items():
        assert [(number, value) for number, its, value in points if its == name] == expected
    ((title, text),) = found["alarms"]
    assert title == "accuracy falling"
    assert text.startswith(
        "alarm  accuracy falling since step 4: the held-out accuracy fell from 50.0% (step 0) to 12.5%"
    )
    numbers = found.get("numbers", [])
    assert numbers == sorted(numbers)  # over the files of all processes: none stands for two points
    assert found["tables"] == [["3+8=1"], ["3+8=4"]]
    assert int(found["config"]["trainer.steps"]) == 6
    assert found["tags"] == ["baseline"]
    assert len(found["runs"]) == 1


@pytest.mark.timeout(900)
@pytest.mark.parametrize("tool", ["wandb", "mlflow", "trackio"])
def test_each_step_is_there_once_in_order_however_often_it_is_killed(tools: Path, tool: str, tmp_path: Path) -> None:
    run, done = RecordedRun(tmp_path / "run"), 0
    run.samples.append([sample(1)])
    for sent in (5, 12, 30):  # when it has noted as many steps as sent, it dies
        until, ours = os.pipe()
        spec = FollowerSpec(tool, str(run.folder.path), "project", "", ("baseline",), until)
        words = (tools, "-m", MODULE, msgspec.json.encode(spec).decode())
        with (
            (tmp_path / "log.txt").open("ab") as log,
            subprocess.Popen(words, cwd=tmp_path, env=offline(tmp_path), pass_fds=(until,), stderr=log) as process,
        ):
            patience = time.monotonic() + _KILL_PATIENCE
            try:
                while run.sent(tool) < sent:
                    assert process.poll() is None, (tmp_path / "log.txt").read_text()
                    assert time.monotonic() < patience
                    if done < sent + 10:
                        run.metrics.append(step(done := done + 1))
                    time.sleep(0.02)
            finally:
                process.kill()
        os.close(until)
        os.close(ours)
    follow(tools, tool, run)
    found: dict[str, Any] = json.loads(command(tmp_path, tools, READ_BACK, tool).splitlines()[-1])
    for name in ("reward", "trainer/loss"):
        assert [number for number, its, _ in found["points"] if its == name] == [*range(1, done + 1)]


def sync(tools: Path, run: RecordedRun, server: WandbServer) -> str:
    """The command of docs/reference/metrics.md."""
    files = sorted((run.folder.path / "wandb").glob("offline-run-*"))
    its_own = {"WANDB_BASE_URL": server.address, "WANDB_API_KEY": "a" * 40, "WANDB_MODE": "online"}
    return command(run.folder.path.parent, tools.parent / "wandb", "sync", *files, further=its_own)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("between", [False, True], ids=["at the end", "in between too"])
def test_wandb_sync_uploads_a_resumed_run_as_one_curve(tools: Path, between: bool, tmp_path: Path) -> None:
    run = RecordedRun(tmp_path / "run")
    with wandb_server() as server:
        run.append(evaluation(0, accuracy=0.5, prompts=800), step(1), step(2), step(3))
        follow(tools, "wandb", run)
        if between:
            sync(tools, run, server)
        rewind_metrics(run.folder.metrics, 2)
        run.append(step(3, reward=0.75), step(4, reward=0.75), evaluation(4, prompts=800))
        run.samples.append([sample(4)])
        for _ in range(2):
            follow(tools, "wandb", run)
        sync(tools, run, server)
    (stored,) = server.runs.values()
    assert (stored.name, stored.project, stored.display_name) == (tool_run(run), "project", "run")
    points = [(line["step"], line["reward"]) for line in stored.history if "reward" in line]
    assert points == [(1, 0.5), (2, 0.5), (3, 0.5), (4, 0.75)]
    held_out = [(line["step"], line["evaluation/accuracy"]) for line in stored.history if "evaluation/accuracy" in line]
    assert held_out == [(0, 0.5), (4, 0.125)]
    numbers = [line["_step"] for line in stored.history]
    assert numbers == sorted(set(numbers))
    assert len([name for name in stored.uploads if name.startswith("media/table/samples")]) == 1
    assert (stored.tags, stored.alerts) == (["baseline"], ["accuracy falling"])


def tool_run(run: RecordedRun) -> str:
    """W&B's own name for the run, as the folder keeps it."""
    return read_cursor(run.folder.outlets / "wandb.json").run
