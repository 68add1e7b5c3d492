"""The summary of a run in one record, which ``stretto inspect RUN --json`` prints."""

from __future__ import annotations

import math
import sqlite3
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from statistics import median

import msgspec

from stretto.core.admission import BoundChange
from stretto.core.records import Record
from stretto.measures.goodput import Category, Clock, Goodput, OnRecord, Produced, goodput
from stretto.measures.selection import SELECTION, Bias, SelectionBias, report
from stretto.store import lock
from stretto.store.folder.run_folder import RunFolder
from stretto.store.ledger.reading import BOUNDS, tokens_on_record
from stretto.store.ledger.schema import reading
from stretto.store.ledger.seals import Value, check_rows


class Carried(Record, frozen=True):
    """How versions reached the engines: of the newest `NEWEST_TRANSFERS`, the bytes and seconds of each, and the
    seconds for which generation paused."""

    medium: str
    pulls: tuple[tuple[int, float], ...] = ()
    pauses: tuple[float, ...] = ()


NEWEST_TRANSFERS = 99


class Totals(Record, frozen=True):
    """Totals that only the conductor knows; it writes them to the ledger, under ``TOTALS``, after every step.

    Example: ``Totals(max_staleness=4, generated=81920, recomputed=9120, busy={"trainer": 88.1}, wall_seconds=161.0,
    rl_seconds=96.2, initial_accuracy=0.41, final_accuracy=0.96)``
    """

    max_staleness: float | None  # None (also what JSON makes of an infinity): no bound
    generated: int = 0  # tokens sampled by all engines for training prompts
    stopped: int = 0  # tokens of completions that were aborted, and do not go on
    unfinished: int = 0  # tokens of completions in flight when the run ended; a resume may continue them
    recomputed: int = 0  # tokens whose KV cache was computed again after an interruption
    busy: Mapping[str, float] = {}  # role: seconds of work since the first prompt was admitted
    wall_seconds: float = 0.0
    rl_seconds: float = 0.0
    initial_accuracy: float | None = None  # held-out, version 0
    final_accuracy: float | None = None  # held-out, the last version evaluated
    generated_by: Mapping[str, int] = {}  # engine: its part of `generated`
    carried: Carried | None = None
    rewards: Mapping[str, float] = {}  # of several rewards, by name: mean value in the newest batch
    evaluated: int = 0  # tokens sampled by all engines for evaluations
    starting_seconds: float = 0.0  # until the first prompt was admitted
    activities: Mapping[str, Mapping[str, float]] = {}  # role, span name: seconds, counted as `busy`


TOTALS = "totals"


class Membership(Record, frozen=True):
    """One engine of a run; `joined_step` and `left_step` are the newest step that was done then. The conductor writes
    those of all engines to the ledger, under ``ENGINES``.

    Example: ``Membership("engine-0", "native", "node-3", version=12, joined_step=0)``
    """

    name: str
    kind: str  # native, vllm or sglang
    host: str  # the name of its machine
    version: int  # that it serves, or served last
    joined_step: int
    left_step: int | None = None  # None: it was there to the end, or still is
    reason: str = ""  # why it left, or last left and came back


ENGINES = "engines"


class TokenCounts(Record, frozen=True):
    """Token counts. Wasted tokens are never trained on: those of completions that ended untrained or were aborted, and
    masked ones."""

    generated: int
    trained: int
    recomputed: int
    wasted: int


class TrajectoryCounts(Record, frozen=True):
    """Trajectories by state; issued is the sum of the others."""

    issued: int
    trained: int
    buffered: int
    in_flight: int
    filtered: int
    expired: int
    failed: int


class EngineRecord(Record, frozen=True):
    """One engine: its `Membership`, and the tokens that it sampled for training prompts."""

    name: str
    kind: str
    host: str
    version: int
    joined_step: int
    left_step: int | None
    reason: str
    generated: int


class WeightsSummary(Record, frozen=True):
    """How versions reach the engines; medians over the newest `NEWEST_TRANSFERS`, None without any. `bytes` is what one
    of them carries."""

    medium: str | None
    bytes: int | None
    seconds_pull_median: float | None
    seconds_pause_median: float | None


class StalenessSummary(Record, frozen=True):
    """Versions between sampling and training, over trained tokens; `bound` None: no bound."""

    bound: float | None
    max: int
    mean: float
    histogram: dict[int, int]  # versions: tokens


class ChangedBound(Record, frozen=True):
    """A bound that the run has changed after a step; `name` is its key in ``[rollout]``."""

    step: int
    name: str
    before: int
    after: int
    reason: str


class Inspection(Record, frozen=True):
    """A run in numbers. `busy` is the fraction of `rl_seconds` in which a role worked."""

    steps: int
    version: int
    wall_seconds: float
    rl_seconds: float
    initial_accuracy: float | None
    final_accuracy: float | None
    tokens: TokenCounts
    trajectories: TrajectoryCounts
    staleness: StalenessSummary
    interrupted: int  # trajectories that weight updates interrupted
    multi_version: int  # trajectories with tokens of two or more versions
    busy: dict[str, float]
    engines: tuple[EngineRecord, ...]
    weights: WeightsSummary
    rewards: Mapping[str, float] = {}  # of several rewards, by name: mean value in the newest batch
    gateway: str | None = None  # where agents find the policy of a running run
    goodput: Mapping[str, Category] = {}  # category: seconds of all roles together, and tokens
    goodput_roles: Mapping[str, Mapping[str, float]] = {}  # role: category: seconds
    idle: Mapping[str, Mapping[str, float]] = {}  # role: reason: seconds
    selection_bias: Mapping[str, Bias] = {}  # length, difficulty, latency: lost groups against the others
    bounds: tuple[ChangedBound, ...] = ()  # what the run itself has changed


