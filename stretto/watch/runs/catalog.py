"""The runs below the folders that were given: looked up by an id, never by a path that a request names."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from stretto.core.machine import cache_folder
from stretto.watch.index.cache import Cache
from stretto.watch.runs.run import WatchedRun

_DEPTH = 3  # folders below the one that was given: runs/SWEEP/RUN, and RUN/branches/NNN
_MOST_RUNS = 2_000
_LOOK_SECONDS = 1.0
_MOST_OPEN = 8  # runs whose tables stay in memory
_NOT_ENTERED = frozenset({"checkpoints", "logs", "plots", "policy"})


class Catalog:
    """All runs of some folders; new ones are found when they are asked for.

    A folder is a run if it has a ledger, or was left by a run that never had one. A link below the folders given is not
    followed: what it leads to was not given.
    """

    def __init__(self, roots: Sequence[Path], cache: Path | None = None) -> None:
        """`cache`: where indexes are kept; None: the user's cache."""
        self._roots = [root.resolve() for root in roots]
        self._cache = cache or cache_folder() / "watch"
        self._runs: dict[str, WatchedRun] = {}
        self._looked = float("-inf")
        self._open: list[str] = []

    def all(self) -> list[WatchedRun]:
        """Every run, the newest first."""
        if time.monotonic() - self._looked >= _LOOK_SECONDS:
            self._look()
            self._looked = time.monotonic()
        return sorted(self._runs.values(), key=lambda run: (-(run.started or 0), run.name))

    def find(self, id: str) -> WatchedRun | None:
        """The run with this id."""
        if id not in self._runs:
            self._look()
        return self._runs.get(id)

    def opened(self, run: WatchedRun) -> None:
        """Note that the tables of a run are in use; those of the run that was not for longest are given up."""
        self._open = [id for id in self._open if id != run.id] + [run.id]
        while len(self._open) > _MOST_OPEN:
            if (oldest := self._runs.get(self._open.pop(0))) is not None:
                oldest.close()

    def _look(self) -> None:
        found: dict[str, WatchedRun] = {}
        for root in self._roots:
            for folder in _run_folders(root, _DEPTH):
                id = hashlib.blake2b(str(folder).encode("utf-8", "surrogateescape"), digest_size=6).hexdigest()
                known = self._runs.get(id)
                found[id] = known or WatchedRun(id, folder, _name(folder, root), Cache(self._cache / f"{id}.sqlite"))
                if len(found) >= _MOST_RUNS:
                    break
        self._runs = found


def _name(folder: Path, root: Path) -> str:
    """As text, whatever bytes its file system has in it."""
    name = folder.name if folder == root else str(folder.relative_to(root))
    return name.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def _run_folders(folder: Path, depth: int) -> Iterator[Path]:
    if _is_run(folder):
        yield folder
    if not depth:
        return
    try:
        inner = sorted(path for path in folder.iterdir() if path.name not in _NOT_ENTERED and not _hidden(path))
    except OSError:  # it cannot be read, or has gone
        return
    for path in inner:
        if not path.is_symlink() and path.is_dir():
            yield from _run_folders(path, depth - 1)


def _hidden(path: Path) -> bool:
    return path.name.startswith(".")


def _is_run(folder: Path) -> bool:
    try:
        return (
            (folder / "ledger.sqlite").is_symlink()
            or any((folder / name).exists() for name in ("ledger.sqlite", "metrics.jsonl"))
            or ((folder / "recipe.toml").exists() and (folder / "log.txt").exists())
        )
    except OSError:
        return False
