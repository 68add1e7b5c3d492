"""Read a run's records for the checker, directly from SQLite. No code is shared with the writers."""

from __future__ import annotations

import hashlib
import json
import os
import sqlite3
import sys
import tomllib
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import closing
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from stretto.core.errors import UNREADABLE, Problem, RunFolderError, StoreError
from stretto.store.ledger.schema import needs_copy, open_copy
from stretto_report.audit.bounds import Bounds, RecordedChange, read_bounds
from stretto_report.audit.checksums import (
    CHECKSUM_BYTES,
    broken_checksums,
    broken_files,
    counted,
    payload_fits,
    segments_of,
)
from stretto_report.audit.presence import (
    UNREADABLE_LINE,
    broken_rows,
    missing_facts,
    missing_tokens,
    noted_events,
    rows_of,
)

Found = TypeVar("Found")
FORMATS = (2, 3, 4, 5, 6)  #: formats that can be checked
PROMPT, NOTHING = -1, -2  #: `parent` of a segment without one
_FIRST_SEALED = 3
_ENGINES, _PARENT = 5, 6  # indices of these fields in a segment

#: Settings that may change when a run is resumed: sections, and keys of sections.
MAY_CHANGE = frozenset({"cluster", "evaluation", "deadlines", "store", "logging"})
_RANKS = ("ranks", "remote_ranks", "tensor_parallel", "context_parallel")
MAY_CHANGE_OF = {"trainer": frozenset({"steps", *_RANKS, "keep_versions", "checkpoint_every"})}

_TRAJECTORIES = """
    SELECT groups.id, prompt_id, members, admitted_version, groups.key, trajectories.key, member, state, reason,
        trained_step, verdict, reward, stop_reason, tokens, oldest_version, newest_version, interrupted, payload
    FROM groups LEFT JOIN trajectories ON group_key = groups.key LEFT JOIN payloads ON payloads.key = trajectories.key
    ORDER BY groups.key, member
"""
_STEPS = (
    "SELECT step, version, oldest_trainable, trajectories, trained_tokens, masked_tokens, batch, published_version"
    " FROM steps ORDER BY rowid"
)


@dataclass(frozen=True, slots=True)
class _RecordedSegment:
    """A segment of a trajectory as recorded: numbers of tokens and log-probabilities, and the versions of its tokens in
    order, as (version, number of tokens). A given (not sampled) segment has neither log-probabilities nor versions.
    `parent`: index of the segment that it follows, or `PROMPT` or `NOTHING`."""

    tokens: int
    logprobs: int
    stamps: tuple[tuple[int, int], ...]
    parent: int

    @property
    def stamped(self) -> int:
        """Number of tokens with a version."""
        return sum(count for _, count in self.stamps)


@dataclass(frozen=True, slots=True)
class RecordedTrajectory:
    """A trajectory as recorded. `trained_step`: None if it was not trained. `verdict`, `stop_reason`: None before its
    end is recorded; `reward`: likewise, and if undecided. `tokens`: number of sampled tokens. `oldest_version`,
    `newest_version`: of these; None if there are none. `segments`: None if its tokens were not kept or are damaged.
    `writers`: names of the engines that sampled its tokens in order, with numbers of tokens; empty before format 4, and
    without segments."""

    group: str
    member: int
    state: str
    reason: str
    trained_step: int | None
    verdict: str | None
    reward: float | None
    stop_reason: str | None
    tokens: int
    oldest_version: int | None
    newest_version: int | None
    segments: tuple[_RecordedSegment, ...] | None
    writers: tuple[tuple[str, int], ...] = ()

    @property
    def id(self) -> str:
        return f"{self.group}/{self.member}"

    @property
    def sampled(self) -> tuple[_RecordedSegment, ...]:
        """Segments with sampled tokens; empty if the tokens were not kept."""
        return tuple(segment for segment in self.segments or () if segment.stamps)


@dataclass(frozen=True)
class RecordedGroup:
    """One attempt at a prompt, with its trajectories. Its id is ``epoch.prompt.attempt``; the first attempt is 0.
    `members`: number of trajectories that were issued. `max_staleness`, `max_in_flight` (groups): bounds in force when
    it was admitted."""

    id: str
    prompt: str
    epoch: int
    attempt: int
    members: int
    admitted_version: int
    max_staleness: float
    max_in_flight: float
    trajectories: tuple[RecordedTrajectory, ...]


