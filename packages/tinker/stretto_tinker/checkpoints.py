"""Weights on disk: checkpoints that clients saved, and snapshots from which the server restores models.

    FOLDER/tinker.sqlite
    FOLDER/weights/MODEL/weights/NAME           with the optimizer      tinker://MODEL/weights/NAME
    FOLDER/weights/MODEL/sampler_weights/NAME                           tinker://MODEL/sampler_weights/NAME
    FOLDER/weights/MODEL/external_weights/NAME  as peft reads them      tinker://MODEL/external_weights/NAME
    FOLDER/snapshots/MODEL/SEQ                  never shown to a client

Folders appear atomically: each is written under another name and then renamed.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from stretto.core.errors import RefusedRequest
from stretto.model.hf.folder import whole_folder
from stretto.store.files import sweep

TRAINING, SAMPLER, EXTERNAL = "weights", "sampler_weights", "external_weights"
#: Type of a checkpoint in the SDK, by kind.
TYPES = {TRAINING: "training", SAMPLER: "sampler", EXTERNAL: "external"}
SCHEME = "tinker://"
_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}")
_NAMES = "letters, digits, '.', '_' and '-', at most 128 of them, no '.' in front"


@dataclass(frozen=True)
class Place:
    """Address of a checkpoint: ``tinker://MODEL/KIND/NAME``. `model`: id of the model. `kind`: `TRAINING`, `SAMPLER` or
    `EXTERNAL`."""

    model: str
    kind: str
    name: str

    @classmethod
    def of(cls, path: str, field: str = "path") -> Self:
        """Parse a path ``tinker://MODEL/KIND/NAME``; the checkpoint need not exist. `field`: name of the request's
        field, for the error.

        Raises:
            RefusedRequest: it is no such path.
        """
        parts = path.removeprefix(SCHEME).split("/")
        if not path.startswith(SCHEME) or len(parts) != 3 or parts[1] not in TYPES:
            raise RefusedRequest(field, f"{path!r:.120} is no path of weights", f"{SCHEME}MODEL/{TRAINING}/NAME")
        return cls(parts[0], parts[1], checked_name(parts[2], field))

    @property
    def path(self) -> str:
        """The address as text, ``tinker://MODEL/KIND/NAME``."""
        return f"{SCHEME}{self.model}/{self.kind}/{self.name}"

    @property
    def id(self) -> str:
        """The SDK's checkpoint id, ``KIND/NAME``, which is unique within a training run."""
        return f"{self.kind}/{self.name}"


def checked_name(name: str, field: str = "path") -> str:
    """Return `name` if it is a valid name of a checkpoint. `field`: name of the request's field, for the error.

    Raises:
        RefusedRequest: the name is not valid.
    """
    if not _NAME.fullmatch(name):
        raise RefusedRequest(field, f"{name!r:.120}", _NAMES)
    return name


class Weights:
    """Folders of checkpoints and snapshots below the server's folder."""

    def __init__(self, folder: Path) -> None:
        self._named, self._snapshots = folder / "weights", folder / "snapshots"

    def folder(self, place: Place) -> Path:
        """Folder for the weights of a checkpoint; it may not exist."""
        return self._named / _file(place.model) / place.kind / place.name

    def snapshot(self, model: str, seq: int) -> Path:
        """Folder for the snapshot of a model after its request number `seq`; it may not exist."""
        return self._snapshots / _file(model) / str(seq)

    def write(self, folder: Path, save: Callable[[Path], None]) -> int:
        """Write a folder atomically: `save` writes the files into a temporary folder, which is then synced to disk and
        renamed to `folder`, replacing an earlier one. Returns the size in bytes.

        Raises:
            OSError: the folder cannot be written; an earlier one stays.
        """
        with whole_folder(folder) as partial:
            save(partial)
        return size_of(folder)

    def drop(self, folder: Path) -> None:
        """Remove a folder if it exists. Files that cannot be removed stay, without an error."""
        shutil.rmtree(folder, ignore_errors=True)

    def keep(self, folders: Collection[Path]) -> None:
        """Remove all checkpoints and snapshots except `folders`, such as the incomplete folders of a killed process. A
        folder that was moved aside for its successor gets its name back if the process was killed before the successor
        was there."""
        sweep({folder.parent for folder in folders})
        for folder in (*self._named.glob("*/*/*"), *self._snapshots.glob("*/*")):
            if folder not in folders:
                self.drop(folder)

    def drop_snapshots(self, model: str) -> None:
        """Remove all snapshots of a model."""
        self.drop(self._snapshots / _file(model))

    def keep_snapshot(self, model: str, seq: int) -> None:
        """Remove all snapshots of a model except that after request number `seq`."""
        for folder in (self._snapshots / _file(model)).glob("*"):
            if folder.name != str(seq):
                self.drop(folder)


def size_of(folder: Path) -> int:
    """Size of all files in a folder together, in bytes."""
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def files_of(folder: Path) -> dict[str, Path]:
    """Files of a folder and its sub-folders, by their paths relative to it."""
    return {str(file.relative_to(folder)): file for file in sorted(folder.rglob("*")) if file.is_file()}


def _file(model: str) -> str:
    """Name of a model's folder. Model ids are made by the server and consist of letters, digits, '-' and ':'."""
    return model.replace(":", "_")
