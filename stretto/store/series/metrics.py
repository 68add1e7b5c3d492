"""``metrics.jsonl``: one line per training step and one per evaluation."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec

from stretto.core.records import Record
from stretto.store.series.lines import LineWriter, keep_lines, read_lines


class StepMetrics(Record, frozen=True, tag="step", tag_field="kind"):
    """What one training step looked like.

    Lengths are of the batch's whole answers, staleness is over the tokens that were trained on, the accuracy is over
    all answers judged since the step before; tokens and times of the whole run are cumulative (docs/metrics.md). A
    value that is not a finite number is written as null.

    Example: ``StepMetrics(step=12, version=13, wall_seconds=31.2, rl_seconds=20.4, accuracy=0.71, reward=0.71, ...)``
    """

    step: int
    version: int  # published by this step
    wall_seconds: float  # since the run started, the warm start included
    rl_seconds: float  # since the first prompt was admitted, until this update
    accuracy: float  # right among the answers judged since the step before, those of filtered groups included
    reward: float  # mean over the batch's answers
    length_mean: float  # tokens per answer of the batch, masked ones included
    length_max: int
    staleness_mean: float  # versions
    staleness_max: int
    trained_tokens: int  # in this step
    masked_tokens: int = 0
    skipped: tuple[str, ...] = ()  # trajectories whose optimizer step was not taken: its gradient was not finite
    generated_tokens: int = 0  # by all engines for training prompts, since the start
    trainer: Mapping[str, float | None] = {}  # the update's own measurements (loss, grad_norm, ...)
    queues: Mapping[str, float | None] = {}  # fill when the batch was taken (buffer, in_flight, ...)
    busy: Mapping[str, float | None] = {}  # role: fraction of the last second or so
    slower_than_generation: str = ""  # the reward's name, where the run waits for it


class EvaluationLine(Record, frozen=True, tag="evaluation", tag_field="kind"):
    """Held-out accuracy of one version: prompts that are never trained on, sampled with a fixed seed."""

    step: int
    version: int
    wall_seconds: float
    rl_seconds: float
    accuracy: float
    prompts: int
    undecided: int = 0  # answers that nobody could judge; not right, so not in the accuracy, but not wrong either


MetricsLine = StepMetrics | EvaluationLine

_DECODER: msgspec.json.Decoder[MetricsLine] = msgspec.json.Decoder(MetricsLine)


class MetricsLog:
    """Appends to ``metrics.jsonl``; never fails training."""

    def __init__(self, path: Path) -> None:
        self._writer: LineWriter[MetricsLine] = LineWriter(path)

    def append(self, line: MetricsLine) -> None:
        self._writer.append([line])


def read_metrics(path: Path) -> tuple[list[StepMetrics], list[EvaluationLine]]:
    """The steps and the evaluations of a run, in the order in which they happened.

    Raises:
        StoreError: a line in the middle cannot be read.
    """
    lines = read_lines(path, _DECODER)
    steps = [line for line in lines if isinstance(line, StepMetrics)]
    return steps, [line for line in lines if isinstance(line, EvaluationLine)]


def rewind_metrics(path: Path, step: int) -> None:
    """Forget what came after `step`, because the run goes on from its checkpoint."""
    keep_lines(path, _DECODER, lambda line: line.step <= step)