@dataclass(frozen=True)
class RecordedStep:
    """A training step. `version`: that of the policy before the step. `batch`: group ids in order, each with its
    trained members. `oldest_trainable`: tokens of older versions are masked. `own_oldest`: the same by group id, for
    groups whose value differs from the step's. `published_version`: None: not published. `trajectories`,
    `trained_tokens`, `masked_tokens`: numbers."""

    step: int
    version: int
    oldest_trainable: int
    trajectories: int
    trained_tokens: int
    masked_tokens: int
    batch: tuple[tuple[str, tuple[int, ...]], ...]
    published_version: int | None
    own_oldest: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class _RecordedLine:
    """A step's line of ``metrics.jsonl``: trained and masked tokens of the step; since the start of the run, sampled
    tokens and tokens by category of the goodput budget (empty in runs of earlier versions)."""

    trained: int
    masked: int
    generated: int
    budget: Mapping[str, int]


@dataclass(frozen=True)
class RecordedData:
    """Questions of a run: the digest on record, the current digest (`found`), the ids of the questions (`prompts`), and
    the inputs to the order of an epoch: `seed`, and name, number of prompts and weight of each source.

    A prompt may be skipped in the next epoch if its share of right completions among those judged right or wrong is at
    most `hard` or at least `easy`. If one of both is None, no prompt may be skipped.
    """

    digest: str
    found: str
    prompts: tuple[str, ...]
    seed: int
    sources: tuple[tuple[str, int, float | None], ...]  # name, number of prompts, weight
    easy: float | None
    hard: float | None


@dataclass(frozen=True)
class _RecordedProofs:
    """Ranges (first, last; both included) of versions that each engine has proven by the canary, by its name, and the
    proofs that were taken back, as (engine, version). Versions before `since` need no proof: the stretto that sampled
    with them had no canary."""

    since: int
    proven: Mapping[str, tuple[tuple[int, int], ...]]
    withdrawn: frozenset[tuple[str, int]] = frozenset()


@dataclass(frozen=True)
class History:
    """All records of a run that the laws are checked on, made by `read_history`. `given_back`: prompts to be repeated
    next, as (epoch, prompt, attempt). `position`: epoch, and the number of prompts drawn in it. `policies`: versions in
    the run folder. `damage`, `broken_checksums`, `broken_start` and `edited` hold sentences on faults. `roster`: names
    of all engines. `notes`: what was not checked. `lines`: by step. `most_in_flight`: largest number of groups in
    flight, by the group after whose issue it was counted. `data`, `proofs`: None: not on record."""

    groups: tuple[RecordedGroup, ...]
    steps: tuple[RecordedStep, ...]
    bounds: Bounds
    given_back: tuple[tuple[int, str, int], ...]
    position: tuple[int, int] | None
    policies: tuple[int, ...]
    roster: tuple[str, ...]  # the engines of the run
    damage: tuple[str, ...]  # found by SQLite's integrity check
    broken_checksums: tuple[str, ...]
    broken_start: tuple[str, ...]  # files of the run's start that have changed
    edited: tuple[str, ...]  # keys of the recipe that differ from the record
    notes: tuple[str, ...]  # records that cannot be checked
    lines: Mapping[int, _RecordedLine]  # by step
    changes: tuple[RecordedChange, ...] = ()  # of bounds
    # Most groups in flight at once between two changes of bounds, by id of the first group admitted between them.
    most_in_flight: Mapping[str, int] = field(default_factory=dict)
    data: RecordedData | None = None  # None: a run of an earlier stretto
    proofs: _RecordedProofs | None = None  # None: a run of an earlier stretto
    counted: Mapping[str, int] = field(default_factory=dict)  # trajectories by state, as the ledger keeps count of them

    @property
    def trajectories(self) -> tuple[RecordedTrajectory, ...]:
        return tuple(trajectory for group in self.groups for trajectory in group.trajectories)


