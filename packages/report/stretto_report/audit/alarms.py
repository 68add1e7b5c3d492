"""Alarms of a run: problems that raise no error. Each alarm is a generator function that reads `Evidence` and yields
`Alarm` records, none if all is well.

An alarm describes the present: it is no longer yielded once its cause has passed. Most alarms compare means over
windows of `WINDOW` (10) steps, so that a single odd step does not matter. An alarm whose measurements are missing does
not fire; `AlarmReport` lists it as not measured.
"""

from __future__ import annotations

import dataclasses
import json
import math
import sqlite3
import tomllib
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from stretto.core.canary import AGREEING, agreeing, coarser, routes
from stretto.core.errors import StoreError, several
from stretto.core.records import Record
from stretto.store.ledger.schema import once_at_rest, reading
from stretto.store.run_folder import RunFolder
from stretto.store.series.lines import LineFollower
from stretto.store.series.metrics import METRICS, EvaluationLine, MetricsLine, StepMetrics
from stretto_report.audit.evidence import (
    KEPT,
    RECENT,
    WINDOW,
    Alarm,
    Disk,
    Evidence,
    apart,
    disk_of,
    keep,
    kept,
    measured,
    newest_mean,
    numbers_of,
)
from stretto_report.audit.symptoms import (
    accuracy_falling,
    bad_steps,
    canary_drifting,
    dead_gradient,
    exploding_gradient,
    memory_growing,
    mismatch,
    policy_apart,
    reward_without_accuracy,
)

_IDLE_SECONDS = 10.0
_ROOM = 1 << 30  # bytes that a disk needs at least
_LARGEST = 1 << 63  # a number that no column can hold
_CUT_OFF = 0.5  # of the completions
_UNDECIDED = 0.25  # of the completions
_WAITING = 0.5  # share of the time that a trainer works at most, if it waits for completions
_FEWEST = 8  # undecided completions of an evaluation; fewer may be chance
_SILENT_BATCHES, _SILENT_GROUPS = 4, 32  # filtered without one that is kept
_READ = 4  # completions that are read, of each that an alarm needs
#: The newest completions whose group is decided, the newest first.
_DECIDED = """
    SELECT group_key, state, reason FROM trajectories WHERE state IN ('trained', 'buffered', 'filtered')
    ORDER BY key DESC LIMIT ?
"""


def entropy_collapse(found: Evidence) -> Iterator[Alarm]:
    """Yield an alarm if the mean entropy of the newest ten measured steps is below a fifth of that of the first ten:
    the policy samples nearly the same completion for any seed."""
    name = "trainer.entropy"
    if (ill := apart(found.steps, found.series.get(name), lambda mean, begin: mean < 0.2 * begin)) is not None:
        message = f"the entropy fell from {ill.was:.3g} to {ill.now:.3g} nats"
        yield Alarm("entropy_collapse", "entropy collapse", ill.first, message, f"series:{name}")


def length_explosion(found: Evidence) -> Iterator[Alarm]:
    """Yield an alarm if the completions of the newest ten measured steps are on average more than three times as long
    as those of the first ten."""
    name = "length_mean"
    if (ill := apart(found.steps, found.series.get(name), lambda mean, begin: mean > 3 * begin)) is not None:
        message = f"completions grew from {ill.was:.0f} to {ill.now:.0f} tokens"
        yield Alarm("length_explosion", "length explosion", ill.first, message, f"series:{name}")


