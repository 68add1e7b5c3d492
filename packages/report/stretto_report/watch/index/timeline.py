"""Tiles of the timeline. A span at least one pixel wide is a tile of its own; narrower spans of one name that begin in
the same pixel are merged into one tile."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np

from stretto.core.events import Span
from stretto.core.records import Record
from stretto.store.series.lines import LineFollower
from stretto_report.reading.series import LinesRead, role_rank
from stretto_report.watch.index.columns import Cache, Column, GrowingColumns
from stretto_report.watch.index.trajectories import WordCodes

_PART = "spans"
_KEPT_FROM = 20_000
_FAR = 1e15  # pixels; clips absurd times
_KINDS = {"start": "f8", "end": "f8", "role": "i4", "name": "i4", "version": "i8"}
_DECODER = msgspec.json.Decoder(Span)

CATEGORIES: tuple[str, ...] = ("generate", "recompute", "load", "map", "pull", "proximal", "update", "publish")
CATEGORIES += ("checkpoint", "evaluate", "score", "other")


class _Facts(LinesRead, frozen=True):
    roles: list[str]
    names: list[str]


class Spans:
    """Spans of one run, read from ``spans.jsonl`` as they are appended. `table`: times on the clock of the run's
    machine, in seconds, and codes of `roles` and `names`, [spans]. `epoch` grows when the file was rewritten."""

    def __init__(self, path: Path, cache: Cache) -> None:
        self._follower, self._cache = LineFollower(path, _DECODER), cache
        self._reset()
        self.epoch, self._kept = 0, 0
        if (kept := cache.load(_PART, _Facts)) is not None and self.table.restore(kept[0]):
            facts = kept[1]
            facts.restore(self._follower)
            self.roles, self.names, self._kept = WordCodes(facts.roles), WordCodes(facts.names), self.table.rows

    def _reset(self) -> None:
        self.table = GrowingColumns(_KINDS)
        self.roles, self.names = WordCodes(), WordCodes()

    @property
    def fault(self) -> str | None:
        return self._follower.fault

    @property
    def begin(self) -> float:
        """Begin of the first span in seconds, on the clock of the run's machine; 0 without spans."""
        return float(self.table["start"].min()) if self.table.rows else 0.0

    @property
    def end(self) -> float:
        """Seconds from the begin of the first span to the end of the last; 0 without spans."""
        return float(self.table["end"].max()) - self.begin if self.table.rows else 0.0

    def advance(self) -> bool:
        """Read about a megabyte more; return whether there may be more. If the file was rewritten, everything is read
        again. At the end of a long file, the columns are saved to the cache. Raises StoreError if the file is no
        regular file, or cannot be read."""
        spans, again = self._follower.read_on()
        if again:
            self._reset()
            self.epoch, self._kept = self.epoch + 1, 0
        if spans:
            self.table.append(
                {
                    "start": [span.start for span in spans],
                    "end": [max(span.start, span.end) for span in spans],
                    "role": [self.roles.code(span.role) for span in spans],
                    "name": [self.names.code(span.name) for span in spans],
                    "version": [span.version for span in spans],
                }
            )
        if not self._follower.more and self.table.rows > max(_KEPT_FROM, 1.2 * self._kept):
            self.keep()
        return self._follower.more

    def keep(self) -> None:
        """Save all that was read to the cache."""
        self._kept = self.table.rows
        facts = _Facts.of(self._follower, self.roles.all, self.names.all)
        self._cache.save(_PART, {name: self.table[name] for name in self.table.names}, facts)

    def batches_taken(self) -> dict[int, float]:
        """Return when the trainer took the batch that it trained on at each version: the start of its newest span
        ``proximal``, in seconds on the clock of the spans. Empty if there is none."""
        codes = self.roles.find("trainer"), self.names.find("proximal")
        if None in codes:
            return {}
        chosen = np.flatnonzero((self.table["role"] == codes[0]) & (self.table["name"] == codes[1]))
        versions, starts = self.table["version"][chosen].tolist(), self.table["start"][chosen].tolist()
        return dict(zip(versions, starts, strict=True))


class Tiles(Record, frozen=True):
    """Tiles as columns, times in seconds since the first span of the run. A tile of several spans reaches from the
    first start to the last end. `category`: index in `CATEGORIES`; `count`: number of spans; `busy`: sum of their
    seconds; `version`: that of the tile's first span."""

    start: list[float]
    end: list[float]
    category: list[int]
    count: list[int]
    busy: list[float]
    version: list[int]
    name: list[str]


class _Lane(Record, frozen=True):
    """Tiles of one role. `machine`: name of the machine that the role runs on; "": not known."""

    role: str
    machine: str
    tiles: Tiles


