"""Checkpoints on disk, each of which is complete or absent.

.step-000040.part/   written by the trainer ─► manifest.json (sizes, checksums) ─► synced to disk
    │ rename: from this moment on, step-000040/ exists
    ▼
step-000040/

Where folders cannot be renamed, as on a mounted object bucket, the files are copied, and the manifest last. A
checkpoint is broken if it has no manifest, or if a file differs from its manifest; then the checkpoint before it is
used.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec
import xxhash

from stretto.core.errors import Problem, RunFolderError, StoreError
from stretto.core.machine import is_lacking, sync
from stretto.core.records import Record
from stretto.store import lock
from stretto.store.files import sweep

_NAME = re.compile(r"step-(\d{6,})")
_MANIFEST = "manifest.json"


class FileSeal(Record, frozen=True):
    """One file of a checkpoint: its size in bytes and its XXH3 checksum (128 bits, hexadecimal)."""

    size: int
    xxh3: str


class _Manifest(Record, frozen=True):
    """The files of a complete checkpoint. Example: ``_Manifest(step=40, files={"trainer.json": FileSeal(...)})``"""

    step: int
    files: dict[str, FileSeal]


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint: its step and folder. `broken`: an error message for each newer checkpoint that was passed
    over because it is broken, newest first."""

    step: int
    path: Path
    broken: tuple[str, ...] = ()


class Checkpoints:
    """The checkpoints of one run, in `folder`; the newest `keep` (at least 1) are kept.

    Example::

        checkpoints = Checkpoints(folder.checkpoints, keep=2)
        checkpoints.save(40, trainer.save_checkpoint)   # calls it with the folder to fill
        newest = checkpoints.latest()
    """

    def __init__(self, folder: Path, keep: int = 2) -> None:
        self._folder, self._keep = folder, keep

    def path(self, step: int) -> Path:
        """Path of the checkpoint of `step`, whether it exists or not."""
        return self._folder / f"step-{step:06d}"

    def save(self, step: int, write: Callable[[Path], None]) -> Path:
        """Save the checkpoint of `step`, replacing an earlier one, and remove the oldest beyond `keep`; returns its
        folder.

        `write` is called with an empty folder and writes its files there. Then the folder gets its manifest, is synced
        to disk, and is renamed to its final name. After an error nothing has changed (where folders cannot be renamed,
        the earlier one may be lost); an error of `write` is raised unchanged, unless it is an OSError.

        Raises:
            StoreError: the folder cannot be written (disk full, read-only, removed); names the path.
        """
        final = self.path(step)
        part = self._folder / f".{final.name}.part"
        try:
            self._folder.mkdir(exist_ok=True)  # never its parent: a run folder that was removed stays removed
            shutil.rmtree(part, ignore_errors=True)
            part.mkdir()
            write(part)
            _seal(step, part)
            _switch(part, final)
        except OSError as error:
            raise StoreError(f"{final}: the checkpoint cannot be written: {error.strerror or error}") from error
        finally:
            shutil.rmtree(part, ignore_errors=True)
        for old in self.steps()[: -self._keep]:
            shutil.rmtree(self.path(old), ignore_errors=True)
        return final

    def steps(self) -> list[int]:
        """List the steps that have a checkpoint folder, complete or broken, oldest first; empty if there is no folder.

        Raises:
            StoreError: the folder of the checkpoints is a link to a folder that does not exist: perhaps its disk is not
                mounted.
        """
        if not self._folder.is_dir():
            if self._folder.is_symlink():
                raise StoreError(f"{self._folder}: is a link to {self._folder.readlink()}, where no folder is")
            return []
        matches = [_NAME.fullmatch(path.name) for path in self._folder.iterdir()]
        return sorted(int(match[1]) for match in matches if match)

    def latest(self, at_most: int | None = None) -> Checkpoint | None:
        """Find the newest complete checkpoint of step `at_most` (None: any step) or earlier; every byte of it is
        checked. Newer broken ones are named in it. None if there is no checkpoint of these steps.

        Raises:
            StoreError: there are such checkpoints, and all are broken (names the fault of each); or their folder is a
                link to a folder that does not exist.
        """
        broken: list[str] = []
        for step in reversed(self.steps()):
            if at_most is not None and step > at_most:
                continue
            path = self.path(step)
            try:
                verify(path)
            except StoreError as error:
                broken.append(str(error))
            else:
                return Checkpoint(step, path, tuple(broken))
        if broken:
            raise StoreError("no whole checkpoint is left: " + "; ".join(broken))
        return None

    def set_aside_after(self, step: int) -> None:
        """Rename all checkpoints after `step` to ``broken-step-...``, or remove them where folders cannot be renamed.
        For a run that is resumed from `step` because the later ones are broken, which is not checked here. Raises
        OSError if one can be neither renamed nor removed."""
        for later in (number for number in self.steps() if number > step):
            path = self.path(later)
            aside = self._folder / f"broken-{path.name}"
            shutil.rmtree(aside, ignore_errors=True)
            try:
                path.rename(aside)
            except OSError as error:
                if not is_lacking(error):
                    raise
                shutil.rmtree(path)

    def continue_at(self, version: int) -> None:
        """Prepare to save checkpoints from `version` on: names are restored (`take_back`), and newer checkpoints, which
        must be broken, are renamed (`set_aside_after`). Beside them a new checkpoint would be pruned as the oldest. The
        caller holds the lock, as for `take_back`.

        Raises:
            RunFolderError: a newer checkpoint is complete; nothing is renamed.
            OSError: a newer one can be neither renamed nor removed.
        """
        self.take_back(locked=True)
        for newer in (step for step in reversed(self.steps()) if step > version):
            try:
                verify(self.path(newer))
            except StoreError:  # broken: renamed below
                continue
            told = f"holds version {newer}, and this trainer is at version {version}"
            raise RunFolderError([Problem(str(self._folder.parent), told, "load it first, or give another folder")])
        self.set_aside_after(version)

    def take_back(self, *, locked: bool) -> None:
        """Restore the names of checkpoints that a killed process had moved aside for a successor and not replaced, and
        remove its temporary files (`sweep`). `locked`: the caller holds the lock of the run folder, or of the folder of
        the checkpoints itself. Otherwise nothing changes while another process holds either."""
        if locked:
            sweep([self._folder])
        elif any(self._folder.glob(".step-*.old")) and not lock.is_held(self._folder.parent):
            with suppress(RunFolderError):  # another process saves here, or the folder cannot be written
                held = lock.acquire(self._folder)
                try:
                    sweep([self._folder])
                finally:
                    os.close(held)


