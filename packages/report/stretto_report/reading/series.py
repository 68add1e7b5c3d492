"""Helpers of readers of run folders: the spans of roles, positions in files of lines, tables by dotted key."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

import msgspec

from stretto.core.events import Span
from stretto.core.records import Record
from stretto.store.series.lines import LineFollower, iterate_lines, read_lines

_SPANS = msgspec.json.Decoder(Span)


def read_spans(path: Path) -> list[Span]:
    """Read all complete lines of the file ``spans.jsonl`` at `path`, in the order in which they were written. Empty if
    there is no file. Raises StoreError if a complete line cannot be read."""
    return read_lines(path, _SPANS)


def iterate_spans(path: Path) -> Iterator[Span]:
    """Read the complete lines of the file ``spans.jsonl`` at `path` one at a time, in the order in which they were
    written. Nothing if there is no file.

    Raises (while it is iterated):
        StoreError: a complete line cannot be read.
    """
    return iterate_lines(path, _SPANS)


class LinesRead(Record, frozen=True):
    """Position in a file that is read line by line, to continue there in another process: `of` copies the fields from a
    `LineFollower`, `restore` sets them on one."""

    identity: tuple[int, int, str]
    offset: int
    number: int

    @classmethod
    def of(cls, lines: LineFollower[Any], *further: Any) -> Self:
        """Return the position of `lines`. `further`: values of the fields that a subclass adds, in order."""
        return cls(lines.identity, lines.offset, lines.number, *further)

    def restore(self, lines: LineFollower[Any]) -> None:
        lines.identity, lines.offset, lines.number = self.identity, self.offset, self.number


def flat(recipe: dict[str, Any], before: str = "") -> dict[str, Any]:
    """Return the values of nested tables by dotted key, each key after the prefix `before`.

    >>> flat({"seed": 1, "trainer": {"steps": 600}})
    {'seed': 1, 'trainer.steps': 600}
    """
    found: dict[str, Any] = {}
    for key, value in recipe.items():
        found |= flat(value, f"{before}{key}.") if isinstance(value, dict) else {f"{before}{key}": value}
    return found


def role_rank(role: str) -> tuple[int, str, int]:
    """Return a sort key for the name of a role: conductor, trainer, engines, rewards, then others by name; engine-10
    after engine-9."""
    kind, _, number = role.rpartition("-")
    if not number.isdecimal():
        kind, number = role, "0"
    place = {"conductor": 0, "trainer": 1, "engine": 2, "rewards": 3}.get(kind, 4)
    return place, kind, int(number)