def completions_cut_off(found: Evidence) -> Iterator[Alarm]:
    """Yield an alarm if at least half of the completions in the newest ten measured steps end at the token limit,
    unless at least half are right. (Then the limit may be intended.) If training has not measured this in ten steps,
    the newest held-out evaluation decides, but not one before the first step."""
    name, title = "truncated", "completions cut off"
    right = found.series.get("accuracy")
    ill = apart(found.steps, found.series.get(name), lambda mean, begin: mean >= _CUT_OFF, 1)
    if ill is not None and (right is None or not measured(right) or newest_mean(right) < 0.5):
        message = f"{ill.now:.0%} of the completions end at their limit of tokens"
        yield Alarm(name, title, ill.first, message, "recipe:sampling.max_tokens")
    elif ill is None and not measured(found.series.get(name)) and found.evaluations:
        last = found.evaluations[-1]
        share = last.truncated / max(last.samples, last.prompts, 1)
        if last.step > 0 and share >= _CUT_OFF and last.accuracy < 0.5:
            message = f"{share:.0%} of the held-out completions end at their limit of tokens"
            yield Alarm(name, title, last.step, message, "recipe:sampling.max_tokens")


def completions_undecided(found: Evidence) -> Iterator[Alarm]:
    """Yield an alarm if at least a quarter of the completions in the newest ten measured steps have no verdict: they
    are not trained on, and prompts that the reward cannot judge are missing from training. If training has not measured
    this in ten steps, the newest held-out evaluation decides, if it has at least eight such completions. The message
    names the most frequent reason."""
    name, title, look = "undecided", "completions undecided", "recipe:rewards.function"
    why = f", most often: {found.undecided_reason}" if found.undecided_reason else ""
    ill = apart(found.steps, found.series.get(name), lambda mean, begin: mean >= _UNDECIDED, 1)
    if ill is not None:
        message = f"{ill.now:.0%} of the completions have no verdict and are not trained on{why}"
        yield Alarm(name, title, ill.first, message, look)
    elif not measured(found.series.get(name)) and found.evaluations:
        last = found.evaluations[-1]
        share = last.undecided / max(last.samples, last.prompts, 1)
        if share >= _UNDECIDED and last.undecided >= _FEWEST:
            message = f"{share:.0%} of the held-out completions have no verdict (see held_out.jsonl){why}"
            yield Alarm(name, title, last.step, message, look)


def completions_lost(found: Evidence) -> Iterator[Alarm]:
    """Yield the alarms of `completions_cut_off`, `completions_undecided` and `all_filtered`."""
    yield from completions_cut_off(found)
    yield from completions_undecided(found)
    yield from all_filtered(found)


def all_filtered(found: Evidence) -> Iterator[Alarm]:
    """Yield an alarm if the filters have refused all of the newest groups: four batches, and 32 groups at least. The
    message names the filter that refused the most."""
    count, why = found.filtered
    if count >= found.many:
        message = f"all of the last {several(count, 'completion')} were filtered, most often by {why}"
        since = int(found.steps[-1]) if len(found.steps) else 0
        yield Alarm("all_filtered", "every group is filtered", since, message, "recipe:rollout.filter")


def idle_role(found: Evidence) -> Iterator[Alarm]:
    """Yield an alarm for each role that has been idle for at least the newest ten steps and ten seconds. A step without
    a measurement counts as busy. Reward workers are exempt, because agents and workflows may compute rewards
    themselves."""
    clock = found.series.get("rl_seconds")
    if clock is None or len(clock) < WINDOW:
        return
    for name in sorted(series for series in found.series if series.startswith("busy.") and series != "busy.rewards"):
        working = np.flatnonzero(np.nan_to_num(found.series[name], nan=1.0) > 0)
        first = int(working[-1]) + 1 if len(working) else 0
        seconds = float(clock[-1] - clock[min(first, len(clock) - 1)])
        if len(clock) - first >= WINDOW and seconds >= _IDLE_SECONDS:
            role, since, newest = name.removeprefix("busy."), int(found.steps[first]), int(found.steps[-1])
            message = f"{role} has done nothing for {seconds:.0f} s, {several(newest - since + 1, 'step')}"
            yield Alarm("idle_role", f"{role} does nothing", since, message, "timeline")


