"""Temporary folders of an agent, locked while it lives; later agents remove unlocked ones.

A sweeper process removes them when the agent dies; if it is killed too (with the whole control group, say), they stay.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from stretto.weights.folder import SHARED, own, remove_abandoned, shared_folder
from stretto_cluster.messages import RunTerms

_FOLDER, _MEMORY = "stretto-machine-", "stretto-agent-"  # how their names begin


def own_folder() -> tuple[Path, int]:
    """Create a temporary folder; returns it with the descriptor of its lock, which the kernel releases when we die."""
    for left in Path(tempfile.gettempdir()).glob(f"{_FOLDER}*"):
        with contextlib.suppress(OSError):  # it is in use, or another user's
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
    """Same as `own_folder`, for the weights: in shared memory if there is room, else in `folder`."""
    for left in SHARED.glob(f"{_MEMORY}*"):
        with contextlib.suppress(OSError):  # it is in use, or another agent removes it too
            remove_abandoned(left)
            left.rmdir()
    while True:
        memory = Path(tempfile.mkdtemp(prefix=_MEMORY, dir=shared_folder(terms.size, folder)))
        with contextlib.suppress(FileNotFoundError):  # another agent has removed it as one that was left
            return memory, own(terms.mailbox, memory)


def sweeper(*folders: Path) -> subprocess.Popen[bytes]:
    """Start a process that removes the folders when asked to, or when this process has died in any way."""
    quiet = subprocess.DEVNULL
    command = ["/bin/sh", "-c", 'read _; rm -rf -- "$@"', "stretto", *map(str, folders)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=quiet, stderr=quiet, start_new_session=True)
