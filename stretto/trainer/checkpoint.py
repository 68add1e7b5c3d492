"""A trainer's checkpoint: all of its state (it draws no random numbers).

    shard-00001-...safetensors   the part of rank 0: parameters, AdamW's two moments and its step counts, by name, in
                                 files of about 64 MiB
    shard-00002-...safetensors   the part of rank 1, and so on
    trainer.json                 version, bad steps in a row
    critic/                      the same of a critic, where there is one

torch's distributed checkpoints write and read it in their safetensors form: any number of ranks can go on from what
any other number has written, and nothing is a pickle. A `TrainerState` is written while training goes on.
`store.folder.checkpoints` forces a checkpoint to disk, seals it and switches it in.
"""

from __future__ import annotations

import math
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

from stretto.core.errors import StoreError, described
from stretto.trainer.optimizer import Optimizer
from stretto.trainer.parallel.ranks import Ranks

_POSITION = "trainer.json"
_FILE_BYTES = 64 << 20
_PARAMETER, _STEPS = "parameter", "steps"
_MOMENTS = ("exp_avg", "exp_avg_sq")  # AdamW's own words

#: What torch and safetensors raise when a file is not what it should be, or cannot be written.
_ERRORS = (OSError, RuntimeError, ValueError, SafetensorError, CheckpointException)


class TrainerPosition(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Example: ``TrainerPosition(version=50, bad_steps_in_a_row=0)``"""

    version: int
    bad_steps_in_a_row: int


@dataclass(frozen=True)
class TrainerState:
    """A copy of this rank's part on the CPU, which no training changes."""

    position: TrainerPosition
    state: dict[str, Tensor]
    ranks: Ranks

    @classmethod
    def of(cls, optimizer: Optimizer, version: int) -> Self:
        """The copy."""
        position = TrainerPosition(version=version, bad_steps_in_a_row=optimizer.bad_steps_in_a_row)
        ranks = optimizer.ranks
        return cls(position, {name: ranks.copy_to_cpu(tensor) for name, tensor in _state(optimizer).items()}, ranks)

    def write(self, folder: Path) -> None:
        """Write it into `folder`, in any thread; all ranks do.

        Raises:
            StoreError: the folder cannot be written (disk full, read-only).
        """
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with _no_group_warning():
                # torch builds a file in memory before it writes it: small files, so that the copy is small.
                writer = HuggingFaceStorageWriter(str(folder), self._files(), save_distributed=True)
                writer.sync_files = False  # the store does
                group = self.ranks.second_group
                state_dict_saver.save(self.state, storage_writer=writer, process_group=group)
            if self.ranks.rank == 0:
                (folder / _POSITION).write_bytes(msgspec.json.encode(self.position))
        except _ERRORS as error:
            raise StoreError(f"{folder}: the checkpoint cannot be written: {_described(error)}") from error

    def _files(self) -> dict[str, int]:
        """The number of the file of each tensor, by name: the same on all ranks, files of about equal size."""
        numbers, number, size = dict[str, int](), 1, 0
        for name, tensor in self.state.items():
            part = tensor.nbytes // self.ranks.count
            if size and size + part > _FILE_BYTES:
                number, size = number + 1, 0
            numbers[name] = number
            size += part
        return numbers


def _described(error: BaseException) -> str:
    """One line; torch wraps the errors of ranks in one of its own, with tracebacks."""
    if isinstance(error, CheckpointException):
        return "; ".join(sorted({_described(found) for found, _ in error.failures.values()}))
    return described(error) if isinstance(error, OSError) else str(error)


def load(folder: Path, optimizer: Optimizer) -> int:
    """Load parameters and optimizer state in place; returns the version. All ranks call it.

    Raises:
        StoreError: the folder is not whole, or is of another model; nothing has changed.
    """
    reader, ours = HuggingFaceStorageReader(str(folder)), _state(optimizer)
    try:
        position = msgspec.json.decode((folder / _POSITION).read_bytes(), type=TrainerPosition)
        theirs = reader.read_metadata().state_dict_metadata
        _refuse_another_model(folder, theirs, {name: tensor.shape for name, tensor in ours.items()})
        found = {name: torch.empty_like(tensor) for name, tensor in ours.items()}
        with _no_group_warning():
            state_dict_loader.load(found, storage_reader=reader)
    except (*_ERRORS, msgspec.MsgspecError) as error:
        raise StoreError(f"checkpoint {folder} cannot be read: {_described(error)}") from error
    with torch.no_grad():
        for name, tensor in ours.items():
            tensor.copy_(found[name])
    for steps, (_, parameter) in zip(found[_STEPS], _trained(optimizer), strict=True):
        optimizer.adamw.state[parameter]["step"].copy_(steps)
    optimizer.bad_steps_in_a_row = position.bad_steps_in_a_row
    return position.version


def _trained(optimizer: Optimizer) -> list[tuple[str, Tensor]]:
    return [(name, parameter) for name, parameter in optimizer.trained.named_parameters() if parameter.requires_grad]


def _state(optimizer: Optimizer) -> dict[str, Tensor]:
    """All state by name. Before its first step AdamW has no moments, so they are made here."""
    state, counts = dict[str, Tensor](), list[Tensor]()
    for name, parameter in _trained(optimizer):
        own = optimizer.adamw.state[parameter]
        if not own:
            own["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
            own.update({moment: torch.zeros_like(parameter) for moment in _MOMENTS})
        state[f"{_PARAMETER}.{name}"] = parameter.detach()
        state |= {f"{moment}.{name}": own[moment] for moment in _MOMENTS}
        counts.append(own["step"])
    return state | {_STEPS: torch.stack(counts)}


def check(folder: Path, policy: nn.Module) -> None:
    """Whether a trainer of `policy` can go on from a checkpoint; nothing but names and shapes is read.

    Raises:
        StoreError: it is not whole, or of another model or format.
    """
    trained = {f"model.{name}": p for name, p in policy.named_parameters() if p.requires_grad}
    wanted = {f"{kind}.{name}": p.shape for kind in (_PARAMETER, *_MOMENTS) for name, p in trained.items()}
    try:
        found = HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata
    except _ERRORS as error:
        raise StoreError(f"checkpoint {folder} cannot be read: {error}") from error
    _refuse_another_model(folder, found, wanted | {_STEPS: torch.Size([len(trained)])})


def _refuse_another_model(folder: Path, theirs: Mapping[str, object], wanted: Mapping[str, torch.Size]) -> None:
    """Refuse unless it has exactly our tensors, whole and in our shapes."""
    if not any(folder.glob("shard-*.safetensors")):
        raise StoreError(f"checkpoint {folder} is of another format: it has no shards")
    found = {name: _whole_shape(meta) for name, meta in theirs.items()}
    if found != wanted:
        names = {name.removeprefix(f"{_PARAMETER}.") for name in dict(found.items() ^ wanted.items())}
        differing = ", ".join(sorted(name for name in names if not name.startswith((_STEPS, *_MOMENTS))))
        raise StoreError(f"checkpoint {folder} is of another model; these parameters differ: {differing}")


def _whole_shape(meta: object) -> torch.Size:
    """The shape of a tensor on disk; an impossible shape where a shard is missing."""
    assert isinstance(meta, TensorStorageMetadata), type(meta)
    held = sum(math.prod(chunk.sizes) for chunk in meta.chunks)
    return meta.size if held == math.prod(meta.size) else torch.Size([0, 0, 0, 0, 0])


@contextmanager
def _no_group_warning() -> Iterator[None]:
    """Without torch's warning that one process has no process group."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield
