"""Lines of metrics whose unimportant numbers are always the same."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from stretto.store.series.metrics import EvaluationLine, StepMetrics


def step_line(step: int, **changed: Any) -> StepMetrics:
    """A step of a second."""
    numbers: dict[str, Any] = {"version": step, "wall_seconds": 10.0 + step, "rl_seconds": float(step)}
    numbers |= {"accuracy": 0.5, "reward": 0.5, "length_mean": 30.0, "length_max": 90, "trained_tokens": 100}
    return StepMetrics(step=step, **(numbers | {"staleness_mean": 1.5, "staleness_max": 4} | changed))


def evaluation_line(step: int, accuracy: float = 0.5, **changed: Any) -> EvaluationLine:
    """Of 512 questions."""
    numbers: dict[str, Any] = {"version": step, "wall_seconds": 10.0 + step, "rl_seconds": float(step), "prompts": 512}
    return EvaluationLine(step=step, accuracy=accuracy, **(numbers | changed))


def write_lines(path: Path, lines: Sequence[StepMetrics | EvaluationLine]) -> None:
    """In place of what is there."""
    path.write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in lines))
