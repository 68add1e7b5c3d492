"""Metric lines as points of curves, named as in docs/reference/metrics.md, with a section for each kind of line and
each map in a line; sampled completions as rows of a table.
"""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from stretto.core.records import Record
from stretto.store.series.metrics import MetricsLine, SampledCompletion, SetEvaluationLine, StepMetrics
from stretto_report.reading.series import flat

Value = str | int | float | bool

_EVERYWHERE = "wall_seconds"  # present in each point of each curve
_BOUNDS = ("low", "high")  # of an interval


class MetricsPoint(Record, frozen=True):
    """Numbers of one metrics line, at one training step. `curve`: ``step``, ``evaluation`` or ``evaluation_set/NAME``.
    `seconds`: the line's `wall_seconds`. Steps ascend within a curve.

    Example: ``MetricsPoint("step", 12, 84.5, {"reward": 0.5, "trainer/loss": -0.02, "busy/engine-0": 0.97})``
    """

    curve: str
    step: int
    seconds: float  # since the run began
    values: Mapping[str, float]


def point_of(line: MetricsLine) -> MetricsPoint:
    """Return a point with all finite numbers of a line; nested names are joined by "/". Names of an evaluation begin
    with the point's curve; names of a training step do not.

    >>> from stretto.store.series.metrics import EvaluationLine
    >>> line = EvaluationLine(8, 8, 60.0, 50.0, 0.5, prompts=2, pass_at={4: 0.75}, ci95=(0.25, 0.75))
    >>> sorted(point_of(line).values)[:4]
    ['evaluation/accuracy', 'evaluation/ci95/high', 'evaluation/ci95/low', 'evaluation/pass_at/4']
    """
    match line:
        case StepMetrics():
            curve = "step"
        case SetEvaluationLine(name=name):
            curve = f"evaluation_set/{name}"
        case _:
            curve = "evaluation"
    section = "" if curve == "step" else f"{curve}/"
    fields = msgspec.to_builtins(line, str_keys=True)
    del fields["kind"], fields["step"]
    return MetricsPoint(
        curve, line.step, line.wall_seconds, {f"{section}{name}": value for name, value in _numbers(fields)}
    )


def _numbers(fields: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    for name, value in fields.items():
        match value:
            case bool() | str() | None:
                continue
            case int() | float():
                if math.isfinite(value):
                    yield name, value
            case dict():
                yield from ((f"{name}/{inner}", number) for inner, number in _numbers(value))
            case [float() | int(), float() | int()]:
                yield from _numbers({f"{name}/{end}": bound for end, bound in zip(_BOUNDS, value, strict=True)})


def newest_steps(found: Iterable[tuple[int, Iterable[str]]]) -> dict[str, int]:
    """Return the newest step of each curve. `found`: the points that a tool has, each as its step and the names of its
    numbers. The curve is known by the name ``wall_seconds``, which each point of each curve has; other names are
    ignored.

    >>> newest_steps([(7, ["reward", "wall_seconds"]), (4, ["evaluation/wall_seconds"]), (9, ["samples"])])
    {'step': 7, 'evaluation': 4}
    """
    newest: dict[str, int] = {}
    for step, names in found:
        for name in names:
            section, slash, last = name.rpartition("/")
            if last == _EVERYWHERE:
                curve = section if slash else "step"
                newest[curve] = max(step, newest.get(curve, step))
    return newest


def flat_recipe(path: Path) -> dict[str, Value]:
    """Read the recipe file `path` with dotted keys: ``{"trainer.steps": 400, ...}``. A list becomes JSON text. Raises
    OSError or ValueError if the file cannot be read."""
    found = flat(tomllib.loads(path.read_text(encoding="utf-8")))
    return {key: value if isinstance(value, Value) else json.dumps(value, default=str) for key, value in found.items()}


COLUMNS = ("version", "prompt", "completion", "answer", "outcome", "reward", "reason", "versions")


def row_of(sample: SampledCompletion) -> list[int | float | str | None]:
    """Return the cells of a completion in the order of `COLUMNS`; versions as ``6, 7``."""
    texts = (sample.prompt, sample.completion, sample.answer, sample.outcome.value)
    return [sample.version, *texts, sample.reward, sample.reason, ", ".join(map(str, sample.versions))]


def stem(tool: str) -> str:
    """Return the name of a tool for its files and its process, with a point for the colon.

    >>> stem("my_tools:Tool")
    'my_tools.Tool'
    """
    return tool.replace(":", ".")
