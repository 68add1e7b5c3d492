"""The summary of a run in one record. ``stretto inspect RUN --json`` prints it."""

from __future__ import annotations

import math
import sqlite3
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from statistics import median

import msgspec

from stretto.core.admission import BoundChange
from stretto.core.canary import CANARY, CanaryRecord
from stretto.core.errors import StoreError
from stretto.core.records import Record
from stretto.store import lock
from stretto.store.ending import branch_of, condition
from stretto.store.ledger.reading import BOUNDS, fact, tokens_on_record
from stretto.store.ledger.schema import reading
from stretto.store.ledger.seals import check_rows
from stretto.store.measures.goodput import Category
from stretto.store.measures.selection import SELECTION, Bias, MaskedGroups, SelectionBias, report
from stretto.store.run_folder import Branch, RunFolder
from stretto.store.series.lines import open_plain
from stretto.store.totals import ENGINES, TOTALS, Carried, Membership, Totals, budget

#: Name of the ledger's events that say which user-defined parts have changed between two starts of the run.
CHANGED = "changed"
#: Undecided trajectories by kind of reason (its part before ": "), each with its newest reason.
_UNDECIDED = """
    SELECT count(*), reason, max(key) FROM trajectories WHERE state = 'failed' AND verdict = 'undecided'
    GROUP BY substr(reason, 1, instr(reason || ': ', ': ') - 1) ORDER BY 1 DESC, 3
"""
_LONGEST_ADDRESS = 4_096
_CHANGES = "SELECT detail FROM events WHERE name = ? ORDER BY rowid"


class TokenCounts(Record, frozen=True):
    """Token counts. `recomputed`: KV cache computed again after an interruption. `wasted`: sampled tokens that are
    never trained on: of aborted or untrained completions, and masked ones."""

    generated: int
    trained: int
    recomputed: int
    wasted: int


class TrajectoryCounts(Record, frozen=True):
    """Trajectories by state; `issued` is the sum of the others. `undecided`: those of `failed` whose verdict is
    undecided; `undecided_reason`: newest reason of their most frequent kind."""

    issued: int
    trained: int
    buffered: int
    in_flight: int
    filtered: int
    expired: int
    failed: int
    undecided: int = 0
    undecided_reason: str = ""


class EngineRecord(Membership, frozen=True):
    """One engine, and the number of tokens that it sampled for training prompts."""

    generated: int = 0


class WeightsSummary(Record, frozen=True):
    """Weight transfers to the engines: medians over the newest 99; None if there are none.

    `medium`: shared_memory, http or broadcast. `bytes`: size of one version. `seconds_pull_median`: transfer of one
    version to an engine. `seconds_pause_median`: pause of generation for a load. `copies`: how often each byte is
    copied in host memory between the trainer's parameters and the mailbox; each engine adds one copy.
    `seconds_publish_median`: from the trainer's copy until the version could be loaded.
    """

    medium: str | None
    bytes: int | None
    seconds_pull_median: float | None
    seconds_pause_median: float | None
    copies: float | None = None
    seconds_publish_median: float | None = None


class StalenessSummary(Record, frozen=True):
    """Staleness (versions between sampling and training) of trained tokens; `bound` None: no bound, or no step yet."""

    bound: float | None
    max: int
    mean: float
    histogram: dict[int, int]  # versions: tokens


class ChangedBound(Record, frozen=True):
    """A change of a bound by the run itself, after `step`. `name`: key of the bound in ``[rollout]``."""

    step: int
    name: str
    before: int
    after: int
    reason: str


class CanaryProof(Record, frozen=True, omit_defaults=True):
    """Check of an engine's weights after it has loaded a version.

    `distance`: difference between its log-probabilities of the canary text and the trainer's, in nats per token.
    `which`: "newest" of the engine, or "worst" of the run relative to its tolerance. `tensors`: number of tensors of
    the version; `compared`: how many of these were compared in the engine's memory with the trainer's digests.
    """

    engine: str
    version: int
    distance: float
    tolerance: float
    proven: bool
    which: str = ""  # newest or worst; empty in `Inspection.canary`
    compared: int = 0
    tensors: int = 0


