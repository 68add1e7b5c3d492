"""The README's picture of a run: its timeline, with its accuracy below.

python -m benchmarks.picture RUN_DIR    extracts the data from a run folder into docs/images/run.json
python -m benchmarks.picture            draws docs/images/run.png from that file
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import msgspec
import numpy as np
from matplotlib.image import imread, imsave

from stretto.core.events import Span
from stretto.core.records import Record
from stretto.store.files import write_atomically
from stretto.store.run_folder import Machine, RunFolder, library_versions, machine
from stretto.store.series.metrics import EvaluationLine, StepMetrics, read_metrics
from stretto_report.dashboard.plots import plot_accuracy
from stretto_report.dashboard.timeline import STEPS_SHOWN, middle_window, plot_timeline
from stretto_report.reading.series import read_spans

IMAGES = Path(__file__).resolve().parent.parent / "docs" / "images"
DATA = IMAGES / "run.json"


class Drawn(Record, frozen=True):
    """Data of the picture. Of most steps only the number and the accuracy are needed; the last step is complete."""

    machine: Machine
    versions: dict[str, str]
    accuracy: tuple[float, ...]  # of each step, from 1
    last: StepMetrics
    evaluations: tuple[EvaluationLine, ...]
    spans: tuple[Span, ...]  # the first of the run, which is second 0, and those in the window of the timeline


def drawn(run: Path) -> Drawn:
    """Extract the picture's data from a run that was made on this machine."""
    folder = RunFolder.open(run)
    steps, evaluations = read_metrics(folder.metrics)
    spans = read_spans(folder.spans)
    window = middle_window(spans, STEPS_SHOWN)
    spans = sorted(spans, key=lambda span: span.start)
    origin = spans[0].start
    moved = [msgspec.structs.replace(span, start=span.start - origin, end=span.end - origin) for span in spans]
    first, last = window.start - origin, window.end - origin
    return Drawn(
        machine=machine(),
        versions=library_versions(),
        accuracy=tuple(round(step.accuracy, 4) for step in steps),
        last=steps[-1],
        evaluations=tuple(evaluations),
        spans=(moved[0], *(span for span in moved[1:] if span.end > first and span.start < last)),
    )


def draw(what: Drawn, path: Path) -> None:
    """Draw the timeline above and the accuracy below, as one PNG."""
    steps = [
        msgspec.structs.replace(what.last, step=number, accuracy=accuracy)
        for number, accuracy in enumerate(what.accuracy, start=1)
    ]
    with tempfile.TemporaryDirectory() as made:
        timeline, accuracy = Path(made) / "timeline.png", Path(made) / "accuracy.png"
        plot_timeline(timeline, what.spans)
        plot_accuracy(accuracy, steps, what.evaluations)
        pieces = [imread(timeline)[..., :3], imread(accuracy)[..., :3]]
    width = max(piece.shape[1] for piece in pieces)
    filled = [np.pad(piece, ((0, 0), (0, width - piece.shape[1]), (0, 0)), constant_values=1.0) for piece in pieces]
    imsave(path, np.vstack(filled))


def main(arguments: list[str]) -> None:
    IMAGES.mkdir(parents=True, exist_ok=True)
    if arguments:
        write_atomically(DATA, msgspec.json.format(msgspec.json.encode(drawn(Path(arguments[0]))), indent=0) + b"\n")
    draw(msgspec.json.decode(DATA.read_bytes(), type=Drawn), IMAGES / "run.png")


if __name__ == "__main__":
    main(sys.argv[1:])
