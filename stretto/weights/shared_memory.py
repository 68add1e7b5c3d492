"""The mailbox of one machine: one file per version in shared memory.

    publish     stretto-<run>-v000007.<pid>.partial     write, read back, compare the checksum
    switch      stretto-<run>-v000007.weights           one atomic rename: before it the version does not exist
    keep        the newest two, so that an engine can finish loading the older one; an unlinked file lives on
                for processes that have mapped it

A process that dies in the middle leaves at most a ``.partial`` file, which the next publication removes.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import re
import shutil
import time
from collections.abc import Iterable, Mapping
from dataclasses import replace
from io import FileIO
from pathlib import Path

import xxhash
from torch import Tensor

from stretto.core.errors import DeadlineExceeded, TornPublication, WireError, naming
from stretto.weights import publication
from stretto.weights.mailbox import Gather, as_it_is

SHARED = Path("/dev/shm")
_KEPT = 2
_LOOK_SECONDS = 0.02
_RUN = re.compile(r"[A-Za-z0-9_.]+")
_OWNED = "owned"


def shared_folder(needed: int, fallback: Path) -> Path:
    """The machine's shared memory if it has room for `needed` bytes and one version more, else `fallback`.

    `needed` is the size of one version; containers often have 64 MiB of shared memory only.
    """
    if SHARED.is_dir() and os.access(SHARED, os.W_OK) and shutil.disk_usage(SHARED).free > (_KEPT + 2) * needed:
        return SHARED
    return fallback


def own(run: str, folder: Path) -> int:
    """A descriptor whose lock marks the files of `run` in `folder` as in use; the kernel unlocks it when we die."""
    path = folder / f"{_prefix(run)}{_OWNED}"
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        fcntl.flock(descriptor, fcntl.LOCK_EX)  # `remove_abandoned` of another run may hold it for an instant
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(path.stat(), os.fstat(descriptor)):
                return descriptor
        os.close(descriptor)  # it has unlinked the file as abandoned


def remove_abandoned(folder: Path) -> None:
    """Unlink the files of killed runs in `folder`, except those of other users."""
    for path in folder.glob(f"stretto-*-v{_OWNED}"):
        with contextlib.suppress(OSError), path.open("rb") as held:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _unlink(folder.glob(f"{path.name.removesuffix(_OWNED)}*"))


def remove(run: str, folder: Path) -> int:
    """Unlink everything of `run`, half-written files too; returns how many files there were."""
    return _unlink(folder.glob(f"{_prefix(run)}*"))


class SharedMemoryPublisher:
    """The trainer's end; a new publisher goes on with the files of an earlier one.

    Example::

        publisher = SharedMemoryPublisher("a1b2", folder)
        publisher.publish(7, model.named_parameters())   # v6 and v7 are there, v5 is gone
        remove("a1b2", folder)                           # nothing is left
    """

    def __init__(self, run: str, folder: Path) -> None:
        self._run, self._folder = run, folder
        folder.mkdir(parents=True, exist_ok=True)
        _prefix(run)

    def publish(self, version: int, tensors: Iterable[tuple[str, Tensor]], gather: Gather = as_it_is) -> None:
        """Write, check, switch; `gather` makes each tensor when it is written. Versions above `version`, which a run
        has published before it was resumed, are unlinked.

        Raises:
            TornPublication: the file read back differs from what was written; nothing was switched.
            ValueError: a dtype that cannot be published, or a version below 0.
            OSError: no room, with the path; nothing was switched, nothing is left.
        """
        if version < 0:
            raise ValueError(f"versions start at 0, not {version}")
        path = _path(self._run, self._folder, version)
        partial = path.with_suffix(f".{os.getpid()}.partial")
        try:
            _write(partial, version, dict(tensors), gather)
            _check(partial, version)
            _unlink(file for number, file in _versions(self._run, self._folder) if number > version)
            partial.replace(path)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise
        _unlink(file for _, file in _versions(self._run, self._folder)[:-_KEPT])
        _unlink(self._folder.glob(f"{_prefix(self._run)}*.partial"))


class SharedMemorySubscriber:
    """An engine's end."""

    def __init__(self, run: str, folder: Path) -> None:
        self._run, self._folder = run, folder

    def newest(self) -> int | None:
        """The version published last, None before the first."""
        versions = _versions(self._run, self._folder)
        return versions[-1][0] if versions else None

    def await_first(self, owner: str, seconds: float) -> int:
        """The newest version, once something is published.

        Raises:
            DeadlineExceeded: nothing was, in `seconds`.
        """
        end = time.monotonic() + seconds
        while (newest := self.newest()) is None:
            if time.monotonic() > end:
                raise DeadlineExceeded(owner, "the first publication", seconds)
            time.sleep(_LOOK_SECONDS)
        return newest

    def load(self, version: int) -> Mapping[str, Tensor]:
        """The tensors of `version`: views of the mapped file, not copies, which keep it mapped.

        Writing into one changes the reader's view alone (the mapping is private).

        Raises:
            TornPublication: size, version or checksum do not fit; nothing was loaded.
            WireError: that version is not there (any more); ask for the newest again.
        """
        return publication.read(self._mapped(version), version).tensors

    def hold(self, version: int, holder: str) -> Path:
        """The file of `version`, a safetensors file, once every byte was checked: a second name of it, which stays
        until `holder` holds another version, however many are published meanwhile.

        Raises:
            TornPublication, WireError: as for `load`; `holder` holds what it held before.
        """
        mine = f"{_prefix(self._run)}{holder}-"
        held = self._folder / f"{mine}{version:06d}.held"
        held.unlink(missing_ok=True)
        try:
            held.hardlink_to(_path(self._run, self._folder, version))
            publication.verify(_map(held), version)
        except FileNotFoundError:
            raise self._gone(version) from None
        except TornPublication:
            held.unlink()
            raise
        _unlink(file for file in self._folder.glob(f"{mine}*.held") if file != held)
        return held

    def _mapped(self, version: int) -> memoryview:
        try:
            return _map(_path(self._run, self._folder, version))
        except FileNotFoundError:
            raise self._gone(version) from None

    def _gone(self, version: int) -> WireError:
        return WireError(f"{self._folder}: version {version} is not published; the newest there is {self.newest()}")