def lanes(spans: Spans, machines: dict[str, str], first: float, last: float, pixels: int) -> tuple[list[_Lane], int]:
    """Return the tiles of each role between the times `first` and `last` (seconds since the first span), at a width of
    `pixels`, and the number of spans in that time. A role without spans in that time has a lane without tiles.
    `machines`: name of the machine by role; it may lack roles."""
    table, begin = spans.table, spans.begin
    inside = np.flatnonzero((table["start"] < begin + last) & (table["end"] > begin + first))
    order = inside[np.lexsort((table["start"][inside], table["role"][inside]))]
    roles = table["role"][order]
    found = []
    for code in sorted(range(len(spans.roles.all)), key=lambda code: role_rank(spans.roles.all[code])):
        role = spans.roles.all[code]
        low, high = np.searchsorted(roles, (code, code + 1))
        tiles = _tiles(spans, order[low:high], first, max(last - first, 1e-9) / pixels)
        found.append(_Lane(role, machines.get(role, ""), tiles))
    return found, len(inside)


def _tiles(spans: Spans, rows: Column, first: float, pixel: float) -> Tiles:
    """Merge the spans `rows` (indices in the table) of one role into tiles, in the order of their starts. A span of at
    least `pixel` seconds is a tile of its own; shorter ones with the same name are merged if they begin in the same
    pixel, counted from `first`, in seconds since the first span."""
    table = spans.table
    start, end = table["start"][rows] - spans.begin, table["end"][rows] - spans.begin
    name, version = table["name"][rows], table["version"][rows]
    wide = end - start >= pixel
    at = np.floor((start - first) / pixel).clip(-_FAR, _FAR).astype(np.int64)
    # Wide spans are tiles of their own; narrow ones are merged by pixel and name, even if others are in between.
    order = np.lexsort((np.arange(len(rows)), name, np.where(wide, np.arange(len(rows)), at), wide))
    at, name, wide = at[order], name[order], wide[order]
    fresh = np.ones(len(rows), bool)
    fresh[1:] = wide[1:] | wide[:-1] | (at[1:] != at[:-1]) | (name[1:] != name[:-1])
    cuts = np.flatnonzero(fresh)
    if not len(cuts):
        return Tiles([], [], [], [], [], [], [])
    counts = np.diff(cuts, append=len(rows))
    starts, ends = np.minimum.reduceat(start[order], cuts), np.maximum.reduceat(end[order], cuts)
    busy = np.add.reduceat((end - start)[order], cuts)
    shown = np.argsort(starts, kind="stable")
    names = [spans.names.all[code] for code in name[cuts][shown].tolist()]
    return Tiles(
        start=np.round(starts[shown], 6).tolist(),
        end=np.round(ends[shown], 6).tolist(),
        category=[CATEGORIES.index(one if one in CATEGORIES else "other") for one in names],
        count=counts[shown].tolist(),
        busy=np.round(busy[shown], 6).tolist(),
        version=version[order][cuts][shown].tolist(),
        name=names,
    )


class _Mark(Record, frozen=True):
    """An event on the timeline. `at`: seconds since the first span. `kind`: "step", "event" or "death" (of a role).
    `step`: None for a mark that is no step."""

    at: float
    kind: str
    text: str
    step: int | None = None


_MOST_MARKS = 2_000
_DEATH = ("ended with", "died", "lost", "killed", "does not answer")


def marks(
    spans: Spans,
    committed: Sequence[tuple[int, float]],
    events: Sequence[tuple[float, str, str]],
    first: float,
    last: float,
    most_steps: int,
) -> list[_Mark]:
    """Return the steps, and the events of the ledger, between the times `first` and `last` (seconds since the first
    span), ordered by time, at most the first 2,000. All steps are left out if there are more than `most_steps`, and all
    events if no committed step has a span, because then their clocks cannot be compared.

    Args:
        committed: steps and the Unix seconds at which their batches were committed.
        events: Unix seconds, name and detail of each.
    """
    started_at = {version + 1: at - spans.begin for version, at in spans.batches_taken().items()}
    behind = [at - started_at[step] for step, at in committed if step in started_at]
    steps = [_Mark(at, "step", f"step {step}", step) for step, at in started_at.items() if first <= at <= last]
    found = steps if len(steps) <= most_steps else []
    if behind:  # offset from Unix time to the spans' clock
        offset = float(np.median(behind))
        for at, name, detail in events:
            if first <= at - offset <= last:
                death = any(word in detail for word in _DEATH)
                found.append(_Mark(at - offset, "death" if death else "event", f"{name}: {detail}"))
    return sorted(found, key=lambda mark: mark.at)[:_MOST_MARKS]
