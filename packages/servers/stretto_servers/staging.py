"""Published versions as model folders that inference servers can load, and comparison of these with the servers'
memory."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor
from transformers import AutoConfig

from stretto.core.canary import TensorDigest
from stretto.core.errors import WireError
from stretto.engine.config import capabilities_of
from stretto.model.attention_support import windows
from stretto.weights.shared_memory import DTYPES, SharedMemorySubscriber, digest_of_tensor
from stretto_servers.worker.readback import Sums, sums_of

_HEAD, _EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
_WEIGHTS = "model.safetensors"
_OTHER_WEIGHTS = (".safetensors", ".safetensors.index.json", ".bin", ".bin.index.json", ".pt", ".gguf")


class FolderAsItIs:
    """Gives the folder from which a server loads a version: here the same fixed folder for every version (base class of
    `StagedWeights`, which stages published versions)."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @property
    def checked(self) -> int:
        """Number of bytes of published versions that were read and verified so far. 0 for a fixed folder."""
        return 0

    def folder_of(self, version: int, /) -> Path:
        """Folder in which the verified weights of `version` lie, until the next call. A fixed folder raises nothing.

        Raises:
            TornPublication: the publication is damaged.
            WireError: the version is not available, or no longer.
        """
        return self._folder


class StagedWeights(FolderAsItIs):
    """Copy of the folder `model` in `folder`, which is created: its files are links, and the weights are a link to the
    version that was requested last. `subscriber` verifies published versions."""

    def __init__(self, subscriber: SharedMemorySubscriber, model: Path, folder: Path) -> None:
        super().__init__(folder)
        self._subscriber = subscriber
        folder.mkdir(parents=True, exist_ok=True)
        for file in model.resolve().iterdir():
            if file.is_file() and not file.name.endswith(_OTHER_WEIGHTS):
                _link(folder / file.name, file)

    def folder_of(self, version: int, /) -> Path:
        """Verify `version` and link its weights into the folder; returns the folder. Earlier versions are replaced.
        Raises TornPublication if the publication is damaged, and WireError if the version is not available."""
        _link(self._folder / _WEIGHTS, self._subscriber.hold(version, self._folder.name))
        return self._folder

    @property
    def checked(self) -> int:
        return self._subscriber.checked


def shapes_of(folder: Path) -> dict[str, tuple[int, ...]]:
    """Shapes of the tensors in a model folder, by name. An output layer that is tied to the embedding is included."""
    with _opened(folder) as files:
        found = {name: tuple(file.get_slice(name).get_shape()) for name, file in files.items()}
    return ({_HEAD: found[_EMBEDDING]} if _EMBEDDING in found else {}) | found


def compare(
    folder: Path, digests: Mapping[str, TensorDigest], workers: Sequence[Mapping[str, str]]
) -> tuple[tuple[str, ...], int]:
    """Compare the weights of a server with the published version. Each tensor in the folder must have the trainer's
    digest, and its sums, in the server's dtype, must equal the sums of the workers' memory.

    Args:
        folder: folder that the server has loaded.
        digests: the trainer's digests of the version, by tensor.
        workers: result of `Make.held`.

    Returns:
        Names of the tensors that differ, and number of tensors whose memory was compared.

    Raises:
        WireError: a worker's reply is malformed.
    """
    sums = _together(workers, digests)
    wrong, compared = [], 0
    with _opened(folder) as files:
        for name, digest in digests.items():
            tensor = files[name].get_tensor(name) if name in files else None
            if tensor is None or not digest.agrees(digest_of_tensor(tensor)):
                wrong.append(name)
            elif (own := sums.get(name)) is not None and (whole := _expected(tensor, own)) is not None:
                compared += 1
                wrong += [] if own.are(whole) else [name]
    return tuple(wrong), compared


def changed(before: Sequence[Mapping[str, str]], now: Sequence[Mapping[str, str]]) -> tuple[str, ...]:
    """Names of the tensors of which two results of `Make.held` say different things, whichever worker says them.

    >>> changed([{"a": "1", "b": "2"}, {"a": "3"}], [{"a": "3"}, {"a": "1", "b": "4"}])
    ('b',)
    """
    first, second = (Counter(told for worker in workers for told in worker.items()) for workers in (before, now))
    return tuple(sorted({name for name, _ in (first - second) + (second - first)}))


def _expected(tensor: Tensor, own: Sums) -> Sums | None:
    """Expected sums of a tensor in the workers' dtype; None if the dtype is unknown or the workers have added other
    units (bytes per summand)."""
    dtype = DTYPES.get(own.dtype)
    whole = sums_of(tensor.to(dtype)) if dtype is not None else None
    return whole if whole is not None and whole.unit == own.unit else None


def _together(workers: Sequence[Mapping[str, str]], digests: Mapping[str, TensorDigest]) -> dict[str, Sums]:
    """Add up the sums of all workers, by tensor. An output layer that is tied to the embedding counts as another copy
    of the embedding.

    Raises:
        WireError: a worker's reply is malformed.
    """
    found: dict[str, Sums] = {}
    try:
        for worker in workers:
            for name, text in worker.items():
                own = _EMBEDDING if name == _HEAD and _HEAD not in digests else name
                sums = Sums.parse(text)
                found.setdefault(own, Sums(sums.dtype, sums.unit)).add(sums)
    except (ValueError, TypeError) as error:
        raise WireError(f"a worker of a server reports malformed checksums of its memory: {error}") from None
    return found


@contextmanager
def _opened(folder: Path) -> Iterator[dict[str, Any]]:
    """Context manager: the open safetensors files of a folder, each by the names of its tensors."""
    with ExitStack() as stack:
        files = [stack.enter_context(safe_open(file, "pt")) for file in sorted(folder.glob("*.safetensors"))]
        yield {name: file for file in files for name in file.keys()}  # noqa: SIM118  # no mapping


def _link(place: Path, target: Path) -> None:
    new = place.with_suffix(f"{place.suffix}.new")
    new.unlink(missing_ok=True)
    os.symlink(target, new)
    new.replace(place)


def window_lacking(kind: str, folder: Path) -> int | None:
    """The smallest sliding window, in tokens, of the model in a folder, if servers of the make `kind` compute the model
    without it: longer sequences get other log-probabilities than the trainer's. None: they compute it, or there is
    none."""
    config = AutoConfig.from_pretrained(folder, local_files_only=True)
    if config.get_text_config().model_type not in capabilities_of(kind).without_window:
        return None
    return min(windows(config), default=None)