class Inspection(Record, frozen=True):
    """A run in numbers. `state`: running, finished, stopped (by a signal) or dead; `reason`: why it is not running.
    `busy`: role: share of `rl_seconds` in which it worked."""

    steps: int
    version: int
    wall_seconds: float
    rl_seconds: float
    initial_accuracy: float | None  # None: not measured
    final_accuracy: float | None  # None: not measured
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
    masked_groups: MaskedGroups | None = None  # of the newest complete window; None: no window, or no such group
    bounds: tuple[ChangedBound, ...] = ()  # changes made by the run itself
    canary: tuple[CanaryProof, ...] = ()  # newest of each engine, then the worst; empty for a run of an earlier stretto
    canary_proofs: tuple[CanaryProof, ...] = ()  # the same with all fields
    state: str = ""
    reason: str = ""
    replay: Branch | None = None  # origin of a branch of `stretto replay`, which generates and evaluates nothing
    changed: tuple[str, ...] = ()  # sentences: user-defined parts whose source has changed between two starts


def inspect_run(path: str | Path) -> Inspection:
    """Summarise the running, finished or dead run in the folder `path`.

    Raises:
        RunFolderError: the folder holds no run.
        StoreError: the ledger cannot be read, or is damaged.
    """
    folder = RunFolder.open(path)
    with reading(folder.ledger) as connection:
        check_rows(connection, folder.ledger)
        found = inspection_of(connection)
    found = of_branch(found, branch_of(folder.path))
    how = condition(folder.path)
    return msgspec.structs.replace(found, gateway=_gateway(folder), state=how.state, reason=how.reason)


def _gateway(folder: RunFolder) -> str | None:
    """Address of the run's gateway; None if the run has none or is not running (a killed run leaves the file
    behind)."""
    try:
        with open(open_plain(folder.gateway, links=True), "rb") as file:
            address = file.read(_LONGEST_ADDRESS).decode()
    except (OSError, StoreError, UnicodeDecodeError):
        return None
    return address if lock.is_held(folder.path) else None


def inspection_of(connection: sqlite3.Connection) -> Inspection:
    """Summarise a run from its open ledger, without checking seals. Gateway, state and reason are left empty."""
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
    selection = fact(connection, SELECTION, SelectionBias) or SelectionBias()
    proofs = _canary(fact(connection, CANARY, CanaryRecord) or CanaryRecord())
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
        canary=tuple(msgspec.structs.replace(one, which="", compared=0, tensors=0) for one in proofs),
        canary_proofs=proofs,
        selection_bias=report(selection),
        masked_groups=selection.masked,
        changed=tuple(one for (one,) in connection.execute(_CHANGES, (CHANGED,))),
    )


def of_branch(found: Inspection, branch: Branch | None) -> Inspection:
    """The inspection of a branch, with its origin `branch` as `replay`. Engines, canaries, goodput and idle times are
    empty and wasted tokens are 0, since its copy of the ledger has those of the original run. Returns `found` unchanged
    if `branch` is None."""
    if branch is None:
        return found
    kept = msgspec.structs.replace(found.tokens, wasted=0)
    return msgspec.structs.replace(
        found,
        replay=branch,
        tokens=kept,
        engines=(),
        canary=(),
        canary_proofs=(),
        goodput={},
        goodput_roles={},
        idle={},
    )


def _weights(carried: Carried | None) -> WeightsSummary:
    if carried is None:
        return WeightsSummary(None, None, None, None)
    sizes = [size for size, _ in carried.pulls or carried.written]
    copied = median(carried.copied) if carried.copied else 0
    return WeightsSummary(
        medium=carried.medium,
        bytes=round(median(sizes)) if sizes else None,
        seconds_pull_median=median(seconds for _, seconds in carried.pulls) if carried.pulls else None,
        seconds_pause_median=median(carried.pauses) if carried.pauses else None,
        copies=round(1 + copied / max(1, median(size for size, _ in carried.written)), 2) if carried.written else None,
        seconds_publish_median=median(seconds for _, seconds in carried.written) if carried.written else None,
    )


def _canary(record: CanaryRecord) -> tuple[CanaryProof, ...]:
    """Newest check of each engine, then the worst of the run."""
    worst = sorted(record.worst, key=lambda one: (one.proven, -one.distance / one.tolerance))[:1]
    return tuple(
        CanaryProof(one.engine, one.version, one.distance, one.tolerance, one.proven, which, one.compared, one.tensors)
        for which, proofs in (("newest", record.newest), ("worst", worst))
        for one in proofs
    )


def _trajectories(connection: sqlite3.Connection) -> TrajectoryCounts:
    states = dict(connection.execute("SELECT state, count(*) FROM trajectories GROUP BY state").fetchall())
    names = ("trained", "buffered", "in_flight", "filtered", "expired", "failed")
    kinds = connection.execute(_UNDECIDED).fetchall()
    return TrajectoryCounts(
        issued=sum(states.values()),
        **{name: states.get(name, 0) for name in names},
        undecided=sum(count for count, _, _ in kinds),
        undecided_reason=kinds[0][1] if kinds else "",
    )


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