def budget(totals: Totals, on_record: OnRecord) -> Goodput:
    """The goodput budget of a run."""
    return goodput(
        Produced(totals.generated, totals.stopped, totals.recomputed, totals.evaluated),
        on_record,
        Clock(totals.wall_seconds, totals.starting_seconds, totals.rl_seconds),
        totals.busy,
        totals.activities,
        engines=frozenset(totals.generated_by),
    )


def inspect_run(path: str | Path) -> Inspection:
    """The summary of a running, finished or dead run.

    Raises:
        RunFolderError: there is no run.
        StoreError: its ledger cannot be read, or is not what was written.
    """
    folder = RunFolder.open(path)
    with reading(folder.ledger) as connection:
        check_rows(connection, folder.ledger)
        return msgspec.structs.replace(inspection_of(connection), gateway=_gateway(folder))


def _gateway(folder: RunFolder) -> str | None:
    """Its address, while the run runs; a killed one leaves it behind."""
    try:
        address = folder.gateway.read_text()
    except OSError:
        return None
    return address if lock.is_held(folder.path) else None


def inspection_of(connection: sqlite3.Connection) -> Inspection:
    """The summary by a ledger, of which nothing is checked."""
    totals = fact(connection, TOTALS, Totals) or Totals(max_staleness=None)
    steps, version, masked = connection.execute(
        "SELECT count(published_version), coalesce(max(published_version), 0), coalesce(sum(masked_tokens), 0)"
        " FROM steps"
    ).fetchone()
    staleness = _staleness(connection, totals.max_staleness)
    spent = budget(totals, tokens_on_record(connection))
    interrupted, multi_version, lost = connection.execute(
        "SELECT coalesce(sum(interrupted > 0), 0), coalesce(sum(newest_version > oldest_version), 0),"
        " coalesce(sum(CASE WHEN state IN ('filtered', 'expired', 'failed') THEN tokens END), 0) FROM trajectories"
    ).fetchone()
    return Inspection(
        steps=steps,
        version=version,
        wall_seconds=totals.wall_seconds,
        rl_seconds=totals.rl_seconds,
        initial_accuracy=totals.initial_accuracy,
        final_accuracy=totals.final_accuracy,
        tokens=TokenCounts(
            generated=totals.generated,
            trained=sum(staleness.histogram.values()),
            recomputed=totals.recomputed,
            wasted=lost + masked + totals.stopped + totals.unfinished,
        ),
        trajectories=_trajectories(connection),
        staleness=staleness,
        interrupted=interrupted,
        multi_version=multi_version,
        busy={role: _fraction(seconds, totals.rl_seconds) for role, seconds in sorted(totals.busy.items())},
        engines=tuple(
            EngineRecord(**msgspec.structs.asdict(row), generated=totals.generated_by.get(row.name, 0))
            for row in fact(connection, ENGINES, tuple[Membership, ...]) or ()
        ),
        weights=_weights(totals.carried),
        rewards=totals.rewards,
        goodput=spent.budget,
        goodput_roles=spent.roles,
        idle=spent.idle,
        bounds=tuple(
            ChangedBound(one.step, one.name, one.before, one.after, one.reason)
            for one in fact(connection, BOUNDS, tuple[BoundChange, ...]) or ()
        ),
        selection_bias=report(fact(connection, SELECTION, SelectionBias) or SelectionBias()),
    )


def fact(connection: sqlite3.Connection, name: str, kind: type[Value]) -> Value | None:
    """A fact of a ledger, of which nothing is checked; None where there is none of this name."""
    found = connection.execute("SELECT value FROM meta WHERE name = ?", (name,)).fetchone()
    return msgspec.json.decode(found[0], type=kind) if found else None


def _weights(carried: Carried | None) -> WeightsSummary:
    if carried is None:
        return WeightsSummary(None, None, None, None)
    return WeightsSummary(
        medium=carried.medium,
        bytes=round(median(size for size, _ in carried.pulls)) if carried.pulls else None,
        seconds_pull_median=median(seconds for _, seconds in carried.pulls) if carried.pulls else None,
        seconds_pause_median=median(carried.pauses) if carried.pauses else None,
    )


def _trajectories(connection: sqlite3.Connection) -> TrajectoryCounts:
    states = dict(connection.execute("SELECT state, count(*) FROM trajectories GROUP BY state").fetchall())
    names = ("trained", "buffered", "in_flight", "filtered", "expired", "failed")
    return TrajectoryCounts(issued=sum(states.values()), **{name: states.get(name, 0) for name in names})


def _staleness(connection: sqlite3.Connection, bound: float | None) -> StalenessSummary:
    histogram: Counter[int] = Counter()
    for (text,) in connection.execute("SELECT staleness FROM steps"):
        histogram.update(msgspec.json.decode(text, type=dict[int, int]))
    tokens = histogram.total()
    return StalenessSummary(
        bound=None if bound is None or math.isinf(bound) else bound,
        max=max(histogram, default=0),
        mean=sum(age * count for age, count in histogram.items()) / tokens if tokens else 0.0,
        histogram=dict(sorted(histogram.items())),
    )


def _fraction(seconds: float, of: float) -> float:
    return round(seconds / of, 4) if of > 0 else 0.0
