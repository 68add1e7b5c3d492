"""Learning curves of a run: every number of ``metrics.jsonl`` as a column over steps."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np

from stretto.core.records import Record
from stretto.store.series.lines import LineFollower
from stretto.store.series.metrics import METRICS, EvaluationLine, SetEvaluationLine, StepMetrics
from stretto_report.reading.series import LinesRead
from stretto_report.watch.index.columns import Cache, Column, GrowingColumns

_PART = "steps"
_NUMBERS: tuple[str, ...] = ("wall_seconds", "rl_seconds", "accuracy", "reward", "length_mean", "length_max")
_NUMBERS += ("staleness_mean", "staleness_max", "trained_tokens", "masked_tokens", "generated_tokens")
_NUMBERS += ("max_staleness", "truncated")
_FOR_ALARMS = ("undecided",)  # read by an alarm, and drawn in no curve
_EACH_STEP = ("step", *_NUMBERS, *_FOR_ALARMS)
_MAPS = ("trainer", "queues", "busy", "memory", "rewards", "canary")
_KEPT_FROM = 2_000  # steps from which they are cached; fewer are read in an instant

#: Series that follow from others.
DERIVED = ("masked_fraction", "seconds_step", "tokens_per_second")
#: The largest canary distance of all engines; `canary.ENGINE` is the distance of one.
CANARY = "canary"


class _Facts(LinesRead, frozen=True):
    evaluations: tuple[EvaluationLine | SetEvaluationLine, ...]
    skipped: dict[int, tuple[str, ...]]
    undecided_reason: str = ""


class Steps:
    """Steps and evaluations of one run, read from ``metrics.jsonl`` as they are appended.

    `table`: numbers of each step, [steps]. `evaluations`: those of all sets. `skipped`: ids of the trajectories of
    skipped optimizer steps, by step. `undecided_reason`: of the newest step with undecided verdicts; "": none. `epoch`
    grows whenever the file was rewritten because the run was resumed from an earlier step.
    """

    def __init__(self, path: Path, cache: Cache) -> None:
        self._follower, self._cache = LineFollower(path, METRICS), cache
        self.evaluations: list[EvaluationLine | SetEvaluationLine] = []
        self.skipped: dict[int, tuple[str, ...]] = {}
        self._reset()
        self.epoch, self._kept = 0, 0
        if (kept := cache.load(_PART, _Facts)) is not None and self.table.restore(kept[0]):
            facts = kept[1]
            facts.restore(self._follower)
            self.evaluations, self.skipped, self._kept = list(facts.evaluations), facts.skipped, self.table.rows
            self.undecided_reason = facts.undecided_reason

    def _reset(self) -> None:
        self.table = GrowingColumns({"step": "i8"} | dict.fromkeys((*_NUMBERS, *_FOR_ALARMS), "f8"))
        self.evaluations.clear()
        self.skipped.clear()
        self.undecided_reason = ""

    @property
    def fault(self) -> str | None:
        return self._follower.fault

    def advance(self) -> bool:
        """Read about a megabyte more; return whether there may be more. If the file was rewritten, everything is read
        again. At the end of a long file, the columns are saved to the cache. Raises StoreError if the file is no
        regular file, or cannot be read."""
        lines, again = self._follower.read_on()
        if again:
            self._reset()
            self.epoch, self._kept = self.epoch + 1, 0
        steps = [line for line in lines if isinstance(line, StepMetrics)]
        self.evaluations += [line for line in lines if isinstance(line, EvaluationLine)]
        self.skipped |= {step.step: step.skipped for step in steps if step.skipped}
        reasons = [step.undecided_reason for step in steps if step.undecided_reason]
        self.undecided_reason = reasons[-1] if reasons else self.undecided_reason
        if steps:
            self._append(steps)
        if not self._follower.more and self.table.rows > max(_KEPT_FROM, 1.2 * self._kept):
            self.keep()
        return self._follower.more

    def keep(self) -> None:
        """Save all that was read to the cache."""
        self._kept = self.table.rows
        facts = _Facts.of(self._follower, tuple(self.evaluations), self.skipped, self.undecided_reason)
        self._cache.save(_PART, {name: self.table[name] for name in self.table.names}, facts)

    def _append(self, steps: Sequence[StepMetrics]) -> None:
        columns: dict[str, list[Any]] = {name: [getattr(step, name) for step in steps] for name in _EACH_STEP}
        for place, step in enumerate(steps):
            for section in _MAPS:
                for name, value in getattr(step, section).items():
                    if (full := f"{section}.{name}") not in columns:
                        columns[full] = [np.nan] * len(steps)
                    columns[full][place] = np.nan if value is None else value
        for name in columns.keys() - set(self.table.names):
            self.table.add(name)
        self.table.append(columns)

    def id(self, row: int) -> str:
        """Id of the step in a row of the table; another one once the step was trained again."""
        numbers = np.array([self.table[name][row] for name in _NUMBERS])
        return f"{self.table['step'][row]}-{blake2b(numbers.tobytes(), digest_size=8).hexdigest()}"

    def step_of(self, id: str) -> int | None:
        """Number of the step with this id; None if there is none."""
        step, numbers = id.partition("-")[0], self.table["step"]
        row = int(np.searchsorted(numbers, int(step))) if step.isdecimal() and len(step) < 18 else len(numbers)
        return int(step) if row < len(numbers) and self.id(row) == id else None

    @property
    def series(self) -> dict[str, Column]:
        """Columns of the table by name, for the alarms."""
        return {name: self.table[name] for name in self.table.names}

    @property
    def names(self) -> list[str]:
        """Names of the series that `column` returns for this run, in the order in which they are shown."""
        found = [name for name in self.table.names if name not in ("step", *_FOR_ALARMS)]
        derived = [*DERIVED, CANARY] if self._canaries else [*DERIVED]
        return [*found[: len(_NUMBERS)], *derived, *sorted(found[len(_NUMBERS) :])]

    @property
    def _canaries(self) -> list[str]:
        return [name for name in self.table.names if name.startswith(f"{CANARY}.")]

    def column(self, name: str) -> Column:
        """Return the numbers of one series, measured or derived, [steps]; NaN where not measured. Raises KeyError if
        there is no such series."""
        table = self.table
        if name in table and name != "step":
            return table[name].astype(float)
        match name:
            case "masked_fraction":
                whole = table["trained_tokens"] + table["masked_tokens"]
                return _ratio(table["masked_tokens"], whole)
            case "seconds_step":
                return np.diff(table["rl_seconds"], prepend=0.0)
            case "tokens_per_second":
                return _ratio(table["trained_tokens"], np.diff(table["rl_seconds"], prepend=0.0))
            case "canary" if engines := self._canaries:
                largest: Column = np.fmax.reduce([table[engine] for engine in engines])
                return largest
            case _:
                raise KeyError(name)


def _ratio(part: Column, whole: Column) -> Column:
    found: Column = np.divide(part, whole, out=np.full(len(part), np.nan), where=whole > 0)
    return found


def finite(value: float) -> float | None:
    """Return the number; None if it is not finite, because JSON cannot represent it."""
    return value if np.isfinite(value) else None


class _Curve(Record, frozen=True):
    """One series in buckets of steps: mean, least and greatest value of each bucket; None where nothing was measured.
    `newest`: newest single value; None: there is none."""

    mean: list[float | None]
    min: list[float | None]
    max: list[float | None]
    newest: float | None


class _Curves(Record, frozen=True):
    """Several series of `points` points; `steps`: number of all steps of the run. Each point stands for `bucket` steps
    (the last may have fewer). `x`: the values of each possible x axis, at the last step of each point."""

    steps: int
    points: int
    bucket: int
    x: dict[str, list[float | None]]
    series: dict[str, _Curve]


def curves(
    steps: Steps, trained: Column, names: Sequence[str], first: int | None, last: int | None, points: int
) -> _Curves:
    """Return the series `names` between the steps `first` and `last` (inclusive; None: no limit): mean,
    least and greatest over equal numbers of steps, at most `points`. A point's x values are those of its last step.

    Args:
        trained: number of trajectories trained in each step, [steps]; for the count of trajectories.

    Raises:
        KeyError: there is no such series.
    """
    numbers = steps.table["step"]
    begin = 0 if first is None else int(np.searchsorted(numbers, first))
    end = len(numbers) if last is None else int(np.searchsorted(numbers, last, side="right"))
    bucket = max(1, -(-(end - begin) // points))
    starts = np.arange(begin, end, bucket) - begin
    ends = np.minimum(starts + bucket, end - begin) - 1
    axes = {
        "step": numbers,
        "wall_seconds": steps.table["wall_seconds"],
        "rl_seconds": steps.table["rl_seconds"],
        "trained_tokens": np.cumsum(steps.table["trained_tokens"]),
        "trajectories": np.cumsum(trained),
    }
    return _Curves(
        steps=len(numbers),
        points=len(starts),
        bucket=bucket,
        x={name: _listed(axis[begin:end][ends]) for name, axis in axes.items()},
        series={name: _curve(steps.column(name)[begin:end], starts) for name in names},
    )


def _curve(values: Column, starts: Column) -> _Curve:
    if not len(starts):
        return _Curve([], [], [], None)
    measured = np.flatnonzero(np.isfinite(values))
    newest = float(values[measured[-1]]) if len(measured) else None
    if len(starts) == len(values):
        same = _listed(values)
        return _Curve(same, same, same, newest)
    known = np.isfinite(values)
    counts = np.add.reduceat(known, starts, dtype=float)
    sums = np.add.reduceat(np.where(known, values, 0.0), starts)
    means = np.divide(sums, counts, out=np.full(len(starts), np.nan), where=counts > 0)
    least = np.minimum.reduceat(np.where(known, values, np.inf), starts)
    most = np.maximum.reduceat(np.where(known, values, -np.inf), starts)
    return _Curve(_listed(means), _listed(least), _listed(most), newest)


def _listed(values: Column) -> list[float | None]:
    found = values.astype(object)
    found[~np.isfinite(values)] = None
    return list(found)
