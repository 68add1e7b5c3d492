"""A run folder: where everything of one run lies, and who may write there.

recipe.toml versions.json machine.json      what was run, with what, where
kernels.json                                which kernels its roles multiply by
rewards.json                                what its reward said of itself: the level of its sandbox
log.txt logs/<role>.txt                     what was said
metrics.jsonl spans.jsonl                   what was measured
questions.jsonl                             what was asked, for the export
samples.jsonl held_out.jsonl                what was sampled: now and then while training, and by each evaluation
ledger.sqlite                               what happened to every trajectory
policy/v000012/ checkpoints/step-000040/    what was learnt
plots/*.png                                 what it looks like
lock                                        who writes here now
"""

from __future__ import annotations

import errno
import os
import re
from pathlib import Path
from types import TracebackType
from typing import Self

from stretto.core.errors import Problem, RunFolderError
from stretto.store import lock
from stretto.store.files import identity, write_atomically
from stretto.store.folder.leftovers import sweep

_INNER = ("logs", "policy", "checkpoints", "plots")
_FREE_NAMES = {lock.NAME, "log.txt", "logs"}  # what a run leaves that ended before it began
_RECIPE = "recipe.toml"
_HALF_A_RECIPE = re.compile(r"\.recipe\.toml\.\d+\.part")


class RunFolder:
    """The paths of one run. `create` and `resume` also take the lock that keeps other writers out.

    Example::

        with RunFolder.create("runs/first") as folder:
            folder.write("recipe.toml", resolved)
            ledger = Ledger(folder.ledger, StoreConfig())
    """

    def __init__(self, path: Path, held: int | None = None) -> None:
        self.path = path
        self._lock = held

    @classmethod
    def create(cls, path: str | Path) -> Self:
        """A folder for a new run.

        Raises:
            RunFolderError: it holds another run, or other files, or is in use, or cannot be written.
        """
        folder = Path(path)
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise _refused(folder, f"cannot be made: {error.strerror}", "give another folder") from error
        held = lock.acquire(folder)
        problem = _why_not_new(folder)
        if problem is not None:
            os.close(held)
            raise RunFolderError([problem])
        sweep([folder])
        for inner in _INNER:
            (folder / inner).mkdir(exist_ok=True)
        return cls(folder, held)

    @classmethod
    def resume(cls, path: str | Path) -> Self:
        """The folder of a run that ended, to go on writing; what it left half-written is removed.

        Raises:
            RunFolderError: there is no run, or it is still running.
        """
        folder = cls.open(path).path
        run = cls(folder, lock.acquire(folder))
        sweep([folder, *(folder / inner for inner in _INNER)])
        return run

    @classmethod
    def open(cls, path: str | Path) -> Self:
        """The folder of a run, to read only: a running, a finished or a dead one.

        Raises:
            RunFolderError: there is no run.
        """
        folder = Path(path)
        if not folder.is_dir():
            raise _refused(folder, "is no folder" if folder.exists() else "does not exist", "give a run folder")
        if not (folder / "ledger.sqlite").is_file():
            raise _refused(folder, "holds no run (no ledger.sqlite)", "give a folder that 'stretto train' made")
        return cls(folder)

    def is_ours(self) -> bool:
        """Whether the folder at this path is the one whose lock we hold: ours may have been moved away, and another run
        may be where it was."""
        if self._lock is None:
            return False
        held = os.fstat(self._lock)
        return identity(self.path / lock.NAME) == (held.st_dev, held.st_ino)

    def release(self) -> None:
        """Let other writers in."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def write(self, name: str, text: str) -> None:
        """Write one small file of the folder, whole or not at all.

        Raises:
            OSError: it cannot be written, or the folder is not ours any more.
        """
        if not self.is_ours():
            raise FileNotFoundError(errno.ENOENT, "the run folder was taken away", str(self.path))
        write_atomically(self.path / name, text.encode())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    @property
    def recipe(self) -> Path:
        return self.path / _RECIPE

    @property
    def log(self) -> Path:
        return self.path / "log.txt"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    def role_log(self, role: str) -> Path:
        return self.logs / f"{role}.txt"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def questions(self) -> Path:
        return self.path / "questions.jsonl"

    @property
    def samples(self) -> Path:
        return self.path / "samples.jsonl"

    @property
    def held_out(self) -> Path:
        return self.path / "held_out.jsonl"

    @property
    def spans(self) -> Path:
        return self.path / "spans.jsonl"

    @property
    def kernels(self) -> Path:
        return self.path / "kernels.json"

    @property
    def ledger(self) -> Path:
        return self.path / "ledger.sqlite"

    @property
    def policies(self) -> Path:
        return self.path / "policy"

    def policy(self, version: int) -> Path:
        """``policy/v000012``: the Hugging Face folder of version 12."""
        return self.policies / f"v{version:06d}"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def plots(self) -> Path:
        return self.path / "plots"


def _why_not_new(folder: Path) -> Problem | None:
    """A ledger makes a run. A recipe beside the folders that `create` makes is of a run that was killed before it had
    one; any other is somebody's own, and not to be written over."""
    if (folder / "ledger.sqlite").exists():
        return Problem(str(folder), "holds another run", "go on with it by --resume, or give another --run-dir")
    killed = all((folder / inner).is_dir() for inner in _INNER)
    strange = sorted(
        path.name
        for path in folder.iterdir()
        if path.name not in _FREE_NAMES
        and not (path.is_dir() and not any(path.iterdir()))
        and not (killed and (path.name == _RECIPE or _HALF_A_RECIPE.fullmatch(path.name)))
    )
    if strange:
        return Problem(str(folder), f"is not empty and holds no run ({strange[0]}, ...)", "give an empty or new folder")
    return None


def _refused(folder: Path, found: str, remedy: str) -> RunFolderError:
    return RunFolderError([Problem(str(folder), found, remedy)])
