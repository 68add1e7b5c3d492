"""The device of a process: its share of a GPU's memory, copies to it, and errors that name the process that ran out of
memory."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor

from stretto.core.errors import OutOfMemory

_WHOLE = 1.0
_SETTINGS = {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"}
_LONGEST = 300  # most characters of an allocator's message
_SHORT = ("out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "can't allocate memory")  # messages of NCCL, cuBLAS, the CPU


def take_share(share: float) -> None:
    """Limit the tensors of this process to the fraction `share` of its GPU's memory; other roles use the rest. Call it
    before the first tensor is created. Also enables expandable segments in torch's allocator, so that batches of
    different lengths leave no gaps, unless the environment configures the allocator. Does nothing without a GPU."""
    if not torch.cuda.is_available():
        return
    if not _SETTINGS & os.environ.keys():
        torch._C._accelerator_setAllocatorSettings("expandable_segments:True")
    if share < _WHOLE:
        torch.cuda.set_per_process_memory_fraction(share)


def copied(array: npt.NDArray[Any], device: torch.device | str) -> Tensor:
    """A tensor on a device with the numbers of an array; on the CPU it shares the array's memory. A GPU copies them in
    the order of its work, and the process does not wait."""
    tensor = torch.from_numpy(array)
    if torch.device(device).type == "cuda" and array.size:
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def spare(device: torch.device, coming: int) -> int | None:
    """Return the bytes of the GPU that this process may still allocate (free memory, within the process's memory
    fraction), minus `coming` bytes to be allocated soon. It may be negative; None on a CPU."""
    if device.type != "cuda":
        return None
    free, total = torch.cuda.mem_get_info(device)
    held = torch.cuda.memory_allocated(device)
    free += torch.cuda.memory_reserved(device) - held
    allowed = int(torch.cuda.get_per_process_memory_fraction(device) * total) - held
    return min(free, allowed) - coming


@contextmanager
def memory_named(who: str, gpus: Sequence[str], place: int, doing: str) -> Iterator[None]:
    """Context manager: a failed allocation in the block, also inside a library, is raised as OutOfMemory. `who` and
    `doing` name the process and its activity in the error. `gpus`: ids of the GPUs visible to the process, empty for
    CUDA's numbers; `place`: index of its GPU among them."""
    try:
        yield
    except RuntimeError as error:
        if not isinstance(error, torch.OutOfMemoryError) and not any(word in str(error) for word in _SHORT):
            raise
        how = " ".join(str(error).split())[:_LONGEST].partition(". ")
        device = f"GPU {gpus[place] if place < len(gpus) else place}" if torch.cuda.is_available() else "its device"
        raise OutOfMemory(who, device, doing, ". ".join(filter(None, (how[0], how[2].partition(". ")[0])))) from error
