"""Folder of a study, which only one process at a time may use.

study.toml study.json      the study file, and its digest
recipes/<digest>.toml      the resolved recipe of each run
runs/<digest>/             run folder
logs/<digest>.txt          output of `stretto train`
table.md results.json results.png
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Self

import msgspec

from stretto.core.errors import UNREADABLE, Problem, RunFolderError
from stretto.core.records import Record
from stretto.store import lock
from stretto.store.files import sweep, write_atomically
from stretto_app.study.definition import PlannedRun, Study

_KNOWN_BY, _STUDY = "study.json", "study.toml"
_INNER = ("recipes", "runs", "logs")
_UNMARKED = re.compile(r"study\.toml|\.study\.(toml|json)\.\d+\.part")  # files of a folder without its mark


class _Identity(Record, frozen=True):
    """Content of ``study.json``: name and digest of the study whose folder it is. Example:
    ``_Identity(name="staleness", digest="0f3a")``"""

    name: str
    digest: str


class StudyFolder:
    """Paths of one study, whose lock is held until `close` (context manager).

    Example: ``with StudyFolder.take(Path("studies/staleness"), study) as folder: ...``
    """

    def __init__(self, path: Path, held: int) -> None:
        self.path, self._lock = path, held
        self.table, self.results, self.plot = path / "table.md", path / "results.json", path / "results.png"

    @classmethod
    def take(cls, path: Path, study: Study) -> Self:
        """Create and lock the folder of a study, or lock an existing one of the same study to continue it.

        Raises:
            RunFolderError: it belongs to another study, holds other files, is in use, or cannot be written.
        """
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise _refused(path, f"cannot be created: {error.strerror}", "give another folder") from error
        folder = cls(path, lock.acquire(path))
        try:
            folder._recognise(study)
        except BaseException:
            folder.close()
            raise
        return folder

    def _recognise(self, study: Study) -> None:
        known_by = self.path / _KNOWN_BY
        if known_by.exists():
            try:
                known = msgspec.json.decode(known_by.read_bytes(), type=_Identity)
            except UNREADABLE as error:
                raise _refused(known_by, f"cannot be read: {error}", "give another --out") from error
            if known.digest != study.digest:
                found = f"holds the study {known.name!r} with digest {known.digest}, and this one's is {study.digest}"
                raise _refused(self.path, found, f"compare with {self.path / 'study.toml'}, or give another --out")
            return
        if strange := self._strange():
            found = f"is not empty and holds no study ({strange[0]}, ...)"
            raise _refused(self.path, found, "give an empty or new folder")
        sweep([self.path])
        for inner in _INNER:
            (self.path / inner).mkdir(exist_ok=True)
        write_atomically(self.path / _STUDY, study.text.encode())
        write_atomically(known_by, msgspec.json.encode(_Identity(study.name, study.digest)))

    def _strange(self) -> list[str]:
        """Sorted names of the files in the folder that no study has left there. Empty folders, and ``study.toml``
        beside them, were left by a study that was killed before it had ``study.json``."""
        killed = all((self.path / inner).is_dir() for inner in _INNER)
        return sorted(
            file.name
            for file in self.path.iterdir()
            if file.name != lock.NAME
            and not (file.is_dir() and not any(file.iterdir()))
            and not (killed and _UNMARKED.fullmatch(file.name))
        )

    def recipe(self, run: PlannedRun) -> Path:
        """Path of the run's recipe file. The file is written if it is missing."""
        path = self.path / "recipes" / f"{run.digest}.toml"
        if not path.exists():
            write_atomically(path, run.text.encode())
        return path

    def run(self, run: PlannedRun) -> Path:
        return self.path / "runs" / run.digest

    def log(self, run: PlannedRun) -> Path:
        return self.path / "logs" / f"{run.digest}.txt"

    def close(self) -> None:
        """Release the lock."""
        os.close(self._lock)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _refused(path: Path, found: str, remedy: str) -> RunFolderError:
    return RunFolderError([Problem(str(path), found, remedy)])
