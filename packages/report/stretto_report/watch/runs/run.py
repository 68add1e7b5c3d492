"""One run in the browser: its summary, and tables that are read when one of its pages is opened."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from stretto.core.errors import UNREADABLE, StoreError
from stretto.core.records import Record, State
from stretto.store.ending import ENDING, Condition, Ending, branch_of
from stretto.store.inspection import Inspection
from stretto.store.ledger.reading import fact
from stretto.store.ledger.schema import needs_copy, once_at_rest
from stretto.store.run_folder import RunFolder
from stretto.store.series.metrics import EvaluationLine, StepMetrics
from stretto.store.totals import ENGINES, TOTALS, Membership, Totals
from stretto_report.audit.alarms import AlarmReport, evidence_of, filtered_in, findings_of, last_step_of
from stretto_report.audit.evidence import Evidence, disk_of
from stretto_report.reading.inspection import inspection_of, of_branch
from stretto_report.reading.series import flat
from stretto_report.watch.index.columns import Cache
from stretto_report.watch.index.files import (
    LEDGER,
    NewestLines,
    ledger_stamp,
    read_ledger,
    refuse_strange_files,
    stamp_of,
)
from stretto_report.watch.index.steps import Steps
from stretto_report.watch.index.timeline import Spans
from stretto_report.watch.index.trajectories import Trajectories, count_states
from stretto_report.watch.runs.folder import condition, recipe_of, recipe_stamp, recipe_text
from stretto_report.watch.runs.pieces import Pieces
from stretto_report.watch.runs.questions import PromptTexts
from stretto_report.watch.runs.trajectory import Reader

_RATE_STEPS = 50
_PAUSE_SECONDS = 2.0  # pause before a ledger that could not be read is tried again
_COUNT_SHARE = 50  # pause between two counts in a ledger, or of alarms, as a multiple of a count's time
_LARGEST_READ = 4 << 20  # bytes of metrics whose alarms are counted without opening the run
_NEWEST = "SELECT step, published_version FROM steps WHERE published_version IS NOT NULL ORDER BY step DESC LIMIT 1"

Fact = TypeVar("Fact")


class RunSummary(Record, frozen=True):
    """Row of a run in the list of runs. `state`: as `stretto inspect` says it, or "unreadable", and the `reason`.
    `fault`: what cannot be read; None: nothing. `started`: Unix seconds. `step`: newest step, of `steps` in all.
    `accuracy`: of the newest evaluation. `reward`: of the newest step. `trajectories`: numbers by state. `engines`:
    number of engines in the run now. `alarms`: their number; None: not counted yet, or of a run with large metrics that
    is not open. `trained_tokens`: of an open run only. In other fields, None means unknown."""

    id: str
    name: str
    path: str
    state: str
    reason: str
    fault: str | None = None
    started: float | None = None
    step: int = 0
    steps: int | None = None
    version: int = 0
    accuracy: float | None = None
    reward: float | None = None
    rl_seconds: float | None = None
    wall_seconds: float | None = None
    steps_per_second: float | None = None
    trained_tokens: int | None = None
    generated_tokens: int | None = None
    trajectories: dict[str, int] | None = None
    task: str | None = None
    engines: int = 0
    alarms: int | None = None


class _Recorded(Record, frozen=True):
    """Facts of the ledger about the whole run; None: not on record. `newest`: newest published step and its version."""

    totals: Totals | None = None
    engines: tuple[Membership, ...] = ()
    newest: tuple[int, int] = (0, 0)
    ending: Ending | None = None


@dataclass
class _Tables:
    """Tables of an open run: what was read of its files so far."""

    steps: Steps
    trajectories: Trajectories
    spans: Spans
    questions: PromptTexts
    reader: Reader

    @property
    def held(self) -> int:
        """Approximate memory in bytes."""
        tables = (self.steps.table, self.trajectories, self.spans.table, self.questions, self.reader.table)
        return sum(table.held for table in tables)


class WatchedRun:
    """Read-only view of the run in `folder`, whatever its condition. `id` stands in web addresses, `name` is shown.
    `cache` keeps what was read, for the next process. A run is open while it has `tables`.

    `faults`: by file name, a sentence for each file that cannot be read; everything else is shown.
    """

    def __init__(self, id: str, folder: Path, name: str, cache: Cache) -> None:
        self.id, self.folder, self.name = id, folder, name
        self._cache, self.pieces = cache, Pieces(folder)
        self._newest = NewestLines(RunFolder(folder).metrics)
        self._tables: _Tables | None = None
        self.faults: dict[str, str] = {}
        self._found: tuple[object, AlarmReport] = (None, AlarmReport([], 0, ()))
        self._recipe: tuple[object, dict[str, Any]] = (None, {})
        self._again = float("-inf")  # time at which a ledger that could not be read is tried again
        self._inspected: tuple[float, Inspection | None] = (float("-inf"), None)
        self._ending: tuple[object, Ending | None] = (None, None)
        self._copied: tuple[object, _Recorded] = (None, _Recorded())  # of a ledger that must be copied to be read
        self._counted: tuple[float, dict[str, int] | None] = (float("-inf"), None)
        self._alarms: tuple[float, object, int | None] = (float("-inf"), None, None)  # when due, of what, their number

    @property
    def started(self) -> float | None:
        """Unix time at which the recipe (or else the ledger) was written; None if the run has neither."""
        for name in ("recipe.toml", LEDGER):
            try:
                return (self.folder / name).lstat().st_mtime
            except OSError:
                continue
        return None

    # The tables.

    @property
    def tables(self) -> _Tables:
        """Tables of the run as far as they were read. The first access opens the run, with what its cache has;
        `advance` reads more."""
        if self._tables is None:
            run = RunFolder(self.folder)
            trajectories, questions = Trajectories(self.folder, self._cache), PromptTexts(run.questions)
            self._tables = _Tables(
                steps=Steps(run.metrics, self._cache),
                trajectories=trajectories,
                spans=Spans(run.spans, self._cache),
                questions=questions,
                reader=Reader(self.folder, trajectories, questions, self.pieces),
            )
        return self._tables

    @property
    def is_open(self) -> bool:
        return self._tables is not None

    @property
    def held(self) -> int:
        """Approximate memory of the tables in bytes; 0 if the run is not open."""
        return 0 if self._tables is None else self._tables.held

    def close(self) -> None:
        """Release the tables; the next access to `tables` reads them again."""
        self._tables = None

    def advance(self, seconds: float) -> bool:
        """Read more of the tables for about `seconds`; return whether there may be more. Faults are kept in `faults`,
        not raised."""
        until, tables = time.monotonic() + seconds, self.tables
        parts: dict[str, Steps | Trajectories | PromptTexts | Spans] = {
            "metrics.jsonl": tables.steps,
            LEDGER: tables.trajectories,
            "questions.jsonl": tables.questions,
            "spans.jsonl": tables.spans,
        }
        while parts:
            for place, part in [*parts.items()]:
                if not self._attempt(place, part):
                    del parts[place]
                if time.monotonic() > until:
                    return bool(parts)
        return False

    def _attempt(self, place: str, part: Steps | Trajectories | PromptTexts | Spans) -> bool:
        """Read more of one part; return whether there may be more, False after an error. A fault is kept in `faults`
        under the file name `place`, and removed when it has passed."""
        try:
            refuse_strange_files(self.folder)
            more, fault = part.advance(), part.fault
        except (StoreError, OverflowError) as error:  # or a number in the ledger is too large for its column
            more, fault = False, self.told(error)
        self.faults.pop(place, None)
        if fault is not None:
            self.faults[place] = fault if place in fault else f"{place}: {fault}"
        return more

    def told(self, error: Exception) -> str:
        """Return the message of an error, with paths relative to the run folder."""
        return str(error).replace(f"{self.folder}/", "")

    # The summary.

    def facts(self) -> tuple[Totals | None, tuple[Membership, ...]]:
        """Read totals and engines from the ledger; (None, ()) if it cannot be read, with the fault in `faults`. Totals
        are None if none are on record. A run that `stretto replay` made has no engines."""
        recorded = self._recorded()
        return recorded.totals, recorded.engines

    def _recorded(self) -> _Recorded:
        stamp = ledger_stamp(self.folder)
        if stamp == self._copied[0] and needs_copy(self.folder / LEDGER):
            return self._copied[1]
        if (found := self._of_ledger(self._read_ledger)) is not None:
            self._ending, self._copied = (stamp, found.ending), (stamp, found)
            return found
        self._counted = (float("-inf"), None)
        return _Recorded()

    def _read_ledger(self) -> _Recorded:
        """Read all facts with one connection, because opening a ledger takes longer than the queries. If not all
        trajectories are in the table, they are counted too, and the counts kept; less often if that is slow."""
        with read_ledger(self.folder) as connection:
            totals, ending = fact(connection, TOTALS, Totals), fact(connection, ENDING, Ending)
            engines = fact(connection, ENGINES, tuple[Membership, ...]) or ()
            newest = connection.execute(_NEWEST).fetchone() or (0, 0)
            if not self._is_counted and time.monotonic() >= self._counted[0]:
                since = time.monotonic()
                counts = _balance(count_states(connection, self.folder, self._cache))
                now = time.monotonic()
                self._counted = (now + _COUNT_SHARE * (now - since), counts)
        return _Recorded(totals, () if branch_of(self.folder) else engines, newest, ending)

    def _of_ledger(self, read: Callable[[], Fact]) -> Fact | None:
        if time.monotonic() < self._again:
            return None
        try:
            found = once_at_rest(self.folder / LEDGER, read)
        except (StoreError, *UNREADABLE) as error:
            self.faults[LEDGER] = self.told(error)
            self._again = time.monotonic() + _PAUSE_SECONDS
            return None
        if not self.is_open:
            self.faults.pop(LEDGER, None)
        return found

    def condition(self) -> Condition:
        """Return the state of the run and the reason; ``unreadable`` if its lock, ledger or log is no regular file."""
        try:
            return condition(self.folder, self._ended)
        except StoreError as error:
            return Condition("unreadable", self.told(error))

    def _ended(self) -> Ending | None:
        if self._ending[0] != (stamp := ledger_stamp(self.folder)):
            self._recorded()
        return self._ending[1] if self._ending[0] == stamp else None

    def recipe(self) -> dict[str, Any]:
        """Return the recipe as tables; empty if there is none, or, with a fault in `faults`, if it cannot be read. The
        file is read again when it has changed."""
        stamp = recipe_stamp(self.folder)
        if self._recipe[0] != (stamp,):
            self.faults.pop("recipe.toml", None)
            self._recipe = ((stamp,), {})
            try:
                self._recipe = ((stamp,), recipe_of(self.folder))
            except StoreError as error:
                self.faults["recipe.toml"] = self.told(error)
        return self._recipe[1]

    def inspection(self) -> Inspection | None:
        """Return the summary of the run in numbers; None if the ledger cannot be read. Rows are not checked for damage.
        The summary of a large run may be some seconds old."""
        due, found = self._inspected
        if time.monotonic() >= due:
            since = time.monotonic()
            found = self._of_ledger(self._inspect)
            now = time.monotonic()
            self._inspected = (now + _COUNT_SHARE * (now - since), found)
        return found

    def _inspect(self) -> Inspection:
        with read_ledger(self.folder) as connection:
            return of_branch(inspection_of(connection), branch_of(self.folder))

    def _filtered(self, many: float) -> tuple[int, str]:
        with read_ledger(self.folder) as connection:
            return filtered_in(connection, many)

    def recipe_text(self) -> str:
        """Return the text of the recipe; empty if there is none or it cannot be read."""
        try:
            return recipe_text(self.folder) or ""
        except StoreError:  # noted by `recipe`
            return ""

    def summary(self) -> RunSummary:
        """Return the row of the run for the list of runs, from the ends of its files; for an open run also from its
        tables."""
        recorded = self._recorded()
        how, recipe = self.condition(), self.recipe()
        totals, engines, done = recorded.totals, recorded.engines, recorded.newest
        steps, evaluations = self._newest_lines()
        counts = self._counts()
        last = steps[-1] if steps else None
        known = totals or Totals(max_staleness=None)
        if counts is None and last is None and self.faults and how.state != "running":
            how = Condition("unreadable", next(iter(self.faults.values())))
        return RunSummary(
            id=self.id,
            name=self.name,
            path=self._path,
            state=how.state,
            reason=how.reason,
            fault="; ".join([*self.faults.values(), *filter(None, [self.pieces.fault])]) or None,
            started=self.started,
            step=max(done[0], last.step if last else 0),
            steps=last_step_of(recipe),
            version=done[1],
            accuracy=evaluations[-1].known if evaluations else known.final_accuracy,
            reward=last.reward if last else None,
            rl_seconds=last.rl_seconds if last else known.rl_seconds,
            wall_seconds=max(last.wall_seconds if last else 0.0, known.wall_seconds),
            steps_per_second=_rate(steps[-_RATE_STEPS:]),
            trained_tokens=int(self.tables.steps.table["trained_tokens"].sum()) if self.is_open else None,
            generated_tokens=last.generated_tokens if last else known.generated,
            trajectories=counts,
            task=kind if isinstance(kind := flat(recipe).get("task.kind"), str) else None,
            engines=sum(engine.left_step is None for engine in engines),
            alarms=len(self.findings().alarms) if self.is_open else self._alarms[2],
        )

    def unreadable(self, reason: str) -> RunSummary:
        """Return the row of a run that cannot be summarised for this reason."""
        return RunSummary(self.id, self.name, self._path, "unreadable", reason, fault=reason)

    @property
    def _path(self) -> str:
        return str(self.folder).encode("utf-8", "surrogateescape").decode("utf-8", "replace")

    def findings(self) -> AlarmReport:
        """Run all alarms on the data read so far, which opens the run. A dead run has the alarm ``dead_run`` in front.
        The report is made again when there are new steps, evaluations or trajectories, or the condition of the run
        changes."""
        steps, how = self.tables.steps, self.condition()
        key = (steps.epoch, steps.table.rows, len(steps.evaluations), self.tables.trajectories.changes, how)
        if key != self._found[0]:
            self._found = (key, self._report(steps, how))
        return self._found[1]

    def _report(self, steps: Steps, how: Condition) -> AlarmReport:
        read = Evidence(steps.table["step"], steps.series, undecided_reason=steps.undecided_reason)
        disk = disk_of(self.folder) if how.state == "running" else None
        evidence = evidence_of(read, steps.evaluations, self.recipe(), disk)
        filtered = self._of_ledger(partial(self._filtered, evidence.many)) or (0, "")
        death = how.reason if how.state == "dead" else ""
        newest = int(steps.table["step"][-1]) if steps.table.rows else 0  # lines of earlier ones may be lost
        return findings_of(dataclasses.replace(evidence, filtered=filtered)).with_death(death, newest)

    def count_alarms(self, how: Condition) -> int | None:
        """Return the number of alarms of a run that is not open, and `how` it is. It is counted again if the run has
        changed and the last count is long enough ago; None if its metrics are large or cannot be read."""
        (due, known, found), since = self._alarms, time.monotonic()
        metrics = RunFolder(self.folder).metrics
        stamp = (read := stamp_of(metrics), ledger_stamp(self.folder), how)
        if stamp == known or since < due:
            return found
        found = None
        if sum(size for _, size, _ in read) <= _LARGEST_READ:
            with suppress(StoreError, OverflowError):  # said once the run is opened
                steps = Steps(metrics, self._cache)
                while steps.advance():
                    pass
                found = len(self._report(steps, how).alarms)
        now = time.monotonic()
        self._alarms = (now + _COUNT_SHARE * (now - since), stamp, found)
        return found

    def _newest_lines(self) -> tuple[list[StepMetrics], list[EvaluationLine]]:
        """Return the newest steps and evaluations of the metrics. If the file cannot be read, the error is kept in
        `faults`, and both lists are empty. For an open run, which is polled, only new lines are decoded."""
        try:
            return self._newest.read(keep=self.is_open)
        except StoreError as error:
            self.faults["metrics.jsonl"] = self.told(error)
            return [], []

    def _counts(self) -> dict[str, int] | None:
        """Return the number of trajectories by state and of all, as ``issued``: from the table if it is complete, else
        the last count in the ledger; None if there is none."""
        return _balance(self.tables.trajectories.count("state")) if self._is_counted else self._counted[1]

    @property
    def _is_counted(self) -> bool:
        return self.is_open and self.tables.trajectories.indexed == 1.0

    def trained_by_step(self) -> Any:
        """Return the number of trajectories trained in each step of the metrics, as far as both were read, [steps]."""
        steps, numbers = self.tables.trajectories.table["step"], self.tables.steps.table["step"]
        places = np.searchsorted(numbers, steps)
        known = places < len(numbers)
        known[known] = numbers[places[known]] == steps[known]
        return np.bincount(places[known], minlength=len(numbers))


def _balance(counts: dict[str, int]) -> dict[str, int]:
    return {"issued": sum(counts.values())} | {state.value: counts.get(state.value, 0) for state in State}


def _rate(steps: list[StepMetrics]) -> float | None:
    if len(steps) < 2 or (seconds := steps[-1].rl_seconds - steps[0].rl_seconds) <= 0:
        return None
    return (steps[-1].step - steps[0].step) / seconds