def verify(path: Path) -> _Manifest:
    """Check every byte of the checkpoint in the folder `path` (``step-000040``) against its manifest, which is
    returned.

    Raises:
        StoreError: the manifest cannot be read, or is of another step; or a file is missing, is not in the manifest,
            cannot be read, or has another size or checksum. Names the file.
    """
    try:
        manifest = msgspec.json.decode((path / _MANIFEST).read_bytes(), type=_Manifest)
    except (OSError, ValueError) as error:  # ValueError: no UTF-8, or no valid manifest
        raise StoreError(f"{path / _MANIFEST}: cannot be read: {error}") from error
    if path.name != f"step-{manifest.step:06d}":
        raise StoreError(f"{path / _MANIFEST}: is of step {manifest.step}")
    verify_files(path, manifest.files, "the manifest")
    present = {str(file.relative_to(path)) for file in path.rglob("*") if file.is_file()}
    if unknown := sorted(present - manifest.files.keys() - {_MANIFEST}):
        raise StoreError(f"{path / unknown[0]}: is not in the manifest")
    return manifest


def verify_files(folder: Path, files: Mapping[str, FileSeal], source: str) -> None:
    """Check that the files of a folder have their recorded sizes and checksums.

    Args:
        files: size and checksum of each file, by relative path.
        source: where they are recorded, for messages: "the manifest".

    Raises:
        StoreError: a file is missing, cannot be read, or has another size or checksum; names the file.
    """
    for name, seal in files.items():
        try:
            _verify_file(folder / name, seal, source)
        except (OSError, ValueError) as error:  # an unreadable disk; a damaged name that is no path
            raise StoreError(f"{folder / name}: cannot be read: {getattr(error, 'strerror', None) or error}") from error


def _verify_file(file: Path, seal: FileSeal, source: str) -> None:
    if not file.is_file():
        raise StoreError(f"{file}: is missing")
    if (size := file.stat().st_size) != seal.size:
        raise StoreError(f"{file}: has {size} bytes, {source} says {seal.size}")
    if (found := _checksum(file)) != seal.xxh3:
        raise StoreError(f"{file}: has checksum {found}, {source} says {seal.xxh3}")


def seal_files(folder: Path) -> dict[str, FileSeal]:
    """Compute size and checksum of all files in a folder and its sub-folders, by relative path. Raises OSError if one
    cannot be read."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(file.relative_to(folder)): FileSeal(size=file.stat().st_size, xxh3=_checksum(file)) for file in files}


def _seal(step: int, part: Path) -> None:
    for path in part.rglob("*"):  # files and folders
        sync(path)  # `part` itself is synced after the manifest
    manifest = msgspec.json.format(msgspec.json.encode(_Manifest(step=step, files=seal_files(part))))
    (part / _MANIFEST).write_bytes(manifest)
    sync(part / _MANIFEST)
    sync(part)


def _switch(part: Path, final: Path) -> None:
    """Rename the folder `part` to `final`, or copy it where folders cannot be renamed. An older folder `final` is moved
    aside first, and removed at the end, or put back after an error. The parent folder is synced."""
    aside = final.with_name(f".{final.name}.old")
    shutil.rmtree(aside, ignore_errors=True)
    try:
        if final.exists():
            final.rename(aside)
        os.rename(part, final)
    except OSError as error:
        if not is_lacking(error):
            if aside.exists() and not final.exists():
                aside.rename(final)
            raise
        _copy(part, final)
    sync(final.parent)
    shutil.rmtree(aside, ignore_errors=True)


def _copy(part: Path, final: Path) -> None:
    """Copy the folder `part` to `final`, whose content is removed first, file by file, each synced. The manifest comes
    last, so that an incomplete folder has none."""
    (final / _MANIFEST).unlink(missing_ok=True)
    shutil.rmtree(final, ignore_errors=True)
    files = [path.relative_to(part) for path in part.rglob("*") if path.is_file()]
    for name in sorted(files, key=lambda name: name == Path(_MANIFEST)):
        (final / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(part / name, final / name)
        sync(final / name)


def _checksum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()