def read_history(folder: Path) -> History:
    """Read all records of the run in `folder`; nothing is written.

    Raises:
        RunFolderError: there is no run, or the ledger is of a loop without a recipe.
        StoreError: the ledger has another format, or the ledger or the recipe cannot be read at all.
    """
    path = folder / "ledger.sqlite"
    if not os.path.isfile(path):  # false also for a name that no file can have
        found = "holds no run (no ledger.sqlite)" if os.path.isdir(folder) else "does not exist"
        raise RunFolderError([Problem(str(folder), found, "give a run folder")])
    if not (folder / "recipe.toml").exists():
        remedy = "give a folder of `stretto train`: the laws are those of a recipe, which a loop of your own has not"
        raise RunFolderError([Problem(str(folder), "has a ledger and no recipe.toml", remedy)])
    policies = _policies(folder)  # read before the ledger: a run records a batch before it publishes the version
    bounds = read_bounds(folder / "recipe.toml")
    try:
        with closing(open_copy(path) if needs_copy(path) else sqlite3.connect(_address(path), uri=True)) as connection:
            (found,) = connection.execute("PRAGMA user_version").fetchone()
            if found not in FORMATS:
                can = f"formats {FORMATS[0]} to {FORMATS[-1]}"
                raise StoreError(f"{path}: has format {found}, this version of stretto checks {can}")
            connection.execute("BEGIN")
            return _history(connection, found, folder, bounds, policies)
    except (sqlite3.Error, ValueError, *UNREADABLE) as error:
        raise StoreError(f"{path}: cannot be read: {error}") from error
    except (KeyError, TypeError) as error:
        raise StoreError(f"{path}: cannot be read: the position or a batch is not what was written: {error}") from error


def _address(path: Path) -> str:
    """Return the read-only SQLite URI of the ledger. It is immutable if there is no write-ahead log and SQLite could
    not create its index file, because the folder is not writable."""
    log, index = path.with_name(f"{path.name}-wal"), path.with_name(f"{path.name}-shm")
    bare = not index.exists() and not (log.exists() and log.stat().st_size)
    how = "mode=ro&immutable=1" if bare and not os.access(path.parent, os.W_OK) else "mode=ro"
    return f"{path.absolute().as_uri()}?{how}"


def _policies(folder: Path) -> tuple[int, ...]:
    kept = [path.name[1:] for path in (folder / "policy").glob("v*") if path.is_dir()]
    return tuple(sorted(int(version) for version in kept if version.isdecimal()))


def _history(
    connection: sqlite3.Connection, number: int, folder: Path, bounds: Bounds, policies: tuple[int, ...]
) -> History:
    damage = tuple(text for (text,) in connection.execute("PRAGMA integrity_check").fetchall() if text != "ok")
    facts = {name: json.loads(value) for name, value in connection.execute("SELECT name, value FROM meta")}
    position = facts["standing"]["position"] if "standing" in facts else None
    given_back = position["given_back"] if position else []
    changes = tuple(RecordedChange(*change) for change in facts.get("bounds", ()))
    groups, steps = _groups(connection, bounds, changes), tuple(_step(row) for row in connection.execute(_STEPS))
    without_tokens, noted = missing_tokens(connection, folder / "recipe.toml")
    noted += [*missing_facts(number, facts, len(groups), len(steps)), *noted_events(connection)]
    return History(
        groups=groups,
        changes=changes,
        most_in_flight=_most_in_flight(connection, facts.get("in_flight", ())),
        steps=steps,
        bounds=bounds,
        given_back=tuple((again["epoch"], again["prompt_id"], again["attempt"]) for again in given_back),
        position=(position["epoch"], position["index"]) if position else None,
        policies=policies,
        roster=tuple(engine["name"] for engine in facts.get("engines", ())),
        damage=(*damage, *broken_rows(connection, len(changes))),
        broken_checksums=(*broken_checksums(connection, number), *without_tokens),
        broken_start=tuple(broken_files(folder, _kept(folder, facts.get("start", {})))),
        edited=tuple(_edited(folder, facts.get("recipe"))),
        notes=(*_not_judged(folder, number, facts), *noted),
        data=_data(folder / "questions.jsonl", facts["data"]) if "data" in facts else None,
        proofs=_proofs(facts["canary"]) if "canary" in facts else None,
        lines=_lines(folder / "metrics.jsonl"),
        counted=_counted(connection, facts.get("counts of trajectories")),
    )


