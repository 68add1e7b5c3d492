"""Check that a run's records hold what their format and its recipe demand. What is absent is named: a law that reads a
record finds no breach in one that is not there."""

from __future__ import annotations

import json
import sqlite3
import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

from stretto.core.errors import UNREADABLE

#: Facts of a run that has issued a group, by the first format of the ledger that has them.
_CHECKED = {"canary": 5, "data": 5, "engines": 5, "in_flight": 5, "standing": 5}
_OTHERS = {"conductor": 5, "held out": 5, "judged": 5, "model": 5, "questions": 5, "seed": 5, "selection": 5}
_OTHERS |= {"ending": 6, "sources": 6}
_METRICS, _SPANS, _HELD_OUT = "metrics.jsonl", "spans.jsonl", "held_out.jsonl"
_FILES = ("log.txt", "machine.json", _METRICS, _SPANS, "versions.json")
_SERIES = (_METRICS, _SPANS, "samples.jsonl", _HELD_OUT)
_COMPARED = ("kind", "step", "version", "samples")  # fields of rows
_SHOWN = 5

UNREADABLE_LINE = (ValueError, *UNREADABLE)  #: errors of a line that is no JSON

_JUDGED = """
    SELECT id || '/' || member, state, prompt_token_ids IS NOT NULL FROM trajectories
    JOIN groups ON groups.key = group_key LEFT JOIN payloads ON payloads.key = trajectories.key
    WHERE verdict IS NOT NULL AND state != 'buffered' AND payload IS NULL ORDER BY trajectories.key
"""
_ORPHANS = "PRAGMA foreign_key_check"
_PIECES = "SELECT key FROM partials GROUP BY key HAVING min(begin) > 0"
_CALLS = "SELECT key FROM calls GROUP BY key HAVING count(*) != max(number) + 1"
_TWICE = "SELECT count(*) FROM (SELECT 1 FROM events GROUP BY at, name, detail HAVING count(*) > 1)"
_CHANGED = "SELECT count(*) FROM events WHERE name = 'bound'"


@dataclass(frozen=True)
class _Series:
    """Content of a JSON-lines file. `rows`: of each complete line that is an object, the fields that are compared; none
    of ``spans.jsonl``. `broken`: number of the other complete lines. `torn`: the file ends within a line. `repeated`:
    number of lines equal to an earlier one."""

    rows: Sequence[Mapping[str, Any]]
    broken: int  # other complete lines
    torn: bool  # whether it ends within a line
    repeated: int  # lines that are equal to an earlier one


def rows_of(path: Path) -> Iterator[bytes]:
    """Yield the lines of a file as bytes, divided at line feeds alone (a text may hold other separators). The last one
    lacks its line feed if the file ends within a line. Nothing without a file."""
    if path.is_file():
        with path.open("rb") as file:
            yield from file


def _read_series(path: Path) -> _Series:
    """Read the compared fields of a JSON-lines file, whatever is in it: faulty and repeated lines are counted, none is
    an error. Without a file, nothing is counted."""
    rows, seen = list[Mapping[str, Any]](), set[int]()
    broken, repeated, torn = 0, 0, False
    for line in rows_of(path):
        if not line.endswith(b"\n"):
            torn = True
            continue
        repeated += hash(line) in seen
        seen.add(hash(line))
        try:
            row = json.loads(line)
        except UNREADABLE_LINE:
            row = None
        if isinstance(row, dict):
            rows.append({name: row[name] for name in _COMPARED if name in row})
        else:
            broken += 1
    return _Series(rows if path.name != _SPANS else (), broken, torn, repeated)


def missing_facts(number: int, facts: Mapping[str, Any], groups: int, steps: int) -> Iterator[str]:
    """Yield at most two notes about facts that are not on record, though each run of the ledger's format `number` has
    them: one names those that can therefore not be checked, one the others. Nothing without a group, or for a run that
    does not record its recipe. `groups`, `steps`: number of issued groups, and of steps."""
    if "recipe" not in facts or not groups:
        return
    names = sorted(name for name, first in _CHECKED.items() if number >= first and name not in facts)
    if names:
        yield f"{' and '.join(names)}: not on record, so not checked"
    others = _OTHERS | ({"totals": 5} if steps > 1 else {})
    names = sorted(name for name, first in others.items() if number >= first and name not in facts)
    if names:
        yield f"{' and '.join(names)}: not on record, as every run has"