def _prefix(run: str) -> str:
    if not _RUN.fullmatch(run):
        raise ValueError(f"a run is named by letters, digits, '_' and '.', not {run!r}")
    return f"stretto-{run}-v"


def _path(run: str, folder: Path, version: int) -> Path:
    return folder / f"{_prefix(run)}{version:06d}.weights"


def _versions(run: str, folder: Path) -> list[tuple[int, Path]]:
    """All whole publications, oldest first."""
    prefix = _prefix(run)
    files = ((path.stem.removeprefix(prefix), path) for path in folder.glob(f"{prefix}*.weights"))
    return sorted((int(number), path) for number, path in files if number.isdecimal())


def _write(path: Path, version: int, tensors: Mapping[str, Tensor], gather: Gather) -> None:
    manifest, checksums = publication.plan(version, tensors), []
    start = len(publication.header(manifest))
    with open(path, "wb", buffering=0, opener=_private) as file:
        for name, tensor in tensors.items():
            file.seek(start + manifest.tensors[name].data_offsets[0])
            checksum = xxhash.xxh3_64()
            for piece in publication.pieces(gather(name, tensor)):
                checksum.update(piece)
                _write_all(file, piece)
            checksums.append(checksum.hexdigest())
        file.seek(0)
        _write_all(file, memoryview(publication.header(replace(manifest, checksums=tuple(checksums)))))


def _write_all(file: FileIO, data: memoryview) -> None:
    """Raises OSError with the path."""
    with naming(Path(str(file.name))):
        while data:
            data = data[os.write(file.fileno(), data) :]


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _check(path: Path, version: int) -> None:
    """Read a publication back from the medium, every byte."""
    publication.verify(_map(path), version)


def _map(path: Path) -> memoryview:
    with naming(path), open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if not size:
            raise TornPublication(f"{path.name} is empty")
        # torch wants writable memory; a private mapping is, and stays the one copy since nobody writes.
        return memoryview(mmap.mmap(file.fileno(), size, access=mmap.ACCESS_COPY))


def _unlink(paths: Iterable[Path]) -> int:
    files = list(paths)
    for path in files:
        path.unlink(missing_ok=True)
    return len(files)
