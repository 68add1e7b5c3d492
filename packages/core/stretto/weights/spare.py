"""Memory of an old version for the next one.

    drop       stretto-<run>-v000005.weights → stretto-<run>-v.spare     when version 7 is there
    reuse      stretto-<run>-v.spare → stretto-<run>-v000008.<pid>.partial     if nobody reads version 5 any more

Allocating the pages of a new file takes as long as copying into them. The kernel's lease proves that nobody has a spare
open or mapped; without that proof it is unlinked, and its readers keep what they have mapped.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from io import FileIO
from pathlib import Path

from stretto.processes.kernel.lease import end_lease, take_lease
from stretto.weights.folder import KEPT, prefix, private_file, unlink, versions


def drop_old(run: str, folder: Path) -> None:
    """Keep the newest two versions of a run. The newest of the others becomes its spare, a file to write the next
    version into; the rest are unlinked."""
    old = [path for _, path in versions(run, folder)[:-KEPT]]
    if old:
        old.pop().replace(_spare(run, folder))
    unlink(old)


@contextmanager
def new_version(run: str, folder: Path, path: Path) -> Iterator[FileIO]:
    """Context manager: unlink the file `path`, and create and open it anew for all the bytes of a version.

    It may have the bytes of an old version: write every byte, and `cut` it to its size.

    Raises:
        OSError: the file cannot be created.
    """
    path.unlink(missing_ok=True)  # left by an earlier process with this pid, or created by another user
    file = _reused(_spare(run, folder), path) or private_file(path)
    with file:
        try:
            yield file
        finally:
            end_lease(file.fileno())


def cut(file: FileIO, size: int) -> None:
    """Truncate a file that is longer than `size` bytes; a shorter one stays as it is."""
    if os.fstat(file.fileno()).st_size > size:
        file.truncate(size)


def _reused(spare: Path, path: Path) -> FileIO | None:
    """Rename the spare to `path` and open it; None, and no file, if there is none or somebody may still read it."""
    with contextlib.suppress(FileNotFoundError):
        spare.rename(path)
        with contextlib.suppress(OSError), contextlib.ExitStack() as undo:  # it is a link that somebody put there
            file = undo.enter_context(open(path, "r+b", buffering=0, opener=_existing))
            if _ours(os.fstat(file.fileno())) and take_lease(path, file.fileno()):
                undo.pop_all()
                return file
        path.unlink()
    return None


def _ours(status: os.stat_result) -> bool:
    """Whether it is a regular file of this user without a second hard link."""
    return stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid() and status.st_nlink == 1


def _existing(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW)


def _spare(run: str, folder: Path) -> Path:
    return folder / f"{prefix(run)}.spare"
