"""Checkpoints of a trainer. They hold all of its state; a trainer draws no random numbers.

    shard-00001-...safetensors   the part of rank 0: parameters, AdamW's two moments and its step counts, by name, in
                                 files of about 64 MiB
    shard-00002-...safetensors   the part of rank 1, and so on
    trainer.json                 version, bad steps in a row
    critic/                      the same files for the critic, if there is one

Written and read as torch distributed checkpoints in safetensors files, without pickle. Any number of ranks can load a
checkpoint that any other number has written. A `TrainerState` is written while training continues.
`store.checkpoints` forces a checkpoint to disk, seals it and makes it the run's newest.

Ranks on other machines may not see the folder, which is tested each time. If a rank does not see it, rank 0 alone reads
and writes, and the shards go over the network, file by file.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import secrets
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import msgspec
import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from stretto.core.errors import UNREADABLE, StoreError, described
from stretto.trainer.adapters import ADAPTER, adapted_layers
from stretto.trainer.optimizer import MOMENTS, Optimizer
from stretto.trainer.ranks import Ranks

_POSITION = "trainer.json"
_FILE_BYTES = 64 << 20
_LISTED_SECONDS = 60.0
_POLL_SECONDS = 0.1
_PARAMETER, _STEPS = "parameter", "steps"

_SHOWN = 4  # names in a message
#: Errors of torch and safetensors for an invalid file, or a file that cannot be written.
_ERRORS = (OSError, RuntimeError, ValueError, SafetensorError, CheckpointException)


class _TrainerPosition(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Contents of ``trainer.json``. `bad_steps_in_a_row`: number of the last optimizer steps that were all skipped; 0
    after one that was taken. `scale`: alpha / rank of the adapters; None: without adapters, or not recorded.

    Example: ``_TrainerPosition(version=50, bad_steps_in_a_row=0)``
    """

    version: int
    bad_steps_in_a_row: int
    scale: float | None = None


@dataclass(frozen=True)
class TrainerState:
    """A copy of this rank's training state on the CPU, unaffected by further training."""

    position: _TrainerPosition
    state: dict[str, Tensor]  # as `_state`
    ranks: Ranks

    @classmethod
    def of(cls, optimizer: Optimizer, version: int) -> Self:
        """Copy the parameters and the optimizer's state to the CPU; all ranks must call it. `version`: the policy's."""
        position = _TrainerPosition(version, optimizer.bad_steps_in_a_row, _scale(optimizer))
        ranks = optimizer.ranks
        return cls(position, {name: ranks.copy_to_cpu(tensor) for name, tensor in _state(optimizer).items()}, ranks)

    def write(self, folder: Path) -> None:
        """Write this copy as a checkpoint into `folder`, on rank 0's machine. All ranks call it, each in any thread.
        Raises StoreError if the folder cannot be written (disk full, read-only)."""
        try:
            if self.ranks.rank == 0:
                folder.mkdir(parents=True, exist_ok=True)
            with _no_group_warning():
                if _all_see(folder, self.ranks):
                    self._save(folder, self.state, _files(self.state, self.ranks.count))
                    _wait_for_files(folder, self.ranks)
                else:  # rank 0 holds one file at a time
                    files = _files(self.state, 1)
                    for names in _by_file(files):
                        part = {name: self.ranks.gather(self.state[name]) for name in names}
                        if self.ranks.rank == 0:
                            self._save(folder, part, files, alone=True)
            if self.ranks.rank == 0:
                (folder / _POSITION).write_bytes(msgspec.json.encode(self.position))
        except torch.OutOfMemoryError:
            raise
        except _ERRORS as error:
            raise StoreError(f"{folder}: the checkpoint cannot be written: {_described(error)}") from error

    def _save(self, folder: Path, state: dict[str, Tensor], files: Mapping[str, int], *, alone: bool = False) -> None:
        """Write `state` into files with these numbers (`_files`). `alone`: rank 0 writes full tensors by itself."""
        # torch builds a file in memory before it writes it: small files, so that the copy is small.
        writer = HuggingFaceStorageWriter(str(folder), dict(files), save_distributed=True)
        writer.sync_files = False  # the store does
        writer.per_thread_copy_ahead = 0  # the copies are in host memory: no stream, and no CUDA in this thread
        group = None if alone else self.ranks.second_group
        state_dict_saver.save(state, storage_writer=writer, process_group=group, no_dist=alone)


def _files(state: Mapping[str, Tensor], ranks: int) -> dict[str, int]:
    """Assign each tensor a file number, by name, so that files have about 64 MiB per rank. Equal on all ranks."""
    numbers, number, size = dict[str, int](), 1, 0
    for name, tensor in state.items():
        part = tensor.nbytes // ranks
        if size and size + part > _FILE_BYTES:
            number, size = number + 1, 0
        numbers[name] = number
        size += part
    return numbers


