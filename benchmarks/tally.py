"""A campaign in parts: each part is added, with its machine, to a committed file.

A part is a range of numbers (seeds, runs, minutes) that no other part of the file contains, so that nothing counts
twice. Parts may come from several machines and days; `total` holds their sum.
"""

from __future__ import annotations

import fcntl
import os
import subprocess
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from stretto.store.files import write_atomically
from stretto.store.run_folder import Machine, machine

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Part:
    """Results of one part.

    Attributes:
        code: the commit, with a "+" where the tree had changes.
        load: load average of the machine at the end of the part.
        counts: numbers that are added up over all parts.
        seen: results that are not added up.
        problems: everything that went wrong; ideally none.
    """

    day: str
    machine: Machine
    code: str
    first: int
    last: int
    seconds: float
    load: float
    counts: dict[str, int]
    problems: tuple[str, ...] = ()
    seen: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Tally:
    """All parts of a campaign so far."""

    benchmark: str
    total: dict[str, int] = field(default_factory=dict)
    problems: int = 0
    parts: tuple[Part, ...] = ()

    def plus(self, part: Part) -> Tally:
        """Return the tally with a further part.

        Raises:
            ValueError: some of its numbers are counted already.
        """
        for other in self.parts:
            if part.first <= other.last and other.first <= part.last:
                raise ValueError(f"{part.first} to {part.last}: {other.first} to {other.last} are counted already")
        parts = tuple(sorted((*self.parts, part), key=lambda one: one.first))
        total = Counter[str]()
        for one in parts:
            total.update(one.counts)
        return Tally(self.benchmark, dict(total), sum(len(one.problems) for one in parts), parts)

    @property
    def next(self) -> int:
        """First number after all parts."""
        return 1 + max((part.last for part in self.parts), default=0)


def read(path: Path, benchmark: str) -> Tally:
    """Tally in a file; an empty one if there is no file yet."""
    return msgspec.json.decode(path.read_bytes(), type=Tally) if path.exists() else Tally(benchmark)


def add(path: Path, benchmark: str, part: Part) -> Tally:
    """Add a part to a file, also while another process adds one, and return the new tally.

    Raises:
        ValueError: some of its numbers are counted already.
    """
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        tally = read(path, benchmark).plus(part)
        write_atomically(path, msgspec.json.format(msgspec.json.encode(tally), indent=1) + b"\n")
    finally:
        os.close(folder)
    return tally


def measured(
    first: int,
    last: int,
    began: float,
    counts: dict[str, int],
    problems: Sequence[str],
    seen: dict[str, Any] | None = None,
) -> Part:
    """A part that ends now, on this machine; `began` is a time of `time.monotonic`. `first`, `last`: the numbers that
    it covers. `seen`: results that are not added up; None: none."""
    return Part(
        day=time.strftime("%Y-%m-%d", time.gmtime()),
        machine=machine(),
        code=_code(),
        first=first,
        last=last,
        seconds=round(time.monotonic() - began, 1),
        load=round(os.getloadavg()[0], 1),
        counts=counts,
        problems=tuple(problems),
        seen=seen or {},
    )


def _code() -> str:
    """The value of STRETTO_COMMIT if it is set, for copies that are no repository; else the commit of the code, with a
    "+" if files have changed since."""
    if given := os.environ.get("STRETTO_COMMIT"):
        return given
    told = subprocess.run(
        ["git", "describe", "--always", "--dirty=+", "--exclude=*"], cwd=ROOT, capture_output=True, text=True
    )
    return told.stdout.strip()
