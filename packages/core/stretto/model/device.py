"""The device of a process: its share of a GPU's memory, and the name of what ran out of memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from stretto.core.errors import OutOfMemory

_WHOLE = 1.0
_LONGEST = 300  # characters of an allocator's sentence
_SHORT = ("out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "can't allocate memory")  # of NCCL, cuBLAS, a processor


def take_share(share: float) -> None:
    """Keep the tensors of this process within `share` of its GPU's memory, since other roles have the rest."""
    if share < _WHOLE and torch.cuda.is_available():
        torch.cuda.set_per_process_memory_fraction(share)


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