def _by_file(files: Mapping[str, int]) -> list[list[str]]:
    """The names of the tensors of each file."""
    return [list(names) for _, names in itertools.groupby(files, key=files.__getitem__)]


def _all_see(folder: Path, ranks: Ranks) -> bool:
    """Whether every rank sees rank 0's folder at this path. Rank 0 creates a file with a random name for the test, so
    that no cached directory listing can contain it."""
    (number,) = ranks.broadcast([secrets.randbits(62)])
    seen = folder / f".seen-{number:x}"
    if ranks.rank == 0:
        seen.touch()
    ranks.all_reduce_number(0)  # a barrier: rank 0 has made it
    blind = ranks.all_reduce_number(not seen.exists())
    if ranks.rank == 0:
        seen.unlink()
    return not blind


def _wait_for_files(folder: Path, ranks: Ranks) -> None:
    """Wait until rank 0's machine lists the files written by other ranks, since a network file system may lag; OSError
    if they are not listed within a minute."""
    written = ranks.all_reduce_number(len(list(folder.glob(f"shard-{ranks.rank + 1:05d}-*"))))
    end = time.monotonic() + _LISTED_SECONDS
    while ranks.rank == 0 and len(list(folder.glob("shard-*"))) < written:
        if time.monotonic() > end:
            raise OSError(f"{written} files were written, and the machine of rank 0 does not list all of them")
        time.sleep(_POLL_SECONDS)


def _all_read(folder: Path, ranks: Ranks) -> bool:
    """Whether every rank (all must call it) finds the same files at this path as rank 0: names, sizes and
    ``trainer.json`` are equal. OSError if a folder with files has no ``trainer.json``."""
    files = sorted((path.name, path.stat().st_size) for path in folder.glob("*") if path.is_file())
    position = (folder / _POSITION).read_bytes() if files else b""
    number = int.from_bytes(hashlib.sha256(repr((files, position)).encode()).digest()[:7])
    (theirs,) = ranks.broadcast([number])
    return not ranks.all_reduce_number(number != theirs)


def _described(error: BaseException) -> str:
    """An error in one line, without the tracebacks with which torch wraps errors of ranks."""
    if isinstance(error, CheckpointException):
        return "; ".join(sorted({_described(found) for found, _ in error.failures.values()}))
    return described(error) if isinstance(error, OSError) else str(error)


def load(folder: Path, optimizer: Optimizer) -> int:
    """Load parameters and optimizer state into `optimizer`; returns the policy's version. All ranks must call it, with
    rank 0's folder.

    Raises:
        StoreError: the folder is incomplete, or of another model; nothing has changed. With several ranks or on a GPU
            also if a file cannot be read to its end; then the state is partly overwritten and training cannot
            continue.
    """
    ours, ranks, scale = _state(optimizer), optimizer.ranks, _scale(optimizer)
    try:
        with _no_group_warning():
            if ranks.count > 1 or optimizer.device.type != "cpu":  # in place, so that no GPU holds its part twice
                seen = _all_read(folder, ranks)
                position = _read(folder, ours, scale) if seen else _receive(folder, ours, ranks, scale)
                found = {_STEPS: ours[_STEPS]}
            else:
                found = {name: torch.empty_like(tensor) for name, tensor in ours.items()}
                position = _read(folder, found, scale)
    except torch.OutOfMemoryError:
        raise
    except (*_ERRORS, *UNREADABLE) as error:
        raise StoreError(f"checkpoint {folder} cannot be read: {_described(error)}") from error
    with torch.no_grad():
        for name, tensor in found.items():
            ours[name].copy_(tensor)
    for steps, (_, parameter) in zip(found[_STEPS], _trained(optimizer), strict=True):
        optimizer.adamw.state[parameter]["step"].copy_(steps)
    optimizer.bad_steps_in_a_row = position.bad_steps_in_a_row
    return position.version


def _read(folder: Path, found: dict[str, Tensor], scale: float | None) -> _TrainerPosition:
    """Fill `found` from the folder, and return the checkpoint's position; each rank reads its own part. Raises
    StoreError if the checkpoint is of another model, the reader's error if it is damaged. `scale`: of the adapters here
    (`_TrainerPosition`)."""
    reader, position = _checked(folder, found, scale)
    state_dict_loader.load(found, storage_reader=reader)
    return position