def staleness_at_bound(found: Evidence) -> Iterator[Alarm]:
    """Yield an alarm if the mean staleness of the newest ten measured steps is at least nine tenths of the bound in
    force, so that generation waits for the bound, while the trainer works half of the time at most: neither may do
    more. None in a run without a bound or with the bound 0. A busy trainer loses nothing by the bound."""
    bound, busy = found.in_force, found.series.get("busy.trainer")
    if not bound or not np.isfinite(bound) or busy is None or not measured(busy) or newest_mean(busy) > _WAITING:
        return
    ill = apart(found.steps, found.series.get("staleness_mean"), lambda mean, begin: mean >= 0.9 * bound, 1)
    if ill is not None:
        message = (
            f"tokens are {ill.now:.2f} versions old on average, the bound is {bound:g}, and the trainer works "
            f"{newest_mean(busy):.0%} of the time: both wait, and a larger bound lets generation go on"
        )
        yield Alarm("staleness_at_bound", "staleness at its bound", ill.first, message, "recipe:rollout.max_staleness")


def disk_filling(found: Evidence) -> Iterator[Alarm]:
    """Yield an alarm if free disk space is less than the remaining steps will write at the rate so far, or less than 1
    GiB. No alarm if the run is not running or has no step."""
    if found.disk is None or not len(found.steps):
        return
    done = int(found.steps[-1])
    left = max((found.last_step or done) - done, 0)
    need = found.disk.written / max(done, 1) * left
    if found.disk.free < max(need, _ROOM):
        message = f"{found.disk.free / 2**30:.2f} GiB are free"
        if left:
            message += (
                f"; the {several(left, 'step that is', 'steps that are')} left will write about {need / 2**30:.2f} GiB"
            )
        yield Alarm("disk_filling", "disk filling", done, message, "recipe:store.keep_payloads")


@dataclass(frozen=True)
class _Check:
    """One alarm function (`alarms`) with its title and the measurements that it needs.

    `is_measured`: at least one series of `needs` has measurements for `windows` windows of ten steps; always if `needs`
    is empty. A name that ends with "." is a prefix of series names; ``evaluation`` means at least two evaluations.
    """

    title: str
    alarms: Callable[[Evidence], Iterator[Alarm]]
    needs: tuple[str, ...] = ()
    windows: int = 1

    def is_measured(self, found: Evidence) -> bool:
        return not self.needs or any(self._has(found, name) for name in self.needs)

    def _has(self, found: Evidence, need: str) -> bool:
        if need == "evaluation":
            return len(found.evaluations) >= 2
        names = [name for name in found.series if name.startswith(need)] if need.endswith(".") else [need]
        return any(measured(found.series.get(name), self.windows) for name in names)


CHECKS: tuple[_Check, ...] = (
    _Check("accuracy falling", accuracy_falling, ("evaluation", "accuracy"), 2),
    _Check("reward without accuracy", reward_without_accuracy, ("evaluation",)),
    _Check("dead gradient", dead_gradient, ("trainer.grad_norm",)),
    _Check("exploding gradient", exploding_gradient, ("trainer.grad_norm",)),
    _Check("gradients not finite", bad_steps, ("trainer.bad_steps",)),
    _Check("policy far away", policy_apart, ("trainer.kl_behavior", "trainer.kl_reference")),
    _Check("entropy collapse", entropy_collapse, ("trainer.entropy",), 2),
    _Check("completions cut off or undecided", completions_lost, ("truncated", "undecided", "evaluation")),
    _Check("length explosion", length_explosion, ("length_mean",), 2),
    _Check("a role does nothing", idle_role, ("busy.",)),
    _Check("staleness at its bound", staleness_at_bound, ("busy.trainer",)),
    _Check("mismatch of engine and trainer", mismatch, ("trainer.behavior_logprob_error",)),
    _Check("an engine drifts from the trainer", canary_drifting, ("canary.",)),
    _Check("memory of a role growing", memory_growing, ("memory.",)),
    _Check("disk filling", disk_filling),
)


class AlarmReport(Record, frozen=True):
    """Result of a check of all alarms. `alarms`: those that fire, ordered by first step. `checks`: number of alarm
    functions, including those in `not_measured`. `not_measured`: titles of those that lack measurements."""

    alarms: list[Alarm]
    checks: int
    not_measured: tuple[str, ...]

    def with_death(self, reason: str, step: int) -> AlarmReport:
        """Return a copy with one more check, whether the run is dead. `reason`: why it is dead, which puts the alarm
        ``dead_run`` since `step` in front of the others; "": it is not dead."""
        dead = [Alarm("dead_run", "the run is dead", step, reason, "logs")] if reason else []
        return AlarmReport([*dead, *self.alarms], self.checks + 1, self.not_measured)

    def told(self) -> dict[str, object]:
        """Return the fields of the report for the JSON of `stretto inspect --json`."""
        return {"alarms": self.alarms, "alarms_checked": self.checks, "alarms_not_measured": self.not_measured}

    def lines(self) -> list[str]:
        """Return lines for a terminal: one for each alarm, then one that counts the alarms that fire and names those
        not measured."""
        return [*map(str, self.alarms), f"alarms  {self}"]

    def __str__(self) -> str:
        fired = (
            f"{len(self.alarms)} of {several(self.checks, 'alarm')} fired"
            if self.alarms
            else f"none of {several(self.checks, 'alarm')} fired"
        )
        if not self.not_measured:
            return f"{fired}, all were measured"
        return f"{fired}, {len(self.not_measured)} not measured: {', '.join(self.not_measured)}"


def findings_of(found: Evidence) -> AlarmReport:
    """Run all alarms on the evidence (`Evidence.thinned`), and report those that fire and those that lack
    measurements."""
    found = found.thinned()
    alarms = sorted((alarm for check in CHECKS for alarm in check.alarms(found)), key=lambda alarm: alarm.first_step)
    missing = tuple(check.title for check in CHECKS if not check.is_measured(found))
    return AlarmReport(alarms, len(CHECKS), missing)