def missing_tokens(connection: sqlite3.Connection, recipe: Path) -> tuple[list[str], list[str]]:
    """Return sentences (breaches, notes) on judged trajectories whose tokens are missing; none unless the recipe keeps
    the tokens of all. A trained one whose prompt is still there is a breach, because a run deletes both together. One
    note counts the others, which an earlier setting of `store.keep_payloads` may explain."""
    if _table(recipe, "store").get("keep_payloads") != "all":
        return [], []
    breaches, others = list[str](), 0
    for trajectory, state, with_prompt in connection.execute(_JUDGED):
        if state == "trained" and with_prompt:
            breaches.append(f"trajectory {trajectory} is trained and its tokens are missing")
        else:
            others += 1
    told = f"{others} judged trajectories have no tokens on record, and store.keep_payloads is 'all'"
    return breaches, [told] if others else []


def broken_rows(connection: sqlite3.Connection, changes: int) -> Iterator[str]:
    """Yield a sentence for each table with rows whose parent row is missing, for each trajectory that lacks its first
    pieces or a call before its last, and if the number of bound changes among the events is not `changes`, the number
    on record."""
    orphans = Counter(table for table, *_ in connection.execute(_ORPHANS))
    yield from (f"{count} rows of {table} belong to a row that is missing" for table, count in orphans.items())
    tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    for table, statement, what in (("partials", _PIECES, "pieces"), ("calls", _CALLS, "calls")):
        if table in tables:
            yield from (
                f"{what} of the trajectory with key {key} are missing" for (key,) in connection.execute(statement)
            )
    if (found := connection.execute(_CHANGED).fetchone()[0]) != changes and (found or changes):
        yield f"{found} changes of bounds are among the events, on record are {changes}"


def noted_files(folder: Path, steps: Sequence[int], running: bool) -> Iterator[str]:
    """Yield a note for each file of a run that is missing, ends within a line, or has unreadable or repeated lines, and
    for steps and evaluations that lack lines. `steps`: numbers of the published steps; no file need exist before the
    first. `running`: whether the run is still writing: its last lines may be incomplete, and its evaluations are not
    checked."""
    if steps:
        yield from (f"{name} does not exist" for name in _FILES if not (folder / name).exists())
    found = {name: _read_series(folder / name) for name in _SERIES}
    for name, series in found.items():
        if series.broken:
            yield f"{name}: lines that cannot be read: {series.broken}"
        if series.torn and not running:
            yield f"{name} ends within a line"
        if series.repeated and name in (_METRICS, _SPANS):  # a completion may be sampled twice
            yield f"{name}: lines that are there before: {series.repeated}"
    yield from _noted_metrics(found[_METRICS], steps)
    if not running:
        yield from _noted_evaluations(found[_METRICS], found[_HELD_OUT])


def noted_events(connection: sqlite3.Connection) -> Iterator[str]:
    """Yield one note if any event is in the ledger more than once (each has its own time); nothing otherwise."""
    if count := connection.execute(_TWICE).fetchone()[0]:
        yield f"events that are there more than once: {count}"


def _noted_metrics(metrics: _Series, steps: Sequence[int]) -> Iterator[str]:
    counts = Counter(step for row in metrics.rows if row.get("kind") == "step" and _is_whole(step := row.get("step")))
    if missing := [step for step in steps if not counts[step]]:
        yield f"{_METRICS} has no line of {_named(missing)}, so its tokens are not checked"
    if several := sorted(step for step, count in counts.items() if count > 1):
        yield f"{_METRICS} has several lines of {_named(several)}, of which the last is checked"


def _noted_evaluations(metrics: _Series, held_out: _Series) -> Iterator[str]:
    """Yield a note for each evaluated version whose completions are not all in ``held_out.jsonl``, or are there several
    times. Versions whose evaluations recorded no number of completions are left out; so are further sets of questions,
    whose completions are not kept."""
    wanted = Counter[int]()
    there = Counter(version for row in held_out.rows if _is_whole(version := row.get("version")))
    for row in metrics.rows:
        version, samples = row.get("version"), row.get("samples", 0)
        if row.get("kind") == "evaluation" and _is_whole(version) and _is_whole(samples):
            wanted[version] += samples
            if not samples:
                there.pop(version, None)
    yield from (
        f"{_HELD_OUT} has {there[version]} completions of version {version}, its evaluations had {wanted[version]}"
        for version in sorted(wanted.keys() | there.keys())
        if wanted[version] != there[version]
    )


def _is_whole(value: object) -> TypeGuard[int]:
    return type(value) is int


def _named(steps: Sequence[int]) -> str:
    told = ", ".join(map(str, steps[:_SHOWN])) + (f" and {len(steps) - _SHOWN} more" if len(steps) > _SHOWN else "")
    return f"step{'s' if len(steps) > 1 else ''} {told}"


def _table(recipe: Path, section: str) -> Mapping[str, Any]:
    found = tomllib.loads(recipe.read_text(encoding="utf-8")).get(section)
    return found if isinstance(found, dict) else {}
