"""Temporary folders of an agent, locked while it lives; later agents remove unlocked ones. Agents of one machine fetch
in turn, and link files that another agent has.

A sweeper process removes the folders when the agent dies. If it is killed too (with the whole control group, say), they
stay until the next agent removes them.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from stretto.weights.folder import SHARED, own, prefix, remove_abandoned, shared_folder
from stretto_cluster.messages import RunTerms

_LOOK_SECONDS = 0.05
_FOLDER, _MEMORY = "stretto-machine-", "stretto-agent-"  # prefixes of their names


def own_folder() -> tuple[Path, int]:
    """Create a temporary folder, and remove abandoned ones; folders in use, or of other users, stay. Return it with the
    descriptor of its lock, which the kernel releases when this process dies."""
    for left in Path(tempfile.gettempdir()).glob(f"{_FOLDER}*"):
        with contextlib.suppress(OSError):  # the folder is in use, or another user's
            descriptor = _locked(left, fcntl.LOCK_NB)
            shutil.rmtree(left, ignore_errors=True)
            os.close(descriptor)
    while True:
        folder = Path(tempfile.mkdtemp(prefix=_FOLDER))
        with contextlib.suppress(FileNotFoundError):  # another agent has removed it as one that was left
            descriptor = _locked(folder)
            if folder.exists():
                return folder, descriptor
            os.close(descriptor)


def _locked(folder: Path, how: int = 0) -> int:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | how)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def own_memory(folder: Path, terms: RunTerms) -> tuple[Path, int]:
    """Create a temporary folder for weights, and remove abandoned ones. Return it with the descriptor of its lock,
    which the kernel releases when this process dies. The folder is in shared memory if that has space for a version, or
    if another agent of the run has its weights there; else it is in `folder`."""
    for left in SHARED.glob(f"{_MEMORY}*"):
        with contextlib.suppress(OSError):  # it is in use, or another agent removes it too
            remove_abandoned(left)
            left.rmdir()
    there = any(SHARED.glob(f"{_MEMORY}*/{prefix(terms.mailbox)}*.weights"))
    while True:
        memory = Path(tempfile.mkdtemp(prefix=_MEMORY, dir=shared_folder(0 if there else terms.size, folder)))
        with contextlib.suppress(FileNotFoundError):  # another agent has removed it as one that was left
            return memory, own(terms.mailbox, memory)


def neighbours(folder: Path) -> list[Path]:
    """Folders beside `folder` of this user's other agents: those whose name is the same up to the last "-"."""
    found = folder.parent.glob(f"{folder.name.rpartition('-')[0]}-*")
    return [one for one in found if one != folder and not one.is_symlink() and _is_ours(one)]


def _is_ours(path: Path) -> bool:
    try:
        return path.stat().st_uid == os.getuid()
    except FileNotFoundError:  # its agent has ended
        return False


def link_first(sources: Iterable[Path], target: Path) -> None:
    """Create `target` as a hard link to the first of the files `sources` that can be linked. Does nothing if none can,
    or `target` exists."""
    for source in sources:
        with contextlib.suppress(OSError):  # it is gone, or on another file system
            target.hardlink_to(source)
            return


@contextlib.contextmanager
def in_turn(path: Path, waiting: Callable[[], None]) -> Iterator[None]:
    """Hold the lock of the file `path`, which only one process of the machine has at a time (context manager); the file
    is created, and removed afterwards. `waiting` is called repeatedly until the lock is taken, and may raise. If the
    lock file cannot be opened (another user's, say), nothing is locked."""
    while True:
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        except OSError:
            yield
            return
        try:
            while not _taken(descriptor):
                waiting()
                time.sleep(_LOOK_SECONDS)
            if _is_at(path, descriptor):
                try:
                    yield
                finally:
                    path.unlink(missing_ok=True)
                return
        finally:
            os.close(descriptor)  # if the loop goes on: another process had the lock and has unlinked the file


def _is_at(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _taken(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def sweeper(*folders: Path) -> subprocess.Popen[bytes]:
    """Start a process that removes the folders, and ends, when its standard input gets a line or is closed, as when
    this process dies. Return it."""
    quiet = subprocess.DEVNULL
    command = ["/bin/sh", "-c", 'read _; rm -rf -- "$@"', "stretto", *map(str, folders)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=quiet, stderr=quiet, start_new_session=True)
