"""The weights on disk: what clients saved under a name, and the snapshots from which models are restored.

    FOLDER/tinker.sqlite
    FOLDER/weights/MODEL/weights/NAME           with the optimizer      tinker://MODEL/weights/NAME
    FOLDER/weights/MODEL/sampler_weights/NAME                           tinker://MODEL/sampler_weights/NAME
    FOLDER/weights/MODEL/external_weights/NAME  as peft reads them      tinker://MODEL/external_weights/NAME
    FOLDER/snapshots/MODEL/SEQ                  never shown to a client

A folder appears whole: it is written beside its place and renamed.
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

TRAINING, SAMPLER, EXTERNAL = "weights", "sampler_weights", "external_weights"
#: The SDK's word for each kind.
TYPES = {TRAINING: "training", SAMPLER: "sampler", EXTERNAL: "external"}
SCHEME = "tinker://"
_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}")
_NAMES = "letters, digits, '.', '_' and '-', at most 128 of them, no '.' in front"


@dataclass(frozen=True)
class Place:
    """Where weights are: ``tinker://MODEL/KIND/NAME``."""

    model: str
    kind: str
    name: str

    @classmethod
    def of(cls, path: str, field: str = "path") -> Self:
        """The place that a path names.

        Raises:
            RefusedRequest: it names none.
        """
        parts = path.removeprefix(SCHEME).split("/")
        if not path.startswith(SCHEME) or len(parts) != 3 or parts[1] not in TYPES:
            raise RefusedRequest(field, f"{path!r:.120} is no path of weights", f"{SCHEME}MODEL/{TRAINING}/NAME")
        return cls(parts[0], parts[1], checked_name(parts[2], field))

    @property
    def path(self) -> str:
        """The place as clients write it."""
        return f"{SCHEME}{self.model}/{self.kind}/{self.name}"

    @property
    def id(self) -> str:
        """What the SDK calls the checkpoint's id: its name within a training run."""
        return f"{self.kind}/{self.name}"


def checked_name(name: str, field: str = "path") -> str:
    """The name of a checkpoint.

    Raises:
        RefusedRequest: it cannot be one.
    """
    if not _NAME.fullmatch(name):
        raise RefusedRequest(field, f"{name!r:.120}", _NAMES)
    return name


class Weights:
    """The folders of weights below the folder of a server."""

    def __init__(self, folder: Path) -> None:
        self._named, self._snapshots = folder / "weights", folder / "snapshots"

    def folder(self, place: Place) -> Path:
        """Where the weights of a place are, or would be."""
        return self._named / _file(place.model) / place.kind / place.name

    def snapshot(self, model: str, seq: int) -> Path:
        """Where the state of a model after a request is, or would be."""
        return self._snapshots / _file(model) / str(seq)

    def write(self, folder: Path, save: Callable[[Path], None]) -> int:
        """Write a folder, whole or not at all; its size in bytes.

        Raises:
            OSError: it cannot be written.
        """
        with whole_folder(folder) as partial:
            save(partial)
        return size_of(folder)

    def drop(self, folder: Path) -> None:
        """Remove a folder, if it is there."""
        shutil.rmtree(folder, ignore_errors=True)

    def keep(self, folders: Collection[Path]) -> None:
        """Remove all folders but these: what a killed process has left half written, or had begun to remove."""
        for folder in (*self._named.glob("*/*/*"), *self._snapshots.glob("*/*")):
            if folder not in folders:
                self.drop(folder)

    def drop_snapshots(self, model: str) -> None:
        """Remove all snapshots of a model."""
        self.drop(self._snapshots / _file(model))

    def keep_snapshot(self, model: str, seq: int) -> None:
        """Remove all snapshots of a model but one."""
        for folder in (self._snapshots / _file(model)).glob("*"):
            if folder.name != str(seq):
                self.drop(folder)


def size_of(folder: Path) -> int:
    """Bytes of all files in a folder."""
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def files_of(folder: Path) -> dict[str, Path]:
    """The files of a folder by their path in it."""
    return {str(file.relative_to(folder)): file for file in sorted(folder.rglob("*")) if file.is_file()}


def _file(model: str) -> str:
    """The name of a model's folder; ids of models are made here, of letters, digits, '-' and ':'."""
    return model.replace(":", "_")
