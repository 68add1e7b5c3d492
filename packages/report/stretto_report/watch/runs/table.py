"""One page of the table of trajectories: rows filtered, by a language of its own, sorted, and completed from the
ledger.

where   = clause { "and" clause }
clause  = field operator value { "|" value }          state=trained|buffered and reward>=0.5 and text~"7+"
value   = number | word | "quoted" | null             `|` with = and != only; `~` contains, for words only
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from stretto.core.errors import RefusedRequest, nearest
from stretto.core.records import Record, trajectory_id
from stretto_report.watch.index.columns import Column
from stretto_report.watch.index.files import read_ledger
from stretto_report.watch.index.trajectories import NONE, Trajectories
from stretto_report.watch.runs.questions import PromptTexts

#: Fields with numbers, and fields with words; `text` is the prompt's.
NUMBERS = ("reward", "length", "staleness", "oldest", "newest", "admitted", "step", "interrupted", "member")
WORDS = ("state", "verdict", "stop", "reason", "group", "prompt", "text")
SORTED = ("id", *NUMBERS, "state", "verdict")

_LONGEST, _MOST_CLAUSES, _MOST_VALUES = 2_000, 32, 64
_PLACE = "where"
_FIELD = re.compile(r"\s*([a-z_]+)\s*(!=|<=|>=|=|<|>|~)\s*")
_VALUE = re.compile(r'"((?:[^"\\]|\\["\\])*)"|([^\s"|]+)')
_AND = re.compile(r"\s+and\s+", re.IGNORECASE)
_OR = re.compile(r"\s*\|\s*")


class _Clause(Record, frozen=True):
    """One comparison of a filter, such as ``state=trained|buffered``. With several `values`, ``=`` means equal to one
    of them, ``!=`` equal to none. The value None (``null``) stands for a missing one. Values of a field in `NUMBERS`
    are numbers, of others texts."""

    field: str
    operator: str
    values: tuple[float | str | None, ...]


def parse_where(text: str) -> tuple[_Clause, ...]:
    """Parse a filter, and return its clauses. A row passes if it passes every clause; an empty text gives none. Raises
    RefusedRequest if the text is no filter; the message shows where."""
    if len(text) > _LONGEST:
        raise RefusedRequest(_PLACE, f"{len(text):,} characters", f"at most {_LONGEST:,} are allowed")
    if not text.strip():
        return ()
    clauses = tuple(_clauses(text))
    if len(clauses) > _MOST_CLAUSES:
        raise RefusedRequest(_PLACE, f"{len(clauses)} comparisons", f"at most {_MOST_CLAUSES} are allowed")
    return clauses


def _clauses(text: str) -> Iterator[_Clause]:
    at = 0
    while True:
        head = _FIELD.match(text, at)
        if head is None:
            raise RefusedRequest(
                _PLACE, f"{_shown(text, at)} is no comparison", "such as: state=trained and reward>=0.5"
            )
        field, operator = head.groups()
        values, at = _values(text, head.end())
        yield _clause(field, operator, values)
        if not text[at:].strip():
            return
        behind = _AND.match(text, at)
        if behind is None:
            raise RefusedRequest(_PLACE, f"{_shown(text, at)} follows {field}", "comparisons are joined by: and")
        at = behind.end()


def _values(text: str, at: int) -> tuple[list[str | None], int]:
    values: list[str | None] = []
    while True:
        found = _VALUE.match(text, at)
        if found is None:
            raise RefusedRequest(_PLACE, f"{_shown(text, at)} is no value", 'a number, a word, "a text" or null')
        quoted, bare = found.groups()
        values.append(re.sub(r"\\(.)", r"\1", quoted) if quoted is not None else None if bare == "null" else bare)
        at = found.end()
        more = _OR.match(text, at)
        if more is None:
            return values, at
        if len(values) == _MOST_VALUES:
            raise RefusedRequest(_PLACE, f"more than {_MOST_VALUES} values", "fewer")
        at = more.end()


def _clause(field: str, operator: str, values: list[str | None]) -> _Clause:
    if field not in (*NUMBERS, *WORDS):
        raise RefusedRequest(_PLACE, f"unknown field {field!r}", nearest(field, (*NUMBERS, *WORDS)))
    if len(values) > 1 and operator not in ("=", "!="):
        raise RefusedRequest(_PLACE, f"{field}{operator} with {len(values)} values", "only = and != take several")
    if field in NUMBERS:
        if operator == "~":
            raise RefusedRequest(_PLACE, f"{field}~ is not possible", f"{field} is a number: = != < <= > >=")
        return _Clause(field, operator, tuple(None if value is None else _number(field, value) for value in values))
    allowed = ("~",) if field == "text" else ("=", "!=") if field == "group" else ("=", "!=", "~")
    if operator not in allowed:
        raise RefusedRequest(_PLACE, f"{field}{operator} is not possible", f"{field} takes {' '.join(allowed)}")
    if operator == "~" and values[0] is None:
        raise RefusedRequest(_PLACE, f"{field}~null is not possible", "a text")
    return _Clause(field, operator, tuple(values))


def _number(field: str, value: str) -> float:
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    if math.isnan(number):
        raise RefusedRequest(_PLACE, f"{field} is compared with {value[:40]!r}", "a number or null")
    return number


def parse_sort(text: str) -> tuple[str, bool]:
    """Parse a sort order: a field, or ``-FIELD`` for a descending order. Return the field, and whether it is
    descending. Raises RefusedRequest if the table is not sorted by such a field."""
    name = text.removeprefix("-")
    if name not in SORTED:
        raise RefusedRequest("sort", f"unknown field {name[:40]!r}", nearest(name, SORTED))
    return name, text.startswith("-")


def _shown(text: str, at: int) -> str:
    return repr(text[at : at + 40])


PROMPT_SHOWN = 200  #: characters of a prompt in a row
_SEARCH_SECONDS = 0.1  # searching for one page, while other requests wait
_MOST_ORDERS = 4  # sort orders that are cached
_GROUPS = "SELECT key, id FROM groups WHERE key IN (SELECT value FROM json_each(?))"
_KEY_OF = "SELECT key FROM groups WHERE id = ?"
_SHOWN: tuple[str, ...] = ("group_key", "member", "state", "reason", "verdict", "reward", "length", "stop", "oldest")
_SHOWN += ("newest", "admitted", "step", "interrupted")
_COMPARED: dict[str, Callable[[Any, Any], Any]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}


class TableRow(Record, frozen=True):
    """A trajectory as a row of the table. `prompt`: first 200 characters of its text; None if that is not on record.
    `length`: number of sampled tokens. `staleness`: versions between its oldest token and the step that trained it.
    `interrupted`: how often a load of weights interrupted it. None: the trajectory has no such value."""

    id: str
    group: str
    member: int
    prompt_id: str
    prompt: str | None
    state: str
    reason: str
    verdict: str | None
    reward: float | None
    length: int
    stop_reason: str | None
    oldest_version: int | None
    newest_version: int | None
    admitted_version: int
    trained_step: int | None
    staleness: int | None
    interrupted: int


class Page(Record, frozen=True):
    """One page of the table of a run's trajectories. `matched` of the `total` rows that were read so far pass the
    filter. `rows` are at most `limit` of these, from `offset` on. `indexed`: share of the run's trajectories that were
    read. `searched`: share of the prompts that were searched for a text; a repeated request continues the search."""

    total: int
    matched: int
    offset: int
    limit: int
    indexed: float
    searched: float
    rows: list[TableRow]


class Table:
    """Table of the trajectories of the run in `folder`, as far as they were read, with the texts of `questions`. Sort
    orders are cached until the trajectories change."""

    def __init__(self, folder: Path, trajectories: Trajectories, questions: PromptTexts) -> None:
        self._folder, self._trajectories, self._questions = folder, trajectories, questions
        self._orders: dict[str, Column] = {}
        self._changes = -1

    @property
    def held(self) -> int:
        """Memory of the cached sort orders in bytes."""
        return sum(order.nbytes for order in self._orders.values())

    def page(self, where: Sequence[_Clause], sort: tuple[str, bool], offset: int, limit: int) -> Page:
        """Return at most `limit` of the rows that pass all clauses of `where`, from `offset` on. `sort`: a field of
        `SORTED`, and whether to sort descending; rows without a value come last. A search in prompts stops after 0.1 s.
        Raises StoreError if the ledger cannot be read."""
        order = self._order(*sort)
        searched = 1.0
        if where:
            chosen = np.ones(self._trajectories.table.rows, bool)
            for clause in where:
                passing, share = self._search(clause) if clause.field == "text" else (self._passes(clause), 1.0)
                chosen, searched = chosen & passing, min(searched, share)
            order = order[chosen[order]]
        return Page(
            total=self._trajectories.table.rows,
            matched=len(order),
            offset=offset,
            limit=limit,
            indexed=self._trajectories.indexed,
            searched=searched,
            rows=self.rows(order[offset : offset + limit]),
        )

    def _order(self, name: str, descending: bool) -> Column:
        if self._changes != self._trajectories.changes:
            self._orders, self._changes = {}, self._trajectories.changes
        if name == "id":
            order = np.arange(self._trajectories.table.rows)
            return order[::-1] if descending else order
        key = f"-{name}" if descending else name
        if key not in self._orders:
            while len(self._orders) >= _MOST_ORDERS:
                del self._orders[next(iter(self._orders))]
            values, absent = self._sortable(name)
            order = np.argsort(-values if descending else values, kind="stable")
            self._orders[key] = np.concatenate((order[~absent[order]], order[absent[order]])).astype(np.int32)
        return self._orders[key]

    def _sortable(self, name: str) -> tuple[Column, Column]:
        """Return the sort keys of a column (of words: ranks in the alphabet), and whether each row lacks a value; both
        [rows]."""
        if name in ("state", "verdict"):
            codes = self._trajectories.table[name]
            words = self._trajectories.words[name].all
            ranks = np.array([sorted(words).index(word) for word in words] or [0])
            return ranks[codes], codes == NONE
        values = self._numbers(name)
        return values if values.dtype.kind == "f" else values.astype(np.int64), _absent(values)

    def _numbers(self, name: str) -> Column:
        return self._trajectories.staleness if name == "staleness" else self._trajectories.table[name]

    def _passes(self, clause: _Clause) -> Column:
        match clause.field:
            case "group":
                found = np.isin(self._trajectories.table["group_key"], self._group_keys(clause.values))
                return ~found if clause.operator == "!=" else found
            case "state" | "verdict" | "stop" | "reason" | "prompt":
                return self._passes_words(clause)
            case _:
                return _passes_numbers(self._numbers(clause.field), clause)

    def _search(self, clause: _Clause) -> tuple[Column, float]:
        """Return whether the prompt of each row contains the clause's text, [rows], and the share of prompts searched
        so far. Prompts that are not searched yet count as without the text."""
        found = self._questions.search(str(clause.values[0]), _SEARCH_SECONDS)
        codes = [code for id in found.ids if (code := self._trajectories.words["prompt"].find(id)) is not None]
        return np.isin(self._trajectories.table["prompt"], codes), found.share

    def _group_keys(self, ids: Sequence[float | str | None]) -> list[int]:
        with read_ledger(self._folder) as connection:
            found = [connection.execute(_KEY_OF, (id,)).fetchone() for id in ids]
        return [row[0] for row in found if row is not None]

    def _passes_words(self, clause: _Clause) -> Column:
        words, codes = self._trajectories.words[clause.field], self._trajectories.table[clause.field]
        if clause.operator == "~":
            wanted = str(clause.values[0]).casefold()
            return np.isin(codes, [code for code, word in enumerate(words.all) if wanted in word.casefold()])
        chosen = [NONE if value is None else words.find(str(value)) for value in clause.values]
        found = np.isin(codes, [code for code in chosen if code is not None])
        return ~found if clause.operator == "!=" else found

    def rows(self, places: Column) -> list[TableRow]:
        """Return the rows at the positions `places` of the table, in their order. Raises StoreError if the ledger
        cannot be read."""
        table, words = self._trajectories.table, self._trajectories.words
        groups = self._groups(np.unique(table["group_key"][places]).tolist())
        prompts = [words["prompt"][code] or "" for code in table["prompt"][places].tolist()]
        questions = self._questions.find(prompts)
        staleness = self._trajectories.staleness[places].tolist()
        columns = zip(*(table[name][places].tolist() for name in _SHOWN), strict=True)
        found = []
        for at, (key, member, state, reason, verdict, reward, *rest) in enumerate(columns):
            length, stop, oldest, newest, admitted, step, interrupted = rest
            group = groups.get(key, "")
            question = questions.get(prompts[at])
            found.append(
                TableRow(
                    id=trajectory_id(group, member),
                    group=group,
                    member=member,
                    prompt_id=prompts[at],
                    prompt=None if question is None else question.prompt[:PROMPT_SHOWN],
                    state=words["state"][state] or "",
                    reason=words["reason"][reason] or "",
                    verdict=words["verdict"][verdict],
                    reward=None if np.isnan(reward) else reward,
                    length=length,
                    stop_reason=words["stop"][stop],
                    oldest_version=_there(oldest),
                    newest_version=_there(newest),
                    admitted_version=admitted,
                    trained_step=_there(step),
                    staleness=_there(staleness[at]),
                    interrupted=interrupted,
                )
            )
        return found

    def _groups(self, keys: list[int]) -> dict[int, str]:
        with read_ledger(self._folder) as connection:
            return dict(connection.execute(_GROUPS, (msgspec.json.encode(keys).decode(),)).fetchall())


def _absent(values: Column) -> Column:
    return np.isnan(values) if values.dtype.kind == "f" else values == NONE


def _passes_numbers(values: Column, clause: _Clause) -> Column:
    absent = _absent(values)
    if clause.operator in ("=", "!="):
        found = np.isin(values, [value for value in clause.values if value is not None]) & ~absent
        found = found | absent if None in clause.values else found
        return ~found if clause.operator == "!=" else found
    (value,) = clause.values
    if value is None:
        return np.zeros(len(values), bool)
    passing: Column = _COMPARED[clause.operator](values, value) & ~absent
    return passing


def _there(value: int) -> int | None:
    return None if value == NONE else value
