"""An alarm as a record, the evidence that decides alarms, and since when a series of measurements is bad.

A series has one value for each step, NaN where it was not measured. A window is ten consecutive measurements
(`WINDOW`). Each function tests the newest window. If that is bad, it returns the step since which all windows are bad.
"""

from __future__ import annotations

import dataclasses
import math
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path
from statistics import NormalDist

import msgspec
import numpy as np
import numpy.typing as npt

from stretto.core.errors import StoreError
from stretto.core.records import Record
from stretto.store import lock
from stretto.store.series.lines import LineFollower, open_plain
from stretto.store.series.metrics import EvaluationLine, MetricsLine, StepMetrics, alike
from stretto_report.reading.series import LinesRead

KEPT = "alarms.bin"  #: name of the file in a run folder with what its alarms remember (`keep`)
WINDOW = 10  #: measured steps in a window
RECENT = 2048  #: newest steps that `Evidence.thinned` leaves as they are, at least
_FIRST = 256  # steps at the beginning of the evidence that it leaves, whatever their numbers (a branch begins later)
_LARGEST = 1 << 26  # bytes of what is kept; it has a megabyte
_CHANCE = 0.001  # probability that some pair of a run's evaluations differs by chance
_LOWER = 2.0  # standard errors by which each evaluation since a fall is below the best

Numbers = npt.NDArray[np.float64]
Steps = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]
Questions = tuple[int, int, str]  # what an evaluation asked: its prompts, completions and digest


@dataclass(frozen=True)
class _Onset:
    """Beginning of a bad stretch that lasts until now. `first`: step of its beginning; `was`: mean of the first window
    of the run (the best one for `collapsed`); `now`: mean of the newest window (its greatest value for `still`)."""

    first: int
    was: float
    now: float


def measured(values: Numbers | None, windows: int = 1) -> bool:
    """Whether a series has enough measurements for `windows` windows of ten; False for None (no such series)."""
    return values is not None and int(np.isfinite(values).sum()) >= windows * WINDOW


def apart(
    steps: Steps,
    values: Numbers | None,
    differs: Callable[[Numbers, float], Flags],
    windows: int = 2,
    *,
    geometric: float | None = None,
) -> _Onset | None:
    """Return the onset of bad windows; None if the newest is not bad, or there are fewer measurements than `windows`
    windows need.

    `differs(means, first)` marks the bad windows, from the means of all (overlapping) windows and the mean of the
    first. `geometric`: use geometric means, with values raised to at least this, so that outliers of heavy-tailed
    estimates weigh little; None: arithmetic means.
    """
    if values is None or not measured(values, windows):
        return None
    known = np.flatnonzero(np.isfinite(values))
    chosen = values[known]
    if geometric is not None:
        chosen = np.log(np.maximum(chosen, geometric))
    means = _means(chosen)
    if geometric is not None:
        means = np.exp(means)
    return _newest(steps[known], differs(means, float(means[0])), means)


def still(steps: Steps, values: Numbers | None) -> _Onset | None:
    """Return the onset of a standstill: since then no value has exceeded a ten-thousandth of the median of the first
    window's positive values (a median, since a single spike does not move it). None if a value of the newest window
    exceeds it, or less than one window was measured."""
    if values is None or not measured(values):
        return None
    known = np.flatnonzero(np.isfinite(values))
    chosen = values[known]
    some = chosen[:WINDOW][chosen[:WINDOW] > 0]
    moves = chosen > 1e-4 * (float(np.median(some)) if len(some) else 0.0)
    if moves[-WINDOW:].any():
        return None
    last = np.flatnonzero(moves)
    first = int(last[-1]) + 1 if len(last) else 0
    return _Onset(int(steps[known[first]]), float(chosen[:WINDOW].mean()), float(chosen[-WINDOW:].max()))


def collapsed(steps: Steps, values: Numbers | None) -> _Onset | None:
    """Return the onset of windows whose mean is less than half of the best earlier window's, by more than chance. `was`
    is the mean of the best window. None if the newest window has not fallen so, or less than two windows were measured.
    The noise is estimated from differences of neighbours, which a trend does not affect."""
    if values is None or not measured(values, 2):
        return None
    known = np.flatnonzero(np.isfinite(values))
    means = _means(values[known])
    noise = float(np.std(np.diff(values[known]))) / math.sqrt(2)
    best = np.maximum.accumulate(means)
    chance = needed(len(means) / WINDOW) * noise * math.sqrt(2 / WINDOW)
    found = _newest(steps[known], (means < 0.5 * best) & (best - means > chance), means)
    return None if found is None else _Onset(found.first, float(best[-1]), found.now)


