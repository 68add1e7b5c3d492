"""Files of a mailbox folder: names, ownership, writing and mapping; without torch.

The memory of an old version is used for the next one.

    drop       stretto-<run>-v000005.weights → stretto-<run>-v.spare     when version 7 is there
    reuse      stretto-<run>-v.spare → stretto-<run>-v000008.<pid>.partial     if nobody reads version 5 any more

Allocating the pages of a new file takes as long as copying into them. The kernel's lease proves that nobody has a spare
open or mapped; without that proof it is unlinked, and its readers keep what they have mapped.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import re
import shutil
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from io import FileIO
from pathlib import Path

from stretto.core.errors import TornPublication, naming
from stretto.processes.kernel import end_lease, take_lease

SHARED = Path("/dev/shm")
KEPT = 2  #: number of newest versions that are kept in a folder
_RUN = re.compile(r"[A-Za-z0-9_.]+")
_OWNED = "owned"


def shared_folder(needed: int, fallback: Path) -> Path:
    """The folder /dev/shm if it is writable and has room for four versions, else `fallback`.

    `needed`: bytes of one version. Containers often have only 64 MiB of shared memory.
    """
    if SHARED.is_dir() and os.access(SHARED, os.W_OK) and shutil.disk_usage(SHARED).free > (KEPT + 2) * needed:
        return SHARED
    return fallback


def own(run: str, folder: Path) -> int:
    """Mark the files of `run` in `folder` as in use, by a lock on a file that is created if needed; waits if another
    process holds the lock. Returns the lock's file descriptor, to keep open; the kernel releases the lock when this
    process ends."""
    path = folder / f"{prefix(run)}{_OWNED}"
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        fcntl.flock(descriptor, fcntl.LOCK_EX)  # `remove_abandoned` of another run may hold it for an instant
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(path.stat(), os.fstat(descriptor)):
                return descriptor
        os.close(descriptor)  # it has unlinked the file as abandoned


def remove_abandoned(folder: Path) -> None:
    """Unlink the files of killed runs in `folder`: of those that have a lock file (`own`) which nobody holds. Files of
    other users stay."""
    for path in folder.glob(f"stretto-*-v{_OWNED}"):
        with contextlib.suppress(OSError), open(path, "rb", opener=_at_once) as held:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            unlink(folder.glob(f"{path.name.removesuffix(_OWNED)}*"))


def _at_once(path: str, flags: int) -> int:
    """Open a file for reading without waiting at a pipe or following a link, which another user may have put there."""
    return os.open(path, flags | os.O_NONBLOCK | os.O_NOFOLLOW)


def remove(run: str, folder: Path) -> int:
    """Unlink all files of `run`, including partial ones; returns their number."""
    return unlink(folder.glob(f"{prefix(run)}*"))


def held(run: str, folder: Path, holder: str) -> Path:
    """Common beginning of the paths of files by which `holder` (name of an engine's folder) keeps versions from being
    reused."""
    return folder / f"{prefix(run)}{holder}-"


def release(run: str, folder: Path, holder: str) -> int:
    """Unlink the files by which `holder` (name of an engine's folder), which has ended, keeps versions; returns their
    number."""
    return unlink(folder.glob(f"{held(run, folder, holder).name}*.held"))


def prefix(run: str) -> str:
    """Beginning of the names of all files of a run. Raises ValueError if the run name has characters by which its files
    could be taken for another run's."""
    if not _RUN.fullmatch(run):
        raise ValueError(f"a run is named by letters, digits, '_' and '.', not {run!r}")
    return f"stretto-{run}-v"


def path_of(run: str, folder: Path, version: int) -> Path:
    """Path of the file of a published version."""
    return folder / f"{prefix(run)}{version:06d}.weights"


def versions(run: str, folder: Path) -> list[tuple[int, Path]]:
    """All complete publications of the run in `folder`, as (version, file), oldest first. In a folder that every user
    may write to, such as /dev/shm, files of other users are left out."""
    begin, shared = prefix(run), _is_shared(folder)
    files = ((path.stem.removeprefix(begin), path) for path in folder.glob(f"{begin}*.weights"))
    return sorted(
        (int(number), path) for number, path in files if number.isdecimal() and not (shared and _is_foreign(path))
    )


def _is_shared(folder: Path) -> bool:
    """Whether every user may write to the folder."""
    return bool(folder.stat().st_mode & stat.S_IWOTH) if folder.is_dir() else False


def _is_foreign(path: Path) -> bool:
    try:
        return path.lstat().st_uid != os.geteuid()
    except FileNotFoundError:  # it was dropped meanwhile, which its reader notices
        return False


def write_all(file: FileIO, data: memoryview) -> None:
    """Write all bytes of `data` at the file's position. Raises OSError, with the path, if the system does."""
    with naming(Path(str(file.name))):
        while data:
            data = data[os.write(file.fileno(), data) :]


def private_file(path: Path) -> FileIO:
    """Create a file that only its owner may read, and open it for unbuffered writing. Raises FileExistsError if
    something has this name."""
    return open(
        path, "wb", buffering=0, opener=lambda path, flags: os.open(path, flags | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    )


def map_file(path: Path) -> memoryview:
    """Map a whole file into memory; it stays mapped as long as the result is used. Writes to the mapping are private
    and do not reach the file.

    Raises:
        TornPublication: the file is empty, or another user's in a folder that every user may write to.
        OSError: the system's error, with the path.
    """
    with naming(path), open(path, "rb") as file:
        status = os.fstat(file.fileno())
        size = status.st_size
        if status.st_uid != os.geteuid() and _is_shared(path.parent):
            raise TornPublication(f"{path.name} belongs to another user")
        if not size:
            raise TornPublication(f"{path.name} is empty")
        # torch needs writable memory: a private mapping is writable, and shares pages as long as nobody writes.
        return memoryview(mmap.mmap(file.fileno(), size, access=mmap.ACCESS_COPY))


def unlink(paths: Iterable[Path]) -> int:
    """Unlink the paths; returns how many paths were given. Files that are missing already count too, and so do those of
    other users, which stay."""
    files = list(paths)
    for path in files:
        try:
            path.unlink(missing_ok=True)
        except PermissionError:
            if not _is_foreign(path):
                raise
    return len(files)


def drop(run: str, folder: Path) -> None:
    """Keep the newest two versions of a run. The newest of the others becomes its spare, a file to write the next
    version into; the rest are unlinked."""
    old = [path for _, path in versions(run, folder)[:-KEPT]]
    if old:
        with contextlib.suppress(PermissionError):  # another user has a file of the spare's name
            old[-1].replace(_spare(run, folder))
    unlink(old)


@contextmanager
def new_version(run: str, folder: Path, path: Path) -> Iterator[FileIO]:
    """Context manager: replace the file `path` by one for all the bytes of a version, open for writing: the run's
    spare, with the bytes of an old version, or an empty file. Write every byte, and `cut` it to its size. Raises
    OSError if the file cannot be created."""
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
    """Rename the file `spare` to `path` and open it for writing, with a lease; None if there is no spare of this user,
    or somebody may still read it: then neither file is left."""
    with contextlib.suppress(FileNotFoundError, PermissionError):  # or it is another user's
        spare.rename(path)
        with contextlib.suppress(OSError), contextlib.ExitStack() as undo:  # it is a link that somebody put there
            file = undo.enter_context(
                open(path, "r+b", buffering=0, opener=lambda path, flags: os.open(path, flags | os.O_NOFOLLOW))
            )
            if _ours(os.fstat(file.fileno())) and take_lease(path, file.fileno()):
                undo.pop_all()
                return file
        path.unlink()
    return None


def _ours(status: os.stat_result) -> bool:
    """Whether `status` is that of a regular file of this user without a second hard link."""
    return stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid() and status.st_nlink == 1


def _spare(run: str, folder: Path) -> Path:
    return folder / f"{prefix(run)}.spare"
