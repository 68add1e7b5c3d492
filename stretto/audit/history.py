"""The records of a run as a checker needs them, read from SQLite directly: no line here is shared with the writers."""

from __future__ import annotations

import json
import math
import os
import sqlite3
import tomllib
from collections.abc import Iterator, Mapping, Set
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from stretto.audit.checksums import CHECKSUM_BYTES, FIELDS, broken_checksums, broken_files, payload_fits
from stretto.core.errors import Problem, RunFolderError, StoreError

FORMATS = (2, 3)  #: that can be checked
_FIRST_SEALED = 3

#: What a run may change when it is resumed: sections, and keys of sections.
MAY_CHANGE = frozenset({"evaluation", "deadlines", "store"})
MAY_CHANGE_OF = {"trainer": frozenset({"steps", "ranks", "keep_versions", "checkpoint_every"})}

_ANSWERS = """
    SELECT groups.id, prompt_id, members, admitted_version, trajectories.key, member, state, reason, trained_step,
        verdict, reward, stop_reason, tokens, oldest_version, newest_version, interrupted, payload
    FROM groups LEFT JOIN trajectories ON group_key = groups.key LEFT JOIN payloads ON payloads.key = trajectories.key
    ORDER BY groups.key, member
"""
_STEPS = (
    "SELECT step, version, oldest_trainable, trajectories, trained_tokens, masked_tokens, batch, published_version"
    " FROM steps ORDER BY rowid"
)


@dataclass(frozen=True)
class RecordedTrajectory:
    """One trajectory. `versions` is None where its tokens were not kept, or are not those that were written."""

    id: str
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
    versions: tuple[int, ...] | None
    lengths: tuple[int, int] | None  # of token ids and of log-probabilities


@dataclass(frozen=True)
class RecordedGroup:
    """One asking of a prompt, ``epoch.prompt.attempt``, in the order of issue."""

    id: str
    prompt: str
    epoch: int
    attempt: int
    members: int
    admitted_version: int
    answers: tuple[RecordedTrajectory, ...]


@dataclass(frozen=True)
class RecordedStep:
    """One training step: `batch` is its groups with the members that were trained on, in order."""

    step: int
    version: int
    oldest_trainable: int
    answers: int
    trained_tokens: int
    masked_tokens: int
    batch: tuple[tuple[str, tuple[int, ...]], ...]
    published_version: int | None


@dataclass(frozen=True)
class Bounds:
    """What the recipe promises."""

    batch_size: int
    group_size: int
    min_group_size: int
    max_staleness: float
    beyond_bound: str
    max_attempts: int


@dataclass(frozen=True)
class History:
    """Everything that a run has put on record about its trajectories."""

    groups: tuple[RecordedGroup, ...]
    steps: tuple[RecordedStep, ...]
    bounds: Bounds
    given_back: tuple[tuple[int, str, int], ...]  # epoch, prompt, attempt that are to be asked before anything new
    position: tuple[int, int] | None  # epoch, and how many of its prompts were drawn
    policies: tuple[int, ...]
    damage: tuple[str, ...]  # what SQLite says of the file, if it is not whole
    broken_checksums: tuple[str, ...]
    broken_start: tuple[str, ...]  # files that the run starts from, and are not what they were
    edited: tuple[str, ...]  # keys of the recipe that are not what is on record
    notes: tuple[str, ...]  # what cannot be judged

    @property
    def answers(self) -> tuple[RecordedTrajectory, ...]:
        return tuple(answer for group in self.groups for answer in group.answers)


def read_history(folder: Path) -> History:
    """Read a run folder.

    Raises:
        RunFolderError: there is no run.
        StoreError: the ledger is of another format, or it, or the recipe, cannot be read at all.
    """
    path = folder / "ledger.sqlite"
    if not path.is_file():
        found = "holds no run (no ledger.sqlite)" if folder.is_dir() else "does not exist"
        raise RunFolderError([Problem(str(folder), found, "give a run folder")])
    policies = _policies(folder)  # before the ledger: a run that goes on writes the batch down first
    bounds = _bounds(folder / "recipe.toml")
    try:
        with closing(sqlite3.connect(_address(path), uri=True)) as connection:
            (found,) = connection.execute("PRAGMA user_version").fetchone()
            if found not in FORMATS:
                can = " and ".join(map(str, FORMATS))
                raise StoreError(f"{path}: has format {found}, this version of stretto checks formats {can}")
            connection.execute("BEGIN")
            return _history(connection, found, folder, bounds, policies)
    except (sqlite3.Error, msgspec.MsgspecError, ValueError) as error:
        raise StoreError(f"{path}: cannot be read: {error}") from error
    except (KeyError, TypeError) as error:
        raise StoreError(f"{path}: cannot be read: the position or a batch is not what was written: {error}") from error


def _address(path: Path) -> str:
    """To read only. In a folder that cannot be written there is no room for the index of a log; without a log it needs
    none."""
    log, index = path.with_name(f"{path.name}-wal"), path.with_name(f"{path.name}-shm")
    bare = not index.exists() and not (log.exists() and log.stat().st_size)
    how = "mode=ro&immutable=1" if bare and not os.access(path.parent, os.W_OK) else "mode=ro"
    return f"{path.absolute().as_uri()}?{how}"


