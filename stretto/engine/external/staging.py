"""Published versions as model folders, which every inference server can load."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from stretto.weights.shared_memory import SharedMemorySubscriber

_WEIGHTS = "model.safetensors"
_OTHER_WEIGHTS = (".safetensors", ".safetensors.index.json", ".bin", ".bin.index.json", ".pt", ".gguf")


@dataclass(frozen=True)
class FolderAsItIs:
    """One folder with the weights of every version (satisfies `engine.external.engine.WeightsFolder`)."""

    folder: Path

    def folder_of(self, version: int, /) -> Path:
        """The folder."""
        return self.folder


class StagedWeights:
    """One folder that looks like the model's, whose weights are a link to the newest staged publication
    (satisfies `engine.external.engine.WeightsFolder`)."""

    def __init__(self, subscriber: SharedMemorySubscriber, model: Path, folder: Path) -> None:
        self._subscriber, self._folder = subscriber, folder
        folder.mkdir(parents=True, exist_ok=True)
        for file in model.resolve().iterdir():
            if file.is_file() and not file.name.endswith(_OTHER_WEIGHTS):
                _link(folder / file.name, file)

    def folder_of(self, version: int, /) -> Path:
        """The folder, with the weights of `version`."""
        _link(self._folder / _WEIGHTS, self._subscriber.hold(version, self._folder.name))
        return self._folder


def _link(place: Path, target: Path) -> None:
    new = place.with_suffix(f"{place.suffix}.new")
    new.unlink(missing_ok=True)
    os.symlink(target, new)
    new.replace(place)