def _counted(connection: sqlite3.Connection, fact: Mapping[str, Any] | None) -> Mapping[str, int]:
    """Return the numbers of trajectories by state that the ledger has counted; empty if it has none, or an earlier
    stretto, which does not count, has issued groups since."""
    last = connection.execute("SELECT key + members FROM groups ORDER BY key DESC LIMIT 1").fetchone()
    counted: Mapping[str, int] = fact["states"] if fact and last == (fact["next_key"],) else {}
    return counted


def _data(questions: Path, fact: Mapping[str, Any]) -> RecordedData:
    found, prompts = _digest(questions)
    return RecordedData(
        digest=fact["digest"],
        found=found,
        prompts=prompts,
        seed=fact["seed"],
        sources=tuple((source["name"], source["prompts"], source["weight"]) for source in fact["sources"]),
        easy=fact["easy"],
        hard=fact["hard"],
    )


def _proofs(fact: Mapping[str, Any]) -> _RecordedProofs:
    proven = {one["engine"]: tuple((first, last) for first, last in one["ranges"]) for one in fact["proven"]}
    withdrawn = frozenset((one["engine"], one["version"]) for one in fact.get("withdrawn", ()))
    return _RecordedProofs(fact["since"], proven, withdrawn)


def _digest(questions: Path) -> tuple[str, tuple[str, ...]]:
    """Return digest and ids of the questions; of a file that is missing or faulty ``none (the fault)`` and no ids."""
    whole, prompts = hashlib.blake2b(digest_size=16), list[str]()
    try:
        # Split at line feeds alone: a text may contain other line separators.
        for line in questions.read_text(encoding="utf-8").removesuffix("\n").split("\n"):
            row = json.loads(line)
            prompts.append(row["id"])
            for text in (row["id"], row["prompt"], row["answer"]):
                whole.update(f"{len(text)}:{text}".encode())
    except (OSError, KeyError, TypeError, *UNREADABLE_LINE) as error:
        return f"none ({type(error).__name__}: {error})", ()
    return whole.hexdigest(), tuple(prompts)


def _kept(folder: Path, start: Mapping[str, Any]) -> Mapping[str, Any]:
    return {name: files for name, files in start.items() if (folder / name).exists()}


def _not_judged(folder: Path, number: int, facts: Mapping[str, Any]) -> Iterator[str]:
    if number < _FIRST_SEALED:
        yield f"the ledger has format {number}: it has no seals of its recipe and of its first policy"
    elif missing := {"recipe", "start"} - facts.keys():
        yield f"{' and '.join(sorted(missing))}: not on record, so not checked"
    start = facts.get("start", {})
    yield from (
        f"{folder / name} does not exist, so it is not checked" for name in start.keys() - _kept(folder, start).keys()
    )


def _edited(folder: Path, recorded: str | None) -> Iterator[str]:
    """Yield a sentence for each key of the recipe that differs from the `recorded` TOML, except keys that a resume may
    change. None: no recipe is on record, and nothing is yielded."""
    if recorded is None:
        return
    before, after = tomllib.loads(recorded), tomllib.loads((folder / "recipe.toml").read_text(encoding="utf-8"))
    for section in sorted((before.keys() | after.keys()) - MAY_CHANGE):
        yield from _differing(section, before.get(section), after.get(section), MAY_CHANGE_OF.get(section, frozenset()))


def _differing(name: str, before: object, after: object, ignored: Set[str] = frozenset()) -> Iterator[str]:
    if isinstance(before, dict) and isinstance(after, dict):
        for key in sorted((before.keys() | after.keys()) - ignored):
            yield from _differing(f"{name}.{key}", before.get(key), after.get(key))
    elif before != after:
        yield f"{name} is {after!r}, on record is {before!r}"


