"""A run folder whose lines a test writes itself, and a tool that keeps what it gets as lines of JSON."""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from stretto.core.records import Outcome
from stretto.store.run_folder import RunFolder
from stretto.store.series.lines import LineWriter
from stretto.store.series.metrics import EvaluationLine, MetricsLog, SampledCompletion, StepMetrics
from stretto_report.audit.evidence import Alarm
from stretto_report.outlets.follower import Cursor, How, RunFollower, read_cursor
from stretto_report.outlets.points import MetricsPoint
from stretto_report.outlets.role import FollowerSpec, follow
from tests.store.lines import evaluation_line, step_line


def step(number: int, reward: float = 0.5, entropy: float | None = None) -> StepMetrics:
    maps: dict[str, Any] = {
        "trainer": {"loss": 0.25, "entropy": entropy},
        "queues": {"buffered": 3.0},
        "busy": {"engine-0": 0.75},
    }
    return step_line(number, reward=reward, trained_tokens=960, **maps)


def evaluation(number: int, accuracy: float = 0.125, prompts: int = 8) -> EvaluationLine:
    return evaluation_line(number, accuracy, prompts=prompts)


def sample(version: int) -> SampledCompletion:
    return SampledCompletion(version, "17", "3+8=", "11", f"3+8={version}", Outcome.WRONG, 0.0, "", (version,))


class RecordedRun:
    """The folder of a run that has written no line yet."""

    def __init__(self, path: Path) -> None:
        (path / "logs").mkdir(parents=True, exist_ok=True)
        (path / "recipe.toml").write_text("seed = 1\n[trainer]\nsteps = 6\n")
        self.folder = RunFolder(path)
        self.metrics = MetricsLog(self.folder.metrics)
        self.samples: LineWriter[SampledCompletion] = LineWriter(self.folder.samples)

    def append(self, *lines: StepMetrics | EvaluationLine) -> None:
        for line in lines:
            self.metrics.append(line)

    def steps(self, first: int, last: int, reward: float = 0.5) -> None:
        self.append(*(step(number, reward) for number in range(first, last + 1)))

    def sent(self, tool: str = "tensorboard") -> int:
        """The newest step that a tool has noted."""
        return read_cursor(self.folder.outlets / f"{tool}.json").sent.get("step", 0)


def collapsing(run: RecordedRun, first: int, last: int) -> None:
    """Steps whose entropy is 1 nat until step 10, and a tenth of it from then on: the mean of ten is below a fifth at
    step 19 (0.19 nats)."""
    for number in range(first, last + 1):
        run.metrics.append(step(number, entropy=1.0 if number <= 10 else 0.1))


def follow_to_the_end(run: RecordedRun, tool: str, project: str = "first", tags: tuple[str, ...] = ()) -> None:
    """As a process that is started when the run has ended."""
    until, ours = os.pipe()
    os.close(ours)
    try:
        follow(FollowerSpec(tool, str(run.folder.path), project, "", tags, until), lambda: None)
    finally:
        os.close(until)


class JsonLines:
    """An outlet: a file with a line for each point and for each table. It is out of order while `fault` is there."""

    run = "a run"
    had: Mapping[str, int] = {}

    def __init__(self, path: Path, fault: Path) -> None:
        self._path, self._fault = path, fault

    def send(self, points: Sequence[MetricsPoint], first: int) -> None:
        self._append([[point.curve, point.step, point.values] for point in points])

    def table(self, step: int, rows: Sequence[SampledCompletion], points: int) -> None:
        self._append([["table", step, [row.completion for row in rows]]])

    def alarm(self, alarm: Alarm) -> None:
        self._append([["alarm", alarm.first_step, alarm.title]])

    def close(self, how: How) -> None:
        self._append([["end", 0, how]])

    def _append(self, lines: Sequence[object]) -> None:
        if self._fault.exists():
            raise ConnectionError("the tool does not answer")
        with self._path.open("a") as file:
            file.writelines(json.dumps(line) + "\n" for line in lines)


class Followed:
    """A run that is followed for `JsonLines`; `follower` is new after each `restart`, as after a death."""

    def __init__(self, path: Path) -> None:
        path.mkdir(exist_ok=True)
        self.run = RecordedRun(path / "run")
        self.beats = 0
        self.fault_at_beat = 0  # when the tool is out of order
        self.fault, self._got, self._cursor = path / "fault", path / "got.jsonl", path / "cursor.json"
        self.restart()

    def restart(self) -> None:
        outlet = JsonLines(self._got, self.fault)
        self.follower = RunFollower(self.run.folder.path, self._cursor, read_cursor(self._cursor), outlet, self._beat)

    def _beat(self) -> None:
        self.beats += 1
        if self.beats == self.fault_at_beat:
            self.fault.touch()

    @property
    def cursor(self) -> Cursor:
        return read_cursor(self._cursor)

    def got(self, curve: str) -> list[tuple[int, object]]:
        """What the tool got of a curve: steps, and rewards or accuracies or the rows of a table."""
        if not self._got.exists():
            return []
        lines = [json.loads(line) for line in self._got.read_text().splitlines()]
        worth = {"step": "reward", "evaluation": "evaluation/accuracy"}.get(curve)
        return [(number, value[worth] if worth else value) for name, number, value in lines if name == curve]