def fallen(
    evaluations: Sequence[EvaluationLine], left_out: Mapping[Questions, int] = {}
) -> tuple[EvaluationLine, EvaluationLine] | None:
    """Return the evaluation with the best accuracy, and the first evaluation since which all are lower, and together
    worse by more than chance. None if the newest is not lower, or fewer than two count. `evaluations`: in the order of
    the run; only those of the same questions as the newest count. `left_out`: as in `Evidence`.

    The threshold allows for many comparisons: the best of several is chosen, and the newest are tested each time. So
    that it does not outgrow a fall that lasts, all evaluations since the fall count together.
    """
    evaluations = alike(evaluations)
    if len(evaluations) < 2:
        return None
    best = max(evaluations, key=lambda line: line.accuracy)
    bound = needed(len(evaluations) + sum(left_out[of] for of in left_out if evaluations[-1].is_like(*of)))
    first, right, asked, high = None, 0.0, 0.0, _estimate(best)
    for line in reversed(evaluations[evaluations.index(best) + 1 :]):
        share, count = low = _estimate(line)
        if _deviations(high, low) <= _LOWER:
            break
        right, asked = right + share * count, asked + count
        first = line if _deviations(high, (right / asked, asked)) > bound else first
    return None if first is None else (best, first)


def rises(steps: Steps, values: Numbers | None, until: int, later: int) -> tuple[float, float] | None:
    """Return the means of the windows that end at the steps `until` and `later` if the later mean is higher by more
    than two standard errors; else None. The first window stands in for that of `until` if fewer than ten steps were
    measured up to `until`. None also if the windows overlap, or `values` is None."""
    if values is None:
        return None
    known = np.flatnonzero(np.isfinite(values))
    ends = [int(np.searchsorted(steps[known], step, side="right")) for step in (until, later)]
    if ends[0] < WINDOW:  # no full window before `until`: compare with the first window
        ends[0] = WINDOW
    if ends[1] - ends[0] < WINDOW:
        return None
    then, now = (values[known[end - WINDOW : end]] for end in ends)
    error = math.sqrt((float(then.var(ddof=1)) + float(now.var(ddof=1))) / WINDOW)
    return (float(then.mean()), float(now.mean())) if now.mean() - then.mean() > 2 * error else None


def newest_mean(values: Numbers) -> float:
    """Return the mean of the newest ten measurements, or of all if there are fewer; there must be one. NaN are left
    out."""
    return float(values[np.isfinite(values)][-WINDOW:].mean())


def needed(looks: float) -> float:
    """Return the number of standard errors beyond which a difference between two of `looks` values is more than chance.
    It grows with the number of pairs that can be compared."""
    return NormalDist().inv_cdf(1 - _CHANCE / max(2.0, looks * (looks + 1)))


def _deviations(best: tuple[float, float], other: tuple[float, float]) -> float:
    """Return the number of standard errors by which an accuracy (`_estimate`) is below the best; negative if it is
    above. The error is that of the pooled accuracy, because the separate errors of very low and very high shares are
    far too small."""
    (high, many), (low, few) = best, other
    both = (high * many + low * few) / (many + few)
    return (high - low) / math.sqrt(both * (1 - both) * (1 / many + 1 / few))


def _estimate(line: EvaluationLine) -> tuple[float, float]:
    """Return the centre of an accuracy's confidence interval (pulled towards one half for few questions), and the
    effective number of questions."""
    if line.ci95 is None:
        count = max(line.samples, line.prompts, 1) + 4  # Agresti and Coull: two more of each kind
        return (line.accuracy * (count - 4) + 2) / count, count
    low, high = line.ci95
    middle = min(max((low + high) / 2, 0.001), 0.999)
    return middle, middle * (1 - middle) / max((high - low) / (2 * 1.96), 1e-4) ** 2


def _means(values: Numbers) -> Numbers:
    sums: Numbers = np.cumsum(np.concatenate(([0.0], values)))
    means: Numbers = (sums[WINDOW:] - sums[:-WINDOW]) / WINDOW
    return means


def _newest(steps: Steps, ill: Flags, means: Numbers) -> _Onset | None:
    if not ill[-1]:
        return None
    well = np.flatnonzero(~ill)
    first = int(well[-1]) + 1 if len(well) else 0
    return _Onset(int(steps[WINDOW - 1 + first]), float(means[0]), float(means[-1]))


class Alarm(Record, frozen=True):
    """An alarm that fires. `name`: identifier of the alarm; `title`: words for people, which may name a role.
    `first_step`: the step since which it holds. `look`: where to look for the cause: ``series:NAME``, ``recipe:KEY``,
    ``timeline`` or ``logs``."""

    name: str
    title: str
    first_step: int
    message: str
    look: str

    def __str__(self) -> str:
        return f"alarm  {self.title} since step {self.first_step}: {self.message}; see {self.look}"


@dataclass(frozen=True)
class Disk:
    """Disk of a running run, in bytes: free space, and total size of the files directly in the run folder."""

    free: int
    written: int