def _policies(folder: Path) -> tuple[int, ...]:
    """The versions whose policy is kept."""
    kept = [path.name[1:] for path in (folder / "policy").glob("v*") if path.is_dir()]
    return tuple(sorted(int(version) for version in kept if version.isdecimal()))


def _history(
    connection: sqlite3.Connection, number: int, folder: Path, bounds: Bounds, policies: tuple[int, ...]
) -> History:
    damage = tuple(text for (text,) in connection.execute("PRAGMA integrity_check").fetchall() if text != "ok")
    facts = {name: json.loads(value) for name, value in connection.execute("SELECT name, value FROM meta")}
    position = facts["standing"]["position"] if "standing" in facts else None
    given_back = position["given_back"] if position else []
    return History(
        groups=_groups(connection),
        steps=tuple(_step(row) for row in connection.execute(_STEPS)),
        bounds=bounds,
        given_back=tuple((again["epoch"], again["prompt_id"], again["attempt"]) for again in given_back),
        position=(position["epoch"], position["index"]) if position else None,
        policies=policies,
        damage=damage,
        broken_checksums=tuple(broken_checksums(connection, number)),
        broken_start=tuple(broken_files(folder, _kept(folder, facts.get("start", {})))),
        edited=tuple(_edited(folder, facts.get("recipe"))),
        notes=tuple(_not_judged(folder, number, facts)),
    )


def _kept(folder: Path, start: Mapping[str, Any]) -> Mapping[str, Any]:
    """The folders of a run's start that are there: a run that has just begun has no policy yet, and a reference may lie
    on another machine."""
    return {name: files for name, files in start.items() if (folder / name).exists()}


def _not_judged(folder: Path, number: int, facts: Mapping[str, Any]) -> Iterator[str]:
    if number < _FIRST_SEALED:
        yield f"the ledger has format {number}: nothing of its recipe and of the policy that it starts from was sealed"
    elif missing := {"recipe", "start"} - facts.keys():
        yield f"{' and '.join(sorted(missing))}: not on record, nothing was sealed"
    start = facts.get("start", {})
    yield from (f"{folder / name} is not there, and not judged" for name in start.keys() - _kept(folder, start).keys())


def _edited(folder: Path, recorded: str | None) -> Iterator[str]:
    """A sentence for each key of the recipe that a resumed run may not change and that differs from what is on
    record."""
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


def _groups(connection: sqlite3.Connection) -> tuple[RecordedGroup, ...]:
    facts: dict[str, tuple[str, int, int]] = {}
    answers: dict[str, list[RecordedTrajectory]] = {}
    for group, prompt, members, admitted, key, *rest in connection.execute(_ANSWERS):
        facts[group] = (prompt, members, admitted)
        answers.setdefault(group, []).extend([_answer(group, rest)] if key is not None else [])
    return tuple(
        RecordedGroup(
            id=id,
            prompt=prompt,
            epoch=int(id.split(".")[0]),
            attempt=int(id.rsplit(".", 1)[1]),
            members=members,
            admitted_version=admitted,
            answers=tuple(answers[id]),
        )
        for id, (prompt, members, admitted) in facts.items()
    )


def _answer(group: str, row: list[object]) -> RecordedTrajectory:
    *facts, interrupted, payload = row
    member, _, _, _, verdict, reward, stop_reason, *_ = facts
    id = f"{group}/{member}"
    versions, lengths = None, None
    if isinstance(payload, bytes) and payload_fits(id, (verdict, reward, stop_reason, interrupted), payload):
        bulk = msgspec.msgpack.decode(payload[CHECKSUM_BYTES:])
        segments = [segment for segment in bulk[0] if segment[2]] if len(bulk) == FIELDS else [bulk]
        versions = tuple(version for segment in segments for version in segment[2])
        lengths = sum(len(segment[0]) for segment in segments), sum(len(segment[1]) for segment in segments)
    return RecordedTrajectory(id, group, *facts, versions, lengths)  # type: ignore[arg-type,call-arg]  # columns of SQLite


def _step(row: tuple[object, ...]) -> RecordedStep:
    *facts, batch, published = row
    members = tuple((str(group), tuple(numbers)) for group, numbers in json.loads(str(batch)))
    return RecordedStep(*facts, members, published)  # type: ignore[arg-type,call-arg]  # columns of SQLite


def _bounds(recipe: Path) -> Bounds:
    """Raises StoreError: without the recipe nobody knows what was promised."""
    try:
        rollout = tomllib.loads(recipe.read_text(encoding="utf-8"))["rollout"]
        number = {name: float(value) for name, value in rollout.items() if isinstance(value, (int, float))}
        return Bounds(
            batch_size=int(number["batch_size"]),
            group_size=int(number["group_size"]),
            min_group_size=int(number["min_group_size"]),
            max_staleness=number.get("max_staleness", math.inf),
            beyond_bound=str(rollout["beyond_bound"]),
            max_attempts=int(number["max_attempts"]),
        )
    except OSError as error:
        raise StoreError(f"{recipe}: cannot be read: {error.strerror or error}") from error
    except KeyError as error:
        raise StoreError(f"{recipe}: has no {error.args[0]}; bring the run's own recipe back") from error
    except (ValueError, TypeError, AttributeError) as error:
        raise StoreError(f"{recipe}: cannot be read: {error}; bring the run's own recipe back") from error
