"""The lock of a folder: one process at a time may write. The kernel releases it when the process dies, by which a
temporary folder that it left is known."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import socket
import tempfile
import time
from pathlib import Path

from stretto.core.errors import Problem, RunFolderError

NAME = "lock"
#: The lock file of a `temporary_folder`. A run folder has none, wherever it lies.
TEMPORARY = "temporary.lock"

#: `is_held` takes a shared lock for an instant, so a writer tries several times before it reports another writer.
_TRIES, _PAUSE = 25, 0.01

_LONGEST_ROOT = 70  # bytes; the path of a Unix socket has at most 107
_PREFIX = "stretto-"


def acquire(folder: Path, name: str = NAME) -> int:
    """Lock the folder by its file `name`, which gets the name of this process; returns a file descriptor. Closing the
    descriptor releases the lock. A held lock is tried again for a quarter of a second.

    Raises:
        RunFolderError: another process holds the lock, the folder cannot be written, or its file system has no locks.
    """
    try:
        lock = os.open(folder / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise unwritable(folder, error) from error
    try:
        _take(lock)
    except BlockingIOError as error:
        owner = os.read(lock, 200)
        os.close(lock)
        raise _in_use(folder, owner) from error
    except OSError as error:
        os.close(lock)
        found, remedy = f"cannot be locked: {error.strerror}", "give a folder on a file system that has locks"
        raise RunFolderError([Problem(str(folder), found, remedy)]) from error
    try:
        os.ftruncate(lock, 0)
        os.pwrite(lock, f"process {os.getpid()}".encode() + _here(), 0)
    except OSError as error:
        os.close(lock)
        raise unwritable(folder, error) from error
    return lock


def _in_use(folder: Path, owner: bytes) -> RunFolderError:
    found = f"is in use by {owner.decode(errors='replace').strip() or 'another process'}"
    return RunFolderError([Problem(str(folder), found, "wait for it, or choose another folder")])


def check_free(folder: Path) -> None:
    """Raise RunFolderError if a process holds the lock of the folder now; nothing is written."""
    if is_held(folder):
        raise _in_use(folder, (folder / NAME).read_bytes()[:200])


def unwritable(folder: Path, error: OSError) -> RunFolderError:
    """The error for a folder in which a file could not be opened or written."""
    known = {errno.EMFILE: "start with a higher ulimit -n", errno.ENOSPC: "make room on its disk"}
    remedy = known.get(error.errno or 0, "give a folder of your own")
    return RunFolderError([Problem(str(folder), f"cannot be written: {error.strerror}", remedy)])


def is_held(folder: Path, name: str = NAME) -> bool:
    """Whether a process holds the lock of the folder now; False if there is no lock file, or its file system has no
    locks, True if it cannot be opened."""
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK  # any folder may be asked about: the file may be a pipe
    try:
        lock = os.open(folder / name, flags)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    else:
        return False
    finally:
        os.close(lock)


def _take(lock: int) -> None:
    for _ in range(_TRIES - 1):
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(_PAUSE)
        else:
            return
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)


def temporary_folder() -> tuple[Path, int]:
    """Create and lock a temporary folder, whose path is short enough for Unix sockets in it; returns the folder, and
    the descriptor of the lock, for `let_go`. Folders that killed processes of this user and machine left are removed
    first.

    Raises:
        RunFolderError: the folder cannot be locked; it is then removed.
    """
    root = Path(tempfile.gettempdir())
    root = root if len(os.fsencode(root)) < _LONGEST_ROOT else Path("/tmp")
    with contextlib.suppress(OSError):  # the next one may remove them
        for left in root.glob(f"{_PREFIX}*"):
            if left.lstat().st_uid == os.geteuid() and not is_held(left, TEMPORARY) and _is_of_this_machine(left):
                shutil.rmtree(left, ignore_errors=True)
    folder = Path(tempfile.mkdtemp(prefix=f".{_PREFIX}", dir=root))  # other processes do not look at it before its lock
    try:
        held = acquire(folder, TEMPORARY)
    except BaseException:
        (folder / TEMPORARY).unlink(missing_ok=True)
        folder.rmdir()  # unlike `rmtree`, this needs no descriptor
        raise
    return folder.rename(root / folder.name.removeprefix(".")), held


def _is_of_this_machine(folder: Path) -> bool:
    """Whether a `temporary_folder` was locked here: locks of a shared disk may be of one machine alone. False if its
    lock is removed meanwhile."""
    with contextlib.suppress(OSError):
        return (folder / TEMPORARY).read_bytes().endswith(_here())
    return False


def _here() -> bytes:
    return f" on {socket.gethostname()}\n".encode()


def let_go(folder: Path, held: int, *, kept: bool = False) -> None:
    """Remove a `temporary_folder` and close `held`, the descriptor of its lock. `kept`: remove only the lock, and leave
    the folder to the user."""
    if kept:
        (folder / TEMPORARY).unlink(missing_ok=True)
    else:
        shutil.rmtree(folder, ignore_errors=True)
    os.close(held)