def disk_of(folder: Path) -> Disk | None:
    """Return the free disk space, and the bytes of the files that are directly in the run folder; None unless the run
    is running (its lock is held), or if the folder cannot be read."""
    try:
        if not lock.is_held(folder):
            return None
        written = sum(path.stat().st_size for path in folder.iterdir() if path.is_file())
        return Disk(shutil.disk_usage(folder).free, written)
    except OSError:  # it was removed meanwhile
        return None


@dataclass(frozen=True)
class Evidence:
    """Measurements that decide the alarms.

    `steps`: step numbers. `series`: values by their names in docs/reference/metrics.md (``reward``,
    ``trainer.entropy``, ``busy.trainer``), one for each of `steps`, NaN where not measured. `evaluations`: of the
    held-out questions, in order. `bound`: `rollout.max_staleness`, for steps without the series `max_staleness`; None:
    no bound. `disk`: None: the run is not running. `last_step`: `trainer.steps`; None: not known. `mismatch`: nats a
    token between engine and trainer that rounding explains for their dtypes. `undecided_reason`: most frequent reason
    of the newest step with undecided verdicts; "": none. `filtered`: number of completions filtered since the newest
    group that was kept, counted to a few times `many`, and a reason of the filter that refused the most; an alarm from
    `many` on. `left_out`: number of evaluations that `thinned` has left out, by their questions.
    """

    steps: Steps
    series: Mapping[str, Numbers]
    evaluations: Sequence[EvaluationLine] = ()
    bound: float | None = None
    disk: Disk | None = None
    last_step: int | None = None
    mismatch: float = 0.1
    undecided_reason: str = ""
    filtered: tuple[int, str] = (0, "")
    many: float = math.inf
    left_out: Mapping[Questions, int] = field(default_factory=dict)

    @property
    def in_force(self) -> float | None:
        """Staleness bound of the newest step that recorded one, else that of the recipe (`bound`, None: no bound)."""
        values = self.series.get("max_staleness", np.empty(0))
        known = values[np.isfinite(values)]
        return float(known[-1]) if len(known) else self.bound

    def thinned(self) -> Evidence:
        """Return the evidence with fewer than 6,500 rows, however long the run is, and only the series that alarms
        read. Of evaluations of the same questions there are no more than rows.

        The first 256 and at least the newest 2,048 steps stay. Of those between, blocks of 2, 4, 8, … steps become one
        row each: its first step, with the first measurement of each series in the block, and the greatest of a busy
        share: a role is idle in a block if it is in all of its steps. Of evaluations the best of the block stays.
        Evidence that was thinned earlier, with the steps that followed, is thinned to the same rows as that of all
        steps.
        """
        begin, newest = (int(self.steps[0]), int(self.steps[-1])) if len(self.steps) else (0, 0)
        blocks = (newest - begin) // RECENT - 1  # of `RECENT` steps: what becomes a row once stays one with more
        if blocks < 2:
            return self
        keys, _ = _blocks(self.steps - begin, blocks)
        begins = np.diff(keys, prepend=keys[0] - 1) != 0
        rows, series = np.cumsum(begins) - 1, dict[str, Numbers]()
        for name in filter(is_read, self.series):
            values = self.series[name]
            if name.startswith("busy."):  # NaN, as which a role counts as busy, is greater than any number
                series[name] = np.maximum.reduceat(values, np.flatnonzero(begins))
                continue
            known = np.flatnonzero(np.isfinite(values))[::-1]  # so the first of a row is written last
            series[name] = np.full(int(rows[-1]) + 1, np.nan)
            series[name][rows[known]] = values[known]
        evaluations = _best_of_blocks(self.evaluations, begin, blocks)
        left_out = Counter(self.left_out) + Counter(map(_questions, self.evaluations))
        left_out.subtract(map(_questions, evaluations))
        return dataclasses.replace(
            self, steps=self.steps[begins], series=series, evaluations=evaluations, left_out=left_out
        )

    @classmethod
    def of(cls, steps: Sequence[StepMetrics]) -> Evidence:
        """Make evidence from the step lines of ``metrics.jsonl``: `steps`, `series` and `undecided_reason`. The other
        fields have their defaults."""
        series: dict[str, Numbers] = {}
        for place, step in enumerate(steps):
            for name, value in numbers_of(step):
                series.setdefault(name, np.full(len(steps), np.nan))[place] = value
        reasons = [step.undecided_reason for step in steps if step.undecided_reason]
        numbers = np.array([step.step for step in steps], np.int64)
        return cls(numbers, series, undecided_reason=reasons[-1] if reasons else "")