@torch.no_grad()
def _receive(folder: Path, found: Mapping[str, Tensor], ranks: Ranks, scale: float | None) -> _TrainerPosition:
    """Fill `found` in place. Rank 0 reads all files, about one at a time, and sends each rank its shard. Raises
    StoreError if the checkpoint is of another model, the reader's error if it is damaged. `scale`: of the adapters here
    (`_TrainerPosition`)."""
    reader, position = _checked(folder, found, scale) if ranks.rank == 0 else (None, _TrainerPosition(0, 0))
    version, bad_steps = ranks.broadcast([position.version, position.bad_steps_in_a_row])
    for names in _by_file(_files(found, 1)):
        whole = dict[str, Tensor]()
        if reader is not None:
            whole = {name: torch.empty(found[name].shape, dtype=found[name].dtype) for name in names}
            state_dict_loader.load(whole, storage_reader=reader, no_dist=True)
        for name in names:
            ranks.scatter(whole.get(name), found[name])
    return _TrainerPosition(version, bad_steps)


def _checked(
    folder: Path, wanted: Mapping[str, Tensor], scale: float | None
) -> tuple[HuggingFaceStorageReader, _TrainerPosition]:
    """Open a checkpoint whose tensors have the names and shapes of `wanted`. Raises StoreError if it has others, or is
    of adapters with another scale; or one of `_ERRORS` or `UNREADABLE` if it is damaged."""
    reader = HuggingFaceStorageReader(str(folder))
    position = msgspec.json.decode((folder / _POSITION).read_bytes(), type=_TrainerPosition)
    theirs = reader.read_metadata().state_dict_metadata
    _refuse_another_model(folder, theirs, {name: tensor.shape for name, tensor in wanted.items()})
    if None not in (scale, position.scale) and scale != position.scale:
        told = f"their scale alpha / rank is {position.scale:g}, and here it is {scale:g}"
        raise StoreError(f"checkpoint {folder} is of other adapters: {told}")
    return reader, position


def _scale(optimizer: Optimizer) -> float | None:
    """Alpha / rank of the adapters that are trained; None without adapters."""
    return next((layer.scaling[ADAPTER] for layer in adapted_layers(optimizer.trained).values()), None)


def _trained(optimizer: Optimizer) -> list[tuple[str, Tensor]]:
    """The parameters that are trained, as (name, parameter)."""
    return [(name, parameter) for name, parameter in optimizer.trained.named_parameters() if parameter.requires_grad]


def _state(optimizer: Optimizer) -> dict[str, Tensor]:
    """The parameters, the optimizer's moments and its step counts by name; on their device, not copied."""
    state, counts = dict[str, Tensor](), list[Tensor]()
    for name, parameter in _trained(optimizer):
        own = optimizer.state_of(parameter)
        state[f"{_PARAMETER}.{name}"] = parameter.detach()
        state |= {f"{moment}.{name}": own[moment] for moment in MOMENTS}
        counts.append(own["step"])
    return state | {_STEPS: torch.stack(counts)}


def check(folder: Path, policy: nn.Module) -> None:
    """Check that a trainer of `policy`, a model with adapters if the recipe has them, can load a checkpoint, by names
    and shapes only. Raises StoreError if the checkpoint is incomplete, or of another model or format."""
    trained = {f"model.{name}": p for name, p in policy.named_parameters() if p.requires_grad}
    wanted = {f"{kind}.{name}": p.shape for kind in (_PARAMETER, *MOMENTS) for name, p in trained.items()}
    try:
        found = HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata
    except _ERRORS as error:
        raise StoreError(f"checkpoint {folder} cannot be read: {error}") from error
    _refuse_another_model(folder, found, wanted | {_STEPS: torch.Size([len(trained)])})


def _refuse_another_model(folder: Path, theirs: Mapping[str, object], wanted: Mapping[str, torch.Size]) -> None:
    """Raise StoreError unless a checkpoint has exactly the wanted tensors, in their shapes. `theirs`: metadata of its
    tensors."""
    if not any(folder.glob("shard-*.safetensors")):
        raise StoreError(f"checkpoint {folder} is of another format: it has no shards")
    found = {name: _whole_shape(meta) for name, meta in theirs.items()}
    if found != wanted:
        names = {name.removeprefix(f"{_PARAMETER}.") for name in dict(found.items() ^ wanted.items())}
        differing = sorted(name for name in names if not name.startswith((_STEPS, *MOMENTS)))
        shown = ", ".join(differing[:_SHOWN]) + (f" and {len(differing) - _SHOWN} more" * (len(differing) > _SHOWN))
        raise StoreError(f"checkpoint {folder} is of another model; these parameters differ: {shown}")


def _whole_shape(meta: object) -> torch.Size:
    """Shape of a tensor on disk; if a shard is missing, a shape that no tensor of a model has."""
    assert isinstance(meta, TensorStorageMetadata), type(meta)
    held = sum(math.prod(chunk.sizes) for chunk in meta.chunks)
    return meta.size if held == math.prod(meta.size) else torch.Size([0, 0, 0, 0, 0])


@contextmanager
def _no_group_warning() -> Iterator[None]:
    """Suppress torch's warning that a single process has no process group."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield
