"""Files of a mailbox folder: names, ownership, writing and mapping; without torch."""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import re
import shutil
from collections.abc import Iterable
from io import FileIO
from pathlib import Path

from stretto.core.errors import TornPublication, naming

SHARED = Path("/dev/shm")
KEPT = 2  #: number of newest versions that are kept in a folder
_RUN = re.compile(r"[A-Za-z0-9_.]+")
_OWNED = "owned"


def shared_folder(needed: int, fallback: Path) -> Path:
    """The machine's shared memory if it has room for four versions, else `fallback`.

    `needed`: bytes of one version. Containers often have only 64 MiB of shared memory.
    """
    if SHARED.is_dir() and os.access(SHARED, os.W_OK) and shutil.disk_usage(SHARED).free > (KEPT + 2) * needed:
        return SHARED
    return fallback


def own(run: str, folder: Path) -> int:
    """Mark the files of `run` in `folder` as in use, by a lock file that is created if needed; returns the lock's file
    descriptor. The kernel releases the lock when this process ends."""
    path = folder / f"{prefix(run)}{_OWNED}"
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        fcntl.flock(descriptor, fcntl.LOCK_EX)  # `remove_abandoned` of another run may hold it for an instant
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(path.stat(), os.fstat(descriptor)):
                return descriptor
        os.close(descriptor)  # it has unlinked the file as abandoned


def remove_abandoned(folder: Path) -> None:
    """Unlink the files of killed runs in `folder`, except those of other users and of running ones."""
    for path in folder.glob(f"stretto-*-v{_OWNED}"):
        with contextlib.suppress(OSError), path.open("rb") as held:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            unlink(folder.glob(f"{path.name.removesuffix(_OWNED)}*"))


def remove(run: str, folder: Path) -> int:
    """Unlink all files of `run`, including partial ones; returns their number."""
    return unlink(folder.glob(f"{prefix(run)}*"))


def held(run: str, folder: Path, holder: str) -> Path:
    """Path prefix of the files by which `holder` keeps versions alive (`SharedMemorySubscriber.hold`)."""
    return folder / f"{prefix(run)}{holder}-"


def release(run: str, folder: Path, holder: str) -> int:
    """Unlink the files by which `holder` keeps versions alive, after it has ended; returns their number."""
    return unlink(folder.glob(f"{held(run, folder, holder).name}*.held"))


def prefix(run: str) -> str:
    """File name prefix of a run.

    Raises:
        ValueError: the run name has characters by which its files could be taken for another run's.
    """
    if not _RUN.fullmatch(run):
        raise ValueError(f"a run is named by letters, digits, '_' and '.', not {run!r}")
    return f"stretto-{run}-v"


def path_of(run: str, folder: Path, version: int) -> Path:
    """Path of the file of a published version."""
    return folder / f"{prefix(run)}{version:06d}.weights"


def versions(run: str, folder: Path) -> list[tuple[int, Path]]:
    """All complete publications as (version, file), oldest first."""
    begin = prefix(run)
    files = ((path.stem.removeprefix(begin), path) for path in folder.glob(f"{begin}*.weights"))
    return sorted((int(number), path) for number, path in files if number.isdecimal())


def write_all(file: FileIO, data: memoryview) -> None:
    """Write all bytes of `data` at the file's position.

    Raises:
        OSError: the system's error, with the path.
    """
    with naming(Path(str(file.name))):
        while data:
            data = data[os.write(file.fileno(), data) :]


def write_at(file: FileIO, data: memoryview, offset: int) -> None:
    """Write all bytes of `data` at `offset`; the file's own position does not move.

    Raises:
        OSError: the system's error, with the path.
    """
    with naming(Path(str(file.name))):
        while data:
            written = os.pwrite(file.fileno(), data, offset)
            data, offset = data[written:], offset + written


def private_file(path: Path) -> FileIO:
    """Create a file that only its owner may read; its writes are not buffered.

    Raises:
        FileExistsError: something has this name.
    """
    return open(path, "wb", buffering=0, opener=_private)


def _private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_EXCL | os.O_NOFOLLOW, 0o600)


def map_file(path: Path) -> memoryview:
    """Map a file into memory. Writes to the mapping are private and do not reach the file.

    Raises:
        TornPublication: the file is empty.
        OSError: the system's error, with the path.
    """
    with naming(path), open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if not size:
            raise TornPublication(f"{path.name} is empty")
        # torch needs writable memory: a private mapping is writable, and shares pages as long as nobody writes.
        return memoryview(mmap.mmap(file.fileno(), size, access=mmap.ACCESS_COPY))


def unlink(paths: Iterable[Path]) -> int:
    """Unlink the paths; returns their number."""
    files = list(paths)
    for path in files:
        path.unlink(missing_ok=True)
    return len(files)