def _groups(
    connection: sqlite3.Connection, bounds: Bounds, changes: Sequence[RecordedChange]
) -> tuple[RecordedGroup, ...]:
    """Return all groups in the order of their issue, each with the bounds in force when it was admitted. `bounds`: the
    values before the first change."""
    facts: dict[str, tuple[str, int, int, float, float]] = {}
    trajectories: dict[str, list[RecordedTrajectory]] = {}
    of_staleness, of_number = (
        sorted((change for change in changes if change.name == name), key=lambda one: one.key)
        for name in ("max_staleness", "max_in_flight")
    )
    for group, prompt, members, admitted, first, key, *rest in connection.execute(_TRAJECTORIES):
        if group not in facts:
            own = in_force(of_staleness, first, bounds.max_staleness), in_force(of_number, first, bounds.max_in_flight)
            facts[group] = (prompt, members, admitted, *own)
            trajectories[group] = []
        trajectories[group].extend([_trajectory(group, rest)] if key is not None else [])
    return tuple(
        RecordedGroup(
            id=id,
            prompt=prompt,
            epoch=int(id.split(".")[0]),
            attempt=int(id.rsplit(".", 1)[1]),
            members=members,
            admitted_version=admitted,
            max_staleness=bound,
            max_in_flight=number,
            trajectories=tuple(trajectories[id]),
        )
        for id, (prompt, members, admitted, bound, number) in facts.items()
    )


def _most_in_flight(connection: sqlite3.Connection, stretches: Sequence[tuple[int, int]]) -> Mapping[str, int]:
    names = dict(connection.execute("SELECT key, id FROM groups"))
    return {names.get(key, f"of key {key}"): most for key, most in stretches}


def in_force(changes: Sequence[RecordedChange], key: int, start: float) -> float:
    """Return the bound under which the group with ledger key `key` was admitted: the value after the newest of
    `changes` up to this key, else `start`. `changes`: of one bound, ordered by key."""
    place = bisect_right(changes, key, key=lambda change: change.key)
    return changes[place - 1].after if place else start


def _trajectory(group: str, row: list[object]) -> RecordedTrajectory:
    *facts, interrupted, payload = (sys.intern(value) if isinstance(value, str) else value for value in row)
    member, _, _, _, verdict, reward, stop_reason, *_ = facts
    segments: tuple[_RecordedSegment, ...] | None = None
    writers: tuple[tuple[str, int], ...] = ()
    columns = verdict, reward, stop_reason, interrupted
    if isinstance(payload, bytes) and payload_fits(f"{group}/{member}", columns, payload):
        bulk = msgspec.msgpack.decode(payload[CHECKSUM_BYTES:])
        found = segments_of(bulk)
        every = [counted(segment) for segment in ([bulk[:3]] if found is None else found)]
        engines = [(segment[_ENGINES:] or [()])[0] for segment in every if segment[2]]
        writers = _shared(tuple((name, count) for some in engines for name, count in some))
        segments = _shared(tuple(_segment(place, segment) for place, segment in enumerate(every)))
    return RecordedTrajectory(group, *facts, segments, writers)  # type: ignore[arg-type,call-arg]  # columns of SQLite


@lru_cache(8192)
def _shared(found: Found) -> Found:
    """Return an equal object that was seen before, if any: short trajectories have many parts in common."""
    return found


def _segment(place: int, fields: list[Any]) -> _RecordedSegment:
    tokens, logprobs, stamps, *_ = fields
    parent = next(iter(fields[_PARENT:]), None)
    return _RecordedSegment(tokens, logprobs, stamps, place - 1 if parent is None else parent)


def _lines(path: Path) -> Mapping[int, _RecordedLine]:
    """Return the lines of steps in ``metrics.jsonl`` by step, of several the last; unreadable lines are skipped. Empty
    if the file is missing."""
    found: dict[int, _RecordedLine] = {}
    for line in rows_of(path):
        if not line.endswith(b"\n"):
            continue  # it is being written, or was cut off
        try:
            row = json.loads(line)
            if row["kind"] == "step":
                budget = {name: category["tokens"] for name, category in row.get("goodput", {}).items()}
                counts = row["trained_tokens"], row["masked_tokens"], row.get("generated_tokens", 0)
                found[row["step"]] = _RecordedLine(*counts, budget)
        except (KeyError, TypeError, AttributeError, *UNREADABLE_LINE):
            continue
    return found


def _step(row: tuple[object, ...]) -> RecordedStep:
    *facts, batch, published = row
    placed = json.loads(str(batch))
    members = tuple((str(group), tuple(numbers)) for group, numbers, *_ in placed)
    own = {str(group): int(oldest[0]) for group, _, *oldest in placed if oldest}
    return RecordedStep(*facts, members, published, own)  # type: ignore[arg-type,call-arg]  # columns of SQLite
