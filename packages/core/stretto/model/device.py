"""The device of a process: its share of a GPU's memory, and the name of what ran out of memory."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from stretto.core.errors import OutOfMemory

_WHOLE = 1.0
_SETTINGS = {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"}
_LONGEST = 300  # characters of an allocator's sentence
_SHORT = ("out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "can't allocate memory")  # of NCCL, cuBLAS, a processor


def take_share(share: float) -> None:
    """Keep the tensors of this process within `share` of its GPU's memory, since other roles have the rest. Its memory
    grows in place, so that batches of many lengths leave no gaps, unless the environment says otherwise. Comes before
    the first tensor."""
    if not torch.cuda.is_available():
        return
    if not _SETTINGS & os.environ.keys():
        torch._C._accelerator_setAllocatorSettings("expandable_segments:True")
    if share < _WHOLE:
        torch.cuda.set_per_process_memory_fraction(share)


def spare(device: torch.device, coming: int) -> int | None:
    """Bytes that tensors of this process may still take on its GPU, less those that are coming; None on a processor."""
    if device.type != "cuda":
        return None
    free, total = torch.cuda.mem_get_info(device)
    held = torch.cuda.memory_allocated(device)
    free += torch.cuda.memory_reserved(device) - held
    allowed = int(torch.cuda.get_per_process_memory_fraction(device) * total) - held
    return min(free, allowed) - coming


@contextmanager
def memory_named(who: str, gpus: Sequence[str], place: int, doing: str) -> Iterator[None]:
    """Context manager: an allocation that fails, also inside a library, is raised as OutOfMemory. `gpus`: ids of the
    GPUs that the process sees, `place` its own among them; empty: as CUDA numbers them."""
    try:
        yield
    except RuntimeError as error:
        if not isinstance(error, torch.OutOfMemoryError) and not any(word in str(error) for word in _SHORT):
            raise
        how = " ".join(str(error).split())[:_LONGEST].partition(". ")
        device = f"GPU {gpus[place] if place < len(gpus) else place}" if torch.cuda.is_available() else "its device"
        raise OutOfMemory(who, device, doing, ". ".join(filter(None, (how[0], how[2].partition(". ")[0])))) from error
