"""Files that are whole or absent at any moment, and forced to disk; and what a kill has left of unfinished ones:

.NAME.part   .NAME.<pid>.part   .NAME.<pid>.partial      unfinished: `NAME` does not exist, or is older
.NAME.old    .NAME.<pid>.replaced                        whole: moved aside for its successor

Leftovers are never read, and may be as large as a policy.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from stretto.core.errors import Problem, RunFolderError, naming

#: What a file system says of an operation that it does not have, as the mount of a bucket of objects says of renames.
_LACKING = frozenset({errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL, errno.EXDEV, errno.EPERM, errno.EMFILE})
_UNFINISHED = re.compile(r"\.(?P<name>.+?)(\.\d+)?\.(part|partial)")
_ASIDE = re.compile(r"\.(?P<name>.+?)(\.\d+)?\.(old|replaced)")


def is_lacking(error: OSError) -> bool:
    """Whether a file system does not have the operation; false of a disk that is full or failing."""
    return error.errno in _LACKING


@contextmanager
def whole_file(path: Path) -> Iterator[BinaryIO]:
    """A file to write that gets its name, in place of another of that name, when the block has ended and its contents
    are on disk. A block that raises leaves nothing."""
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
    """`whole_file` where a user has asked for it; a link stays, and the file that it leads to is written. An OSError of
    what the block reads is raised as it is: it names another file.

    Raises:
        RunFolderError: something else than a file is there, or it cannot be written.
    """
    path, remedy = Path(os.path.realpath(target)), "give a file in a folder of your own"
    try:
        if (there := _kind(path)) is not None:
            raise RunFolderError([Problem(str(target), f"is {there}", remedy)])
        with whole_file(path) as file:
            yield file
    except OSError as error:
        if str(error.filename) not in (str(path), str(_part(path))):
            raise
        raise RunFolderError([Problem(str(target), f"cannot be written: {error.strerror}", remedy)]) from error


def _kind(path: Path) -> str | None:
    """What is at a path in place of a file; None if a file is there, or nothing."""
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        return None
    if stat.S_ISREG(mode):
        return None
    return "a folder" if stat.S_ISDIR(mode) else "a device, a pipe or a socket"


def write_atomically(path: Path, data: bytes) -> None:
    """Write to a temporary file, force it to disk, rename it: a reader sees the old file or the new one."""
    with whole_file(path) as file:
        file.write(data)
    sync_folder(path.parent)


def identity(path: Path) -> tuple[int, int] | None:
    """Device and inode of a path; None if it does not exist or cannot be read."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


def sync_folder(path: Path) -> None:
    """Force the names in a folder to disk."""
    sync_file(path)


def sync_file(path: Path) -> None:
    """Force the contents of one file to disk, where that can be asked for; else `close` has to be enough."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if not is_lacking(error):
            raise
    finally:
        os.close(descriptor)


def sweep(folders: Iterable[Path]) -> None:
    """Remove leftovers of earlier processes from these folders; what was moved aside for a successor that never came
    gets its name back. The caller holds the run folder's lock.

    A leftover that cannot be removed stays: it does no harm.
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
