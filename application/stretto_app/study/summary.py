"""Result of a study: values of each cell over its seeds, with intervals, as a record and as a Markdown table."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from stretto.core.records import Record
from stretto.store.run_folder import Machine, library_versions, machine
from stretto_app.study.conduct import RunOutcome, StudyProgress
from stretto_app.study.definition import Study
from stretto_app.study.statistics import CurvePoint, Interval, accuracy_at, by_clock, by_step, interval

INTERVALS = "mean and 95 % interval over seeds (Student t)"


class CellSummary(Record, frozen=True):
    """Result of one cell. Intervals are over its finished runs, None if a run lacks the value or none is finished.
    Rates are in tokens per second.

    `accuracy`: held-out accuracy of the last version. `accuracy_at_clock`: the newest one when the study's quickest run
    ended. `seconds_to_target`: None unless every run has reached the study's target. `reached`: number of runs that
    have reached it. `seeds`: number of planned runs. `wasted`, `recomputed`: tokens per generated token. `failed`:
    reason, by digest.
    """

    name: str
    labels: Mapping[str, str]
    seeds: int
    accuracy: Interval | None
    accuracy_at_clock: Interval | None
    seconds: Interval | None
    trained_per_second: Interval | None
    generated_per_second: Interval | None
    staleness_mean: Interval | None
    staleness_max: int | None
    wasted: Interval | None  # wasted tokens as a share of the generated ones
    recomputed: Interval | None  # recomputed tokens per generated token
    seconds_to_target: Interval | None
    reached: int | None
    by_step: tuple[CurvePoint, ...]
    by_clock: tuple[CurvePoint, ...]
    runs: tuple[RunOutcome, ...]
    failed: Mapping[str, str]


class StudyResult(Record, frozen=True):
    """Result of a study so far. `clock`: time of the quickest run, in seconds of reinforcement learning; None before a
    run has finished. `intervals`: what the intervals of the cells are, in words. `target`: held-out accuracy to reach;
    None: none. `trajectories`: trained in each run. `steps`: training steps of the first cell."""

    study: str
    digest: str
    trajectories: int
    steps: int
    clock: float | None
    target: float | None
    intervals: str
    machine: Machine
    versions: Mapping[str, str]
    cells: tuple[CellSummary, ...]


def summarise(study: Study, progress: StudyProgress) -> StudyResult:
    """Compute the result of a study from its finished runs. The result names this machine and its library versions."""
    finished = list(progress.finished.values())
    clock = min((run.seconds for run in finished), default=None)
    recipe = study.cells[0].runs[0].recipe
    return StudyResult(
        study=study.name,
        digest=study.digest,
        trajectories=recipe.trainer.steps * recipe.rollout.batch_size * recipe.rollout.group_size,
        steps=recipe.trainer.steps,
        clock=clock,
        target=study.target,
        intervals=INTERVALS,
        machine=machine(),
        versions=library_versions(),
        cells=tuple(_cell(study, number, progress, clock) for number in range(len(study.cells))),
    )


def _cell(study: Study, number: int, progress: StudyProgress, clock: float | None) -> CellSummary:
    cell = study.cells[number]
    runs = tuple(progress.finished[run.digest] for run in cell.runs if run.digest in progress.finished)
    curves = [run.evaluations for run in runs]

    def over(value: Callable[[RunOutcome], float | None]) -> Interval | None:
        found = [value(run) for run in runs]
        known = [one for one in found if one is not None]
        return interval(known) if known and len(known) == len(found) else None

    def to_target(run: RunOutcome) -> float | None:
        return None if study.target is None else run.seconds_to(study.target)

    return CellSummary(
        name=cell.name,
        labels=cell.labels,
        seeds=len(cell.runs),
        accuracy=over(lambda run: run.accuracy),
        accuracy_at_clock=over(lambda run: None if clock is None else accuracy_at(run.evaluations, clock)),
        seconds=over(lambda run: run.seconds),
        trained_per_second=over(lambda run: run.trained_per_second),
        generated_per_second=over(lambda run: run.generated_per_second),
        staleness_mean=over(lambda run: run.staleness_mean),
        staleness_max=max((run.staleness_max for run in runs), default=None),
        wasted=over(lambda run: run.wasted_tokens / run.generated_tokens if run.generated_tokens else None),
        recomputed=over(lambda run: run.recomputed_tokens / run.generated_tokens if run.generated_tokens else None),
        seconds_to_target=over(to_target),
        reached=None if study.target is None else sum(to_target(run) is not None for run in runs),
        by_step=by_step(curves),
        by_clock=by_clock(curves, clock or 0.0),
        runs=runs,
        failed={run.digest: progress.failed[run.digest] for run in cell.runs if run.digest in progress.failed},
    )


def table(result: StudyResult) -> str:
    """The result as a Markdown table, one row per cell."""
    axes = list(result.cells[0].labels)
    at = "-" if result.clock is None else f"{result.clock:.1f}"
    head = [*axes, "seeds", "accuracy", f"accuracy at {at} s", "seconds", "trained tokens/s", "mean staleness"]
    head += ["largest", "wasted"] + ([] if result.target is None else [f"seconds to {result.target:.0%}"])
    rows = [head, ["---"] * len(head)]
    for cell in result.cells:
        values = (cell.accuracy, cell.accuracy_at_clock, cell.seconds, cell.trained_per_second, cell.staleness_mean)
        rows.append(
            [
                *(cell.labels[axis] for axis in axes),
                str(len(cell.runs)) + (f" ({len(cell.failed)} failed)" if cell.failed else ""),
                *("" if value is None else str(value) for value in values),
                "" if cell.staleness_max is None else str(cell.staleness_max),
                "" if cell.wasted is None else f"{cell.wasted.mean:.0%}",
                *([] if result.target is None else [_to_target(cell)]),
            ]
        )
    return "\n".join(_row(row) for row in rows) + "\n"


def _to_target(cell: CellSummary) -> str:
    if cell.seconds_to_target is not None:
        return str(cell.seconds_to_target)
    return f"{cell.reached} of {len(cell.runs)} runs reach it" if cell.runs else ""


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |"