class AlarmWatch:
    """Alarms of a run that is observed step by step. `step` and `evaluated` only append measurements in memory, which
    thins them (`Evidence.thinned`), so that a long run needs no more of it; the other methods compute the alarms."""

    def __init__(self, folder: Path, recipe: Mapping[str, Any] | None = None) -> None:
        """Begin without measurements. `folder`: the run folder, whose disk is checked. `recipe`: the parsed tables of
        the run's recipe, for its staleness bound, last step and dtypes; None: ``recipe.toml`` of the folder is read
        (one that cannot be read counts as empty)."""
        recipe = _tables(RunFolder(folder).recipe) if recipe is None else recipe
        self._folder, self._known = folder, evidence_of(Evidence.of(()), (), recipe, None)
        self._steps, self._series = array("q"), dict[str, "array[float]"]()
        self._evaluations, self._left_out = list[EvaluationLine](), self._known.left_out
        self._undecided_reason = ""
        self._keeps = False  # whether what is thinned is kept in a file

    def step(self, metrics: StepMetrics) -> None:
        """Append the measurements of the next step (only those that alarms read)."""
        series, rows = self._series, len(self._steps)
        for name, value in numbers_of(metrics):
            column = series[name] if name in series else series.setdefault(name, array("d"))
            if len(column) < rows:
                column.extend([math.nan] * (rows - len(column)))
            column.append(value)
        self._steps.append(metrics.step)
        self._undecided_reason = metrics.undecided_reason or self._undecided_reason
        if (metrics.step - self._steps[0]) % RECENT == 0:
            self._thin()

    def evaluated(self, evaluation: EvaluationLine) -> None:
        """Append the next evaluation of the held-out questions."""
        self._evaluations.append(evaluation)
        if len(self._evaluations) % RECENT == 0:
            self._thin()

    def recall(self, version: int) -> None:
        """Read the steps up to `version` of a run that is resumed, and its evaluations (`read`); from now on, while the
        run writes, keep what was thinned in ``alarms.bin`` of its folder. The next resume reads only later lines."""
        lines = LineFollower(RunFolder(self._folder).metrics, METRICS, links=True)
        with suppress(OSError, StoreError):  # no file that can be read
            if self.read(lines, version) <= version and len(self._steps) > RECENT:
                keep(self._folder / KEPT, lines, self._evidence().thinned())
        self._keeps = True

    def read(self, lines: LineFollower[MetricsLine], version: float = math.inf) -> int:
        """Append the steps and evaluations that follow in `lines`, up to the step `version`; return the last step of
        any, -1 if none follows. Unreadable ones are skipped. Before the first line, take what ``alarms.bin`` has. If
        the file was rewritten, begin anew. Raises OSError or StoreError as `LineFollower.read_on`."""
        if not lines.offset and (known := kept(self._folder / KEPT, lines, version)) is not None:
            self._set(known)
        newest, lines.more = -1, True
        while lines.more:
            found, again = lines.read_on()
            if again:
                self._set(self._known)
            for line in found:
                newest = max(newest, line.step)
                if line.step > version:
                    continue
                if isinstance(line, StepMetrics):
                    self.step(line)
                elif type(line) is EvaluationLine:  # evaluations of further sets raise no alarms
                    self.evaluated(line)
        return newest

    def _thin(self) -> None:
        self._set(found := self._evidence().thinned())
        if self._keeps:
            lines = LineFollower(RunFolder(self._folder).metrics, METRICS, links=True)
            with suppress(OSError, StoreError):
                lines.skip()  # the run has written the line of this step, or of this evaluation, just now
                keep(self._folder / KEPT, lines, found)

    def _set(self, found: Evidence) -> None:
        self._steps, self._evaluations = array("q", found.steps.tobytes()), list(found.evaluations)
        self._left_out, self._undecided_reason = found.left_out, found.undecided_reason
        self._series = {name: array("d", values.tobytes()) for name, values in found.series.items()}

    def sentences(self) -> dict[str, str]:
        """Return the alarms that fire now: the line to print, by the title of the alarm."""
        return {alarm.title: str(alarm) for alarm in self.alarms()}

    def alarms(self) -> list[Alarm]:
        """Return the alarms that fire now, ordered by first step."""
        return self.findings().alarms

    def findings(self) -> AlarmReport:
        """Run all alarms on the measurements so far, and on the disk and the ledger's filtered groups as they are
        now."""
        found = self._evidence()
        disk, filtered = disk_of(self._folder), filtered_of(self._folder, found.many)
        return findings_of(dataclasses.replace(found, disk=disk, filtered=filtered))

    def _evidence(self) -> Evidence:
        steps = np.array(self._steps, np.int64)
        series = {name: np.full(len(steps), np.nan) for name in self._series}
        for name, column in self._series.items():
            series[name][: len(column)] = column
        found = dataclasses.replace(self._known, steps=steps, series=series, undecided_reason=self._undecided_reason)
        return dataclasses.replace(found, evaluations=self._evaluations, left_out=self._left_out)


def findings_of_run(path: Path) -> AlarmReport:
    """Check the alarms of a running, finished or dead run from its recipe and ``metrics.jsonl``, whose unreadable lines
    are skipped. Raises RunFolderError if there is no run."""
    lines, watch = LineFollower(RunFolder.open(path).metrics, METRICS, links=True), AlarmWatch(path)
    with suppress(OSError, StoreError):  # no file that can be read
        watch.read(lines)
    return watch.findings()


