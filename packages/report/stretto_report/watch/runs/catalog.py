"""Find the runs below given folders. A request names a run by its id, never by a path."""

from __future__ import annotations

import hashlib
import heapq
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from stretto.core.machine import cache_folder
from stretto.core.records import Record
from stretto.store.ending import branch_of
from stretto.store.run_folder import Branch
from stretto_report.watch.index.columns import Cache
from stretto_report.watch.runs.run import WatchedRun

_DEPTH = 3  # levels of folders below a given one: runs/SWEEP/RUN, and RUN/branches/NNN
_MOST_RUNS = 2_000
_LOOK_SECONDS = 1.0
_LOOK_SHARE = 20  # pause between two searches for runs, as a multiple of a search's time
_MOST_HELD = 160 << 20  # bytes of the tables of all open runs; the newest stays open in any case
_NOT_ENTERED = frozenset({"checkpoints", "logs", "plots", "policy"})


class BranchLine(Record, frozen=True):
    """A run that `stretto replay` branched off another. `id`: its own; `run`: id of the other; None if that is not
    watched. The steps after `first_step`, up to `last_step`, were trained again. `changes`: changed settings, by
    key."""

    id: str
    run: str | None
    first_step: int
    last_step: int
    changes: dict[str, str]


class Catalog:
    """The runs in some folders, or up to three levels below: the newest, at most `most_runs`.

    A folder is a run if it has a ledger, or other files of a run. Links below the given folders are not followed.
    """

    def __init__(
        self,
        roots: Sequence[Path],
        cache: Path | None = None,
        *,
        most_runs: int = _MOST_RUNS,
        most_held: int = _MOST_HELD,
    ) -> None:
        """Prepare the search for runs in the folders `roots`; nothing is read yet.

        Args:
            cache: folder for caches of what was read; None: in the user's cache folder.
            most_runs: most runs that are shown; if there are more, the newest.
            most_held: most bytes of the tables of all open runs together.
        """
        self._roots = [root.resolve() for root in roots]
        self._cache = cache or cache_folder() / "watch"
        self._most_runs, self._most_held = most_runs, most_held
        self._runs: dict[str, WatchedRun] = {}
        self._look_at = float("-inf")
        self._open: list[str] = []
        self.left_out = 0  #: number of runs that are not shown, because there are too many

    def all(self) -> list[WatchedRun]:
        """Return the runs, the newest first, at most `most_runs`. The folders are searched again if the last search is
        at least a second ago (longer, if a search takes long)."""
        if (since := time.monotonic()) >= self._look_at:
            self._look()
            now = time.monotonic()
            self._look_at = now + max(_LOOK_SECONDS, _LOOK_SHARE * (now - since))
        return sorted(self._runs.values(), key=lambda run: (-(run.started or 0), run.name))

    def find(self, id: str) -> WatchedRun | None:
        """Return the run with this id, after a search for new runs if the id is not known; None if there is none."""
        if id not in self._runs:
            self._look()
        return self._runs.get(id)

    def opened(self, run: WatchedRun) -> None:
        """Note that the tables of a run are in use now: it becomes the last that `give_up` closes."""
        self._open = [id for id in self._open if id != run.id] + [run.id]

    def give_up(self) -> None:
        """Release the tables of the least recently used runs while all open runs hold more than `most_held` bytes. The
        most recently used run keeps its tables. Called after each read."""
        held = {id: run.held for id in self._open if (run := self._runs.get(id)) is not None}
        self._open = [id for id in self._open if id in held]
        while len(self._open) > 1 and sum(held.values()) > self._most_held:
            oldest = self._open.pop(0)
            if (run := self._runs.get(oldest)) is not None:
                run.close()
            del held[oldest]

    def branches(self) -> list[BranchLine]:
        """Return a line for each run found so far that `stretto replay` has made."""
        found = [(run, branch) for run in self._runs.values() if (branch := branch_of(run.folder)) is not None]
        return [
            BranchLine(run.id, self._origin(run, branch), branch.first_step, branch.last_step, branch.changes)
            for run, branch in found
        ]

    def _origin(self, run: WatchedRun, branch: Branch) -> str | None:
        for folder in (Path(branch.run), run.folder.parent.parent):
            if (id := id_of(folder)) in self._runs:
                return id
        return None

    def _look(self) -> None:
        found: dict[str, WatchedRun] = {}
        for run in self._found():
            found.setdefault(run.id, run)
        newest = heapq.nlargest(self._most_runs, found.values(), key=lambda run: run.started or 0)
        self.left_out = len(found) - len(newest)
        self._runs = {run.id: run for run in newest}

    def _found(self) -> Iterator[WatchedRun]:
        for root in self._roots:
            for folder in _run_folders(root, _DEPTH):
                id = id_of(folder)
                known = self._runs.get(id)
                yield known or WatchedRun(id, folder, _name(folder, root), Cache(self._cache / f"{id}.sqlite"))


def id_of(folder: Path) -> str:
    """Return the id of the run in a folder, given as a resolved absolute path: a digest of the path."""
    return hashlib.blake2b(str(folder).encode("utf-8", "surrogateescape"), digest_size=6).hexdigest()


def _name(folder: Path, root: Path) -> str:
    """Return the name of a run: its path relative to `root`, or the folder's name if it is `root`. Bytes that are not
    UTF-8 are replaced."""
    name = folder.name if folder == root else str(folder.relative_to(root))
    return name.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def _run_folders(folder: Path, depth: int) -> Iterator[Path]:
    if is_run(folder):
        yield folder
    if not depth:
        return
    try:
        inner = sorted(
            path for path in folder.iterdir() if path.name not in _NOT_ENTERED and not path.name.startswith(".")
        )
    except OSError:  # it cannot be read, or has gone
        return
    for path in inner:
        if not path.is_symlink() and path.is_dir():
            yield from _run_folders(path, depth - 1)


def is_run(folder: Path) -> bool:
    """Whether a folder has the files of a run: a ledger, metrics, or a recipe with a log. False if it cannot be
    read."""
    try:
        return (
            (folder / "ledger.sqlite").is_symlink()
            or any((folder / name).exists() for name in ("ledger.sqlite", "metrics.jsonl"))
            or ((folder / "recipe.toml").exists() and (folder / "log.txt").exists())
        )
    except OSError:
        return False
