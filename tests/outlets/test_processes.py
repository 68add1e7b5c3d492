"""Promises, with the package tensorboard in real processes: a tool that is out of order, hangs, dies or cannot be
imported costs the run one sentence, and so does a line that cannot be read; it has every line once in the end, as
TensorBoard reads them; no process is left, and no descriptor.
"""

import asyncio
import os
import signal
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from stretto.launch.recipe.extensions import OutletsConfig
from stretto_report.outlets import supervision
from stretto_report.outlets.role import MODULE
from stretto_report.outlets.supervision import ToolFollower, followed
from tests.asynchronous import until
from tests.launch.warm import children_of
from tests.outlets.curves import in_tensorboard
from tests.outlets.recorded import RecordedRun, evaluation, sample, step

TENSORBOARD = OutletsConfig(to=("tensorboard",), tags=("baseline",))


@pytest.fixture
def run(tmp_path: Path) -> RecordedRun:
    return RecordedRun(tmp_path / "run")


def processes() -> list[int]:
    """Those that follow a run."""
    return [pid for pid in children_of(os.getpid()) if MODULE.encode() in Path(f"/proc/{pid}/cmdline").read_bytes()]


def points(found: EventAccumulator, name: str) -> list[tuple[int, float]]:
    return [(point.step, point.value) for point in found.Scalars(name)]


async def test_an_outage_a_hang_and_a_death_cost_a_sentence_each_and_no_line(
    run: RecordedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervision, "_FIRST_PAUSE", 0.1)
    said: list[str] = []
    in_the_way = run.folder.path / "tensorboard"
    in_the_way.touch()  # a file where the tool wants a folder

    async with followed(TENSORBOARD, run.folder, said.append, lambda: False, hung=4.0):
        run.metrics.append(step(1))
        await until(lambda: said)
        with run.folder.metrics.open("a") as file:
            file.write("no JSON\n")
        in_the_way.unlink()
        await until(lambda: run.sent() == 1)
        os.kill(processes()[0], signal.SIGSTOP)
        run.metrics.append(step(2))
        await until(lambda: run.sent() == 2)
        os.kill(processes()[0], signal.SIGKILL)
        await until(lambda: any("SIGKILL" in sentence for sentence in said))
        run.metrics.append(evaluation(2))
        run.metrics.append(step(3))
        run.samples.append([sample(3)])
    assert processes() == []
    assert said[0].startswith("tensorboard receives nothing: FileExistsError")
    faults = [sentence for sentence in said if "lacks a line of the run: metrics.jsonl: line 2" in sentence]
    assert len(faults) == 1
    outages = [sentence for sentence in said if sentence not in faults]
    assert "heartbeat" in outages[1]
    assert "SIGKILL" in outages[-1]
    found = in_tensorboard(run)
    assert points(found, "reward") == [(1, 0.5), (2, 0.5), (3, 0.5)]
    assert points(found, "trainer/loss") == [(1, 0.25), (2, 0.25), (3, 0.25)]
    assert points(found, "evaluation/accuracy") == [(2, 0.125)]
    texts = {name: found.Tensors(name)[-1].tensor_proto.string_val[0].decode() for name in found.Tags()["tensors"]}
    assert "trainer.steps = 6" in texts["recipe"]
    assert "baseline" in texts["tags"]
    assert "    3+8=3" in texts["samples"].splitlines()


async def test_a_package_that_cannot_be_imported_costs_a_sentence(
    run: RecordedRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tensorboard.py").write_text("raise ImportError('a library of its is missing')\n")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{Path(__file__).parents[2]}")
    said: list[str] = []

    async with followed(TENSORBOARD, run.folder, said.append, lambda: True):
        run.metrics.append(step(1))
        await until(lambda: said)
    assert processes() == []
    assert "ImportError: a library of its is missing" in said[0]
    assert "the run continues without it" in said[0]
    assert run.sent() == 0


OWN = """
import os, sys
from pathlib import Path

class Shelf:
    run = "shelf"

    def __init__(self, about, cursor):
        self.taken, self.left = Path(about.folder, "taken"), Path(about.folder, "left")

    def send(self, points, first):
        if points[-1].step == AT and not self.left.exists():
            self.left.touch()
            LEAVE
        with self.taken.open("a") as file:
            print(*(point.step for point in points), file=file)

    table = alarm = close = lambda self, *given: None
"""


@pytest.mark.parametrize("leave", ["sys.exit(0)", "os._exit(0)"])
async def test_a_tool_whose_code_ends_its_process_is_started_again_and_gets_every_line(
    run: RecordedRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, leave: str
) -> None:
    monkeypatch.setattr(supervision, "_FIRST_PAUSE", 0.1)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "shelves.py").write_text(OWN.replace("LEAVE", leave).replace("AT", "1"))
    said: list[str] = []

    async with followed(
        OutletsConfig(to=("shelves:Shelf",)), run.folder, said.append, lambda: False, path=str(tmp_path)
    ):
        run.metrics.append(step(1))
        await until(lambda: said)
        run.metrics.append(step(2))
    assert [sentence.partition(":")[0] for sentence in said] == ["shelves"]
    assert "receives nothing" in said[0]
    assert (run.folder.path / "taken").read_text().split() == ["1", "2"]


async def test_a_tool_whose_code_ends_its_process_after_the_run_gets_every_line_too(
    run: RecordedRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "shelves.py").write_text(OWN.replace("LEAVE", "os._exit(0)").replace("AT", "2"))
    async with followed(OutletsConfig(to=("shelves:Shelf",)), run.folder, print, lambda: False, path=str(tmp_path)):
        run.metrics.append(step(1))
        await until((run.folder.path / "taken").exists)
        run.metrics.append(step(2))
    assert (run.folder.path / "taken").read_text().split() == ["1", "2"]


async def test_a_process_that_cannot_be_started_leaves_no_descriptor(run: RecordedRun) -> None:
    said: list[str] = []
    too_long = TENSORBOARD.model_copy(update={"name": "x" * 200_000})  # for one argument of a process

    before = os.listdir("/proc/self/fd")
    follower = ToolFollower("tensorboard", too_long, run.folder, said.append, hung=4.0)
    task = asyncio.create_task(follower.run())
    await until(lambda: said)
    assert len(os.listdir("/proc/self/fd")) == len(before)
    await follower.end(task, 20.0)
    assert "cannot be started" in said[0]


async def test_the_end_of_a_run_waits_for_a_tool_for_a_while(run: RecordedRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervision, "_STOP_SECONDS", 0.5)
    said: list[str] = []

    async with followed(TENSORBOARD, run.folder, said.append, stopped=lambda: True):
        run.metrics.append(step(1))
        await until(lambda: run.sent() == 1)
        os.kill(processes()[0], signal.SIGSTOP)
        run.metrics.append(step(2))
    assert processes() == []
    assert said == ["tensorboard has not taken the end of the run within 0.5 s"]
    assert run.sent() == 1