def evidence_of(
    steps: Evidence, evaluations: Iterable[object], recipe: Mapping[str, Any], disk: Disk | None
) -> Evidence:
    """Return the evidence of a run: the measurements of its `steps` (`Evidence.of`), completed with those of
    `evaluations` (lines of ``metrics.jsonl``) that are an `EvaluationLine`, of the held-out questions, with what its
    `recipe` says, which may be incomplete, and with `disk`, None for a run that is not running."""
    groups, each = (number_of(recipe, "rollout", key) or math.inf for key in ("batch_size", "group_size"))
    return dataclasses.replace(
        steps,
        many=max(_SILENT_BATCHES * groups, _SILENT_GROUPS) * each,
        evaluations=[line for line in evaluations if type(line) is EvaluationLine],
        bound=number_of(recipe, "rollout", "max_staleness"),
        disk=disk,
        last_step=last_step_of(recipe),
        mismatch=mismatch_of(recipe),
    )


def last_step_of(recipe: Mapping[str, Any]) -> int | None:
    """Return `trainer.steps` of a recipe; None if it is missing, no number or has more than 64 bits."""
    steps = number_of(recipe, "trainer", "steps")
    return int(steps) if steps is not None and abs(steps) < _LARGEST else None


def mismatch_of(recipe: Mapping[str, Any]) -> float:
    """Return the tolerance, in nats a token, for the difference of log-probabilities between engine and trainer: what
    rounding explains for the coarser of their dtypes in the recipe. It is larger for a model with experts."""
    sections = (recipe.get(name) for name in ("engine", "trainer"))
    types = [section.get("dtype") for section in sections if isinstance(section, dict)]
    dtype = coarser("float32", *(dtype for dtype in types if dtype in AGREEING))
    return agreeing(dtype, routed=dtype != "float32" and routes(_config_of(recipe)))


def _config_of(recipe: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the config.json of the model folder that the recipe names; empty if it names none or the file cannot be
    read."""
    section = recipe.get("model")
    path = section.get("path") if isinstance(section, dict) else None
    try:
        found = json.loads((Path(path) / "config.json").read_bytes()) if isinstance(path, str) else {}
    except (OSError, ValueError, RecursionError):
        found = {}
    return found if isinstance(found, dict) else {}


def _tables(recipe: Path) -> Mapping[str, Any]:
    try:
        return tomllib.loads(recipe.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}


def number_of(recipe: Mapping[str, Any], section: str, key: str) -> float | None:
    """Return the number at the key `section.key` of a recipe; None if it is missing, not a number, or an integer of
    more than 64 bits."""
    found = recipe.get(section)
    value = found.get(key) if isinstance(found, dict) else None
    return value if type(value) is float or (type(value) is int and abs(value) < _LARGEST) else None


def filtered_of(folder: Path, many: float) -> tuple[int, str]:
    """Return `Evidence.filtered` of the run in `folder`; (0, "") if its ledger cannot be read."""
    ledger = RunFolder(folder).ledger

    def read() -> tuple[int, str]:
        with reading(ledger) as connection:
            return filtered_in(connection, many)

    with suppress(OSError, StoreError):
        return once_at_rest(ledger, read)
    return 0, ""


def filtered_in(connection: sqlite3.Connection, many: float) -> tuple[int, str]:
    """Return `Evidence.filtered` from an open ledger; (0, "") if no ledger has as `many` completions. Only the newest
    are read, so that the time does not grow with the run."""
    if not many < _LARGEST / _READ:  # NaN too
        return 0, ""
    refused, kept = list[tuple[int, str]](), -1
    for group, state, reason in connection.execute(_DECIDED, (int(_READ * many),)):
        if state != "filtered":  # in a run that is well one of the first
            kept = group
            break
        refused.append((group, reason))
    reasons = [reason for group, reason in refused if group != kept]
    named = Counter(reason.partition(": ")[0] for reason in reasons).most_common(1)
    return len(reasons), next((one for one in reasons if one.partition(": ")[0] == named[0][0]), "")
