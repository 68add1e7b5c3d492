"""The summary of a run in one record, read from its folder."""

from __future__ import annotations

import math
import sqlite3
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from statistics import median

import msgspec
from msgspec import UNSET

from stretto.core.admission import BoundChange
from stretto.core.canary import CANARY, CanaryRecord
from stretto.core.errors import StoreError
from stretto.core.records import Record
from stretto.store import lock
from stretto.store.ending import branch_of, condition
from stretto.store.inspection import (
    CHANGED,
    CanaryProof,
    ChangedBound,
    EngineRecord,
    Inspection,
    StalenessSummary,
    TokenCounts,
    TrajectoryCounts,
    WeightsSummary,
)
from stretto.store.ledger.reading import BOUNDS, fact, tokens_on_record
from stretto.store.ledger.schema import once_at_rest, reading
from stretto.store.ledger.seals import check_rows
from stretto.store.run_folder import Branch, RunFolder
from stretto.store.selection import MEASURES, SELECTION, Bias, SelectionBias
from stretto.store.series.lines import open_plain
from stretto.store.totals import (
    ENGINES,
    EXPIRED,
    FAILED,
    FILTERED,
    IDLE,
    MASKED,
    TOTALS,
    Carried,
    Membership,
    Totals,
    core_budget,
    goodput,
)

#: Undecided trajectories by kind of reason (its part before ": "), each with its newest reason.
_UNDECIDED = """
    SELECT count(*), reason, max(key) FROM trajectories WHERE state = 'failed' AND verdict = 'undecided'
    GROUP BY substr(reason, 1, instr(reason || ': ', ': ') - 1) ORDER BY 1 DESC, 3
"""
_LONGEST_ADDRESS = 4_096
_WASTED = (MASKED, EXPIRED, FILTERED, FAILED)
_CHANGES = "SELECT detail FROM events WHERE name = ? ORDER BY rowid"


def inspect_run(path: str | Path) -> Inspection:
    """Return the summary of the running, finished or dead run in the folder `path`.

    Raises:
        RunFolderError: the folder holds no run.
        StoreError: the ledger cannot be read, or is damaged.
    """
    folder = RunFolder.open(path)
    found = of_branch(once_at_rest(folder.ledger, lambda: _inspected(folder.ledger)), branch_of(folder.path))
    how = condition(folder.path)
    return msgspec.structs.replace(found, gateway=_gateway(folder), state=how.state, reason=how.reason)


def _inspected(ledger: Path) -> Inspection:
    with reading(ledger) as connection:
        check_rows(connection, ledger)
        return inspection_of(connection)


def _gateway(folder: RunFolder) -> str | None:
    """Return the address of the run's gateway; None if the run has none or is not running (a killed run leaves the file
    behind)."""
    try:
        with open(open_plain(folder.gateway, links=True), "rb") as file:
            address = file.read(_LONGEST_ADDRESS).decode()
    except (OSError, StoreError, UnicodeDecodeError):
        return None
    return address if lock.is_held(folder.path) else None


def inspection_of(connection: sqlite3.Connection) -> Inspection:
    """Return the summary of a run from its open ledger, whose checksums are not checked. `gateway`, `state`, `reason`
    and `replay`, which are not in the ledger, have their defaults."""
    totals = fact(connection, TOTALS, Totals) or Totals(max_staleness=None)
    steps, version = connection.execute(
        "SELECT count(published_version), coalesce(max(published_version), 0) FROM steps"
    ).fetchone()
    staleness = _staleness(connection, totals.max_staleness)
    on_record = tokens_on_record(connection)
    spent = goodput(totals, on_record)
    interrupted, multi_version = connection.execute(
        "SELECT coalesce(sum(interrupted > 0), 0), coalesce(sum(newest_version > oldest_version), 0) FROM trajectories"
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
            wasted=sum(spent.budget[name].tokens for name in _WASTED) + totals.unfinished,
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
        cores=core_budget(totals, on_record) or UNSET,
        bounds=tuple(
            ChangedBound(one.step, one.name, one.before, one.after, one.reason)
            for one in fact(connection, BOUNDS, tuple[BoundChange, ...]) or ()
        ),
        canary=tuple(msgspec.structs.replace(one, which="", compared=0, tensors=0) for one in proofs),
        canary_proofs=proofs,
        selection_bias=newest_biases(selection),
        masked_groups=selection.masked,
        changed=tuple(one for (one,) in connection.execute(_CHANGES, (CHANGED,))),
    )


def newest_biases(known: SelectionBias) -> dict[str, Bias]:
    """Return the selection bias in the newest complete window, by measure; ``Bias()`` before the first window."""
    return {name: known.newest.get(name, Bias()) for name in MEASURES}


def of_branch(found: Inspection, branch: Branch | None) -> Inspection:
    """Return the summary of a run that branched off another, with its origin `branch` as `replay`. Engines, canaries,
    goodput and idle times are empty and wasted tokens are 0, since its copy of the ledger has those of the original
    run. None: the run is no branch, and `found` is returned unchanged."""
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
        cores=UNSET,
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
    """Return the newest canary check of each engine, then the worst of the run if there was any."""
    worst = sorted((*record.worst, *record.withdrawn), key=lambda one: (one.proven, -one.distance / one.tolerance))[:1]
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


_OUTSIDE = ("starting", "ending")  # reasons of idle seconds before and after the training


class RoleTime(Record, frozen=True):
    """Use of one role's time. `working`: share of the training time; None: the training has not begun. `waiting`: idle
    shares of the training time by reason. `outside`: seconds before ("starting") and after ("ending") the training, if
    any."""

    role: str
    working: float | None
    waiting: Mapping[str, float]
    outside: Mapping[str, float]


def role_times(roles: Mapping[str, Mapping[str, float]], idle: Mapping[str, Mapping[str, float]]) -> list[RoleTime]:
    """Return the use of time of each role in `roles`: engines by name, the trainer, then the others. `roles`: seconds
    of each role by category of the goodput budget. `idle`: idle seconds of each role by reason.

    >>> role_times({"trainer": {"trained": 3.0, "idle": 7.0}}, {"trainer": {"starting": 6.0, "batch": 1.0}})[0].working
    0.75
    """
    found = []
    for role in sorted(roles, key=lambda name: (not name.startswith("engine"), name != "trainer", name)):
        reasons = idle.get(role, {})
        inside = {name: seconds for name, seconds in reasons.items() if name not in _OUTSIDE}
        work = sum(seconds for name, seconds in roles[role].items() if name != IDLE)
        whole = work + sum(inside.values())
        waiting = {name: seconds / whole for name, seconds in inside.items()} if whole > 0 else {}
        outside = {name: reasons[name] for name in _OUTSIDE if reasons.get(name)}
        found.append(RoleTime(role, work / whole if whole > 0 else None, waiting, outside))
    return found
