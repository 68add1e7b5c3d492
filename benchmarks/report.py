"""Output of benchmarks: a table for people, and JSON that names the machine."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Any

import msgspec

from stretto.store.files import write_atomically
from stretto.store.run_folder import library_versions, machine

RESULTS = Path(__file__).resolve().parent / "results"

_GAP = "  "


class Table:
    """Rows under headings, with numbers aligned right. `show` prints all rows; `show_last` prints the newest row at
    once.

    >>> table = Table("policy", "step time")
    >>> table.add("train", 1.0); table.add("wait", 3.8125)
    >>> table.show()
    policy  step time
    train         1.0
    wait       3.8125
    """

    def __init__(self, *columns: str) -> None:
        self._columns = columns
        self._rows: list[tuple[str, ...]] = []
        self._numeric: list[bool] = [True] * len(columns)
        self._shown = 0

    def add(self, *cells: object) -> None:
        """Add a row, with a cell for every column.

        Raises:
            ValueError: there are more or fewer cells than columns.
        """
        if len(cells) != len(self._columns):
            raise ValueError(f"{len(cells)} cells for {len(self._columns)} columns")
        row = tuple(map(str, cells))
        self._numeric = [kept and _is_number(cell) for kept, cell in zip(self._numeric, row, strict=True)]
        self._rows.append(row)

    def show(self) -> None:
        """Print the headings and all rows."""
        widths = self._widths()
        for row in (self._columns, *self._rows):
            print(self._line(row, widths))

    def show_last(self) -> None:
        """Print the newest row, after the headings if it is the first. Columns are as wide as the rows so far need."""
        widths = self._widths()
        if not self._shown:
            print(self._line(self._columns, widths))
        print(self._line(self._rows[-1], widths), flush=True)
        self._shown = len(self._rows)

    def _widths(self) -> list[int]:
        return [max(map(len, column)) for column in zip(self._columns, *self._rows, strict=True)]

    def _line(self, cells: tuple[str, ...], widths: list[int]) -> str:
        padded = (
            cell.rjust(width) if numeric else cell.ljust(width)
            for cell, width, numeric in zip(cells, widths, self._numeric, strict=True)
        )
        return _GAP.join(padded).rstrip()


def _is_number(cell: str) -> bool:
    return not cell or cell[0].isdecimal() or cell[0] in "-+" or cell == "inf"


def save(name: str, results: object) -> Path:
    """Write ``benchmarks/results/<name>.json``: the results with the date, the machine and the library versions.

    Results of another processor are kept beside it, as ``<name>.<processor>.json``.
    """
    content: dict[str, Any] = {
        "benchmark": name,
        "measured": time.strftime("%Y-%m-%d", time.gmtime()),
        "machine": machine(),
        "versions": library_versions(),
        "results": results,
    }
    RESULTS.mkdir(parents=True, exist_ok=True)
    path = RESULTS / f"{name}.json"
    if path.exists() and (before := _processor(path)) != _slug(machine().processor):
        path.replace(RESULTS / f"{name}.{before}.json")
    write_atomically(path, msgspec.json.format(msgspec.json.encode(content), indent=1) + b"\n")
    (RESULTS / f"{name}.{_slug(machine().processor)}.json").unlink(missing_ok=True)
    print(f"written to {path.relative_to(RESULTS.parent.parent)}")
    return path


def earlier(name: str) -> dict[str, Any]:
    """Results of `name` that were measured on this machine's processor, by their names; empty if there are none."""
    path = RESULTS / f"{name}.json"
    if not path.exists() or _processor(path) != _slug(machine().processor):
        path = RESULTS / f"{name}.{_slug(machine().processor)}.json"
    found: dict[str, Any] = json.loads(path.read_text())["results"] if path.exists() else {}
    return found


def _processor(path: Path) -> str:
    """Slug of the processor on which a result was measured."""
    return _slug(json.loads(path.read_text())["machine"]["processor"])


def _slug(processor: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", processor.lower().replace("(r)", "")).strip("-")