class _Kept(LinesRead, frozen=True, array_like=True):
    steps: bytes
    series: dict[str, bytes]
    evaluations: tuple[EvaluationLine, ...]
    left_out: tuple[tuple[Questions, int], ...]
    undecided_reason: str
    form: int = 1  # another one for other rows


def keep(path: Path, lines: LineFollower[MetricsLine], found: Evidence) -> None:
    """Write thinned evidence to the file `path`, for `kept`. `lines`: as they are when it was made. If that fails,
    there is no such file."""
    series = {name: values.tobytes() for name, values in found.series.items()}
    left_out = tuple(found.left_out.items())
    rest = (found.steps.tobytes(), series, tuple(found.evaluations), left_out, found.undecided_reason)
    part = path.with_name(f".{path.name}.part")
    try:
        part.write_bytes(msgspec.msgpack.encode(_Kept.of(lines, *rest)))
        part.replace(path)
    except OSError:
        for one in (part, path):
            with suppress(OSError):
                one.unlink(missing_ok=True)


def kept(path: Path, lines: LineFollower[MetricsLine], version: float) -> Evidence | None:
    """Read evidence that `keep` has written, and set `lines` behind the lines that it stands for. None if there is
    none, it cannot be read, or is of later steps than `version`."""
    try:
        with open(open_plain(path, links=True), "rb") as file:
            found = msgspec.msgpack.decode(file.read(_LARGEST), type=_Kept)
        steps = np.frombuffer(found.steps, np.int64)
        series = {name: np.frombuffer(values, np.float64) for name, values in found.series.items()}
    except (OSError, StoreError, ValueError):  # no such file, or one that a power loss has torn
        return None
    if any(len(one) != len(steps) for one in series.values()):
        return None
    if found.form != 1 or not len(steps) or steps[-1] > version:
        return None
    found.restore(lines)
    known = Evidence(steps, series, found.evaluations, undecided_reason=found.undecided_reason)
    return dataclasses.replace(known, left_out=Counter(dict(found.left_out)))


def _blocks(places: Steps, blocks: int) -> tuple[Steps, Flags]:
    """Return the number of the row of each of these steps, counted from the first of the evidence, and whether it is of
    a block of several steps. `blocks`: number of the oldest `RECENT` steps that may be thinned, in these."""
    size = 1 << (blocks - 1).bit_length()
    between = (places >= _FIRST) & (places < blocks * RECENT)
    return np.where(between, np.maximum(places // size * size, _FIRST), places), between


def _best_of_blocks(evaluations: Sequence[EvaluationLine], begin: int, blocks: int) -> Sequence[EvaluationLine]:
    """Return the evaluations, in their order, of each block only the best of the same questions (the first of several).
    `begin`: first step of the evidence; `blocks`: as for `_blocks`."""
    steps = np.array([line.step for line in evaluations], np.int64)
    keys, between = _blocks(steps - begin, blocks)
    best = dict[tuple[object, ...], int]()
    for place, line in enumerate(evaluations):
        row = (int(keys[place]), *_questions(line)) if between[place] else (place,)
        if line.accuracy > evaluations[best.setdefault(row, place)].accuracy:
            best[row] = place
    return [evaluations[place] for place in sorted(best.values())]


def _questions(line: EvaluationLine) -> Questions:
    return line.prompts, line.samples, line.asked


_VERDICTS = ("reward", "accuracy", "undecided")
_WHOLE = (*_VERDICTS, "length_mean", "truncated", "staleness_mean", "rl_seconds", "max_staleness")
_OF_TRAINER = ("entropy", "behavior_logprob_error", "grad_norm", "bad_steps", "kl_behavior", "kl_reference")
#: Series that an alarm reads, beside those of `busy`, `memory` and `canary`.
READ = frozenset({*_WHOLE, *(f"trainer.{name}" for name in _OF_TRAINER)})


def is_read(name: str) -> bool:
    """Whether an alarm reads the series of this name."""
    return name in READ or name.startswith(("busy.", "memory.", "canary."))


class _Names(dict[str, str]):
    """Series of the measurements of a kind ("trainer") by their names; "": no alarm reads it."""

    def __init__(self, kind: str) -> None:
        self._kind = kind

    def __missing__(self, name: str) -> str:
        series = f"{self._kind}.{name}"
        self[name] = series if is_read(series) else ""
        return self[name]


_KINDS = {kind: _Names(kind) for kind in ("trainer", "busy", "memory", "canary")}
_whole_of = attrgetter(*_WHOLE)


def numbers_of(step: StepMetrics) -> Iterator[tuple[str, float]]:
    """Yield series name and value of the measurements of a step that alarms read; missing ones are left out."""
    for name, value in zip(_WHOLE, _whole_of(step), strict=True):
        if value is not None:
            yield name, value
    for kind, names in _KINDS.items():
        for name, value in getattr(step, kind).items():
            if value is not None and (series := names[name]):
                yield series, value
