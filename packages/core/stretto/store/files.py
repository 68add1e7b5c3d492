"""Writing files that are complete or absent at any moment, and synced to disk. A kill may leave temporary files;
`sweep` removes them:

.NAME.part   .NAME.<pid>.part   .NAME.<pid>.partial      unfinished: `NAME` does not exist, or is older
.NAME.old    .NAME.<pid>.replaced                        complete: moved aside for its successor

Leftovers are never read, and may be as large as a policy.
"""

from __future__ import annotations

import os
import re
import shutil
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from stretto.core.errors import Problem, RunFolderError, folder_fault, naming
from stretto.core.machine import sync

#: Names in a run folder that are the run's record: `users_file` never replaces one, nor a file below one.
RECORDS = frozenset({"best.json", "branch.json", "gateway", "join.json", "kernels.json", "lock", "machine.json"})
RECORDS |= {"ledger.sqlite", "ledger.sqlite-journal", "ledger.sqlite-shm", "ledger.sqlite-wal", "log.txt"}
RECORDS |= {"held_out.jsonl", "metrics.jsonl", "questions.jsonl", "samples.jsonl", "spans.jsonl"}
RECORDS |= {"alarms.bin", "prediction.json", "recipe.toml", "rewards.json", "versions.json"}
RECORDS |= {"checkpoints", "logs", "outlets", "policy", "tokens"}
_OF_A_RUN = ("ledger.sqlite", "lock")  # a folder with one of these holds a run
_VARIABLE = re.compile(r"\$([A-Za-z_]\w*|\{[A-Za-z_]\w*\})", re.ASCII)
_UNFINISHED = re.compile(r"\.(?P<name>.+?)(\.\d+)?\.(part|partial)")
_ASIDE = re.compile(r"\.(?P<name>.+?)(\.\d+)?\.(old|replaced)")


def unreplaced(text: str, path: Path) -> str:
    """Return what to do about a path in which only a shell would have replaced a variable, or the ``~`` that it begins
    with; "" for any other, and if there is a file of that name. `text`: as it was given; `path`: where that leads."""
    first = Path(text).parts[0] if text.startswith("~") else next(filter(_VARIABLE.search, Path(text).parts), "")
    if not first or os.path.lexists(path):
        return ""
    meant = os.path.expanduser(os.path.expandvars(text))
    return f"only a shell replaces {first}: write {meant if meant != text else 'the path itself'}"


@contextmanager
def whole_file(path: Path) -> Iterator[BinaryIO]:
    """Context manager: a temporary file, open for writing. At the end of the block it is synced to disk and renamed to
    `path`, replacing an older file; the caller syncs the folder. If the block raises, nothing has changed. An OSError
    names `path`."""
    temporary = _part(path)
    try:
        with naming(path), temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _part(path: Path) -> Path:
    return path.with_name(f".{path.name}.{os.getpid()}.part")


@contextmanager
def users_file(target: Path) -> Iterator[BinaryIO]:
    """Context manager: a temporary file, open for writing, for a path that a user has given; a link is followed. At the
    end of the block it is synced to disk and renamed to the path, replacing an older file. If the block raises, nothing
    has changed. An OSError of the block that concerns another file is raised unchanged.

    Raises:
        RunFolderError: the path exists and is no regular file, is a record of a run (`RECORDS`), or cannot be written.
    """
    path, remedy = Path(os.path.realpath(target)), "give a file in a folder of your own"
    try:
        if (there := _kind(path) or _record(path)) is not None:
            raise RunFolderError([Problem(str(target), f"is {there}", remedy)])
        with whole_file(path) as file:
            yield file
    except OSError as error:
        if str(error.filename) not in (str(path), str(_part(path))):
            raise
        if fault := folder_fault(path.parent):
            remedy = f"{path.parent}: {fault}"
        raise RunFolderError([Problem(str(target), f"cannot be written: {error.strerror}", remedy)]) from error


def _kind(path: Path) -> str | None:
    """Kind of a path that is no regular file ("a folder"); None if it is one or does not exist."""
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        return None
    if stat.S_ISREG(mode):
        return None
    return "a folder" if stat.S_ISDIR(mode) else "a device, a pipe or a socket"


def _record(path: Path) -> str | None:
    """Return what a path is to the run in whose folder it is ("a record of the run RUN"); None if it is no record of a
    run."""
    for folder in path.parents:
        if path.relative_to(folder).parts[0] in RECORDS and any((folder / name).exists() for name in _OF_A_RUN):
            return f"a record of the run {folder}"
    return None


def write_atomically(path: Path, data: bytes | bytearray) -> None:
    """Write `data` to the file `path`, replacing an older one, and sync it to disk. Readers see the old file or the new
    one, never a part. Raises OSError if it cannot be written; the old file then stays."""
    with whole_file(path) as file:
        file.write(data)
    sync(path.parent)


def make_private(path: Path, *beside: Path) -> None:
    """Create a file for prompts or secrets that only its owner may read, or take the rights of others from an existing
    one. `beside`: files that get the same rights if they exist."""
    os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
    for file in (path, *beside):
        if file.exists() and file.stat().st_mode & 0o077:
            file.chmod(0o600)


def identity(path: Path) -> tuple[int, int] | None:
    """Device and inode of a path; None if it does not exist or cannot be read."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


def sweep(folders: Iterable[Path]) -> None:
    """Remove the temporary files that killed processes have left in these folders. A file that was moved aside gets its
    name back if its successor does not exist. The caller must hold the run folder's lock.

    A leftover that cannot be removed stays; it does no harm.
    """
    for folder in folders:
        with suppress(OSError):
            for path in list(folder.iterdir()):
                aside = _ASIDE.fullmatch(path.name)
                with suppress(OSError):
                    if aside and not (folder / aside["name"]).exists():
                        path.rename(folder / aside["name"])
                    elif aside or _UNFINISHED.fullmatch(path.name):
                        _remove(path)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
