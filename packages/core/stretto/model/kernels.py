"""Choice of the fastest matmul kernel of this machine for each linear layer of a model (`stretto_kernels`).

Choices are kept for the user in `core.machine.cache_folder`, and for a run in a file of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from torch import nn

from stretto.core.machine import cache_folder, cores, processor
from stretto_kernels.steps import matmul
from stretto_kernels.steps.matmul import (
    FILE,
    GENERATION,
    TRAINING,
    Chooser,
    KernelChoice,
    Name,
    OneDnnLinear,
    Shape,
    unrecorded,
)

__all__ = ["TRAINING", "OneDnnLinear", "choose", "unrecorded", "use_onednn"]


def choose(
    shapes: Iterable[Shape], dtype: torch.dtype, kernels: Sequence[Name], record: Path | None = None
) -> dict[Shape, KernelChoice]:
    """Choose one of `kernels` for each weight shape [N, K]; shapes too small to matter are left out of the result.

    A choice comes from the file `record` of the run, else from the user's cache, else from a measurement, and is
    written to both files (`record` None: to the cache alone). A file that cannot be written is not used, with a
    warning.
    """
    machine = f"{processor()}, {cores()} cores"  # a key, which run folders keep
    return matmul.choose(shapes, dtype, kernels, record, machine=machine, cache=cache_folder() / FILE)


def use_onednn(model: nn.Module, kernels: Sequence[Name] = GENERATION, chooser: Chooser = choose) -> int:
    """Make every plain `nn.Linear` of the model on the CPU, or the meta device, use its fastest kernel, in place;
    returns the number of changed layers.

    `kernels`: kernels to choose from. If ``columns`` is among them, weights may change their memory layout. `chooser`:
    chooses a kernel for each weight shape.
    """
    return matmul.use_onednn(model, kernels, chooser)
