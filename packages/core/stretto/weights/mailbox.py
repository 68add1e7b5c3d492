"""The mailbox between the trainer and the engines: the trainer publishes versions, engines load them.

Each medium implements the protocols `Publisher` and `Subscriber`; `weights.shared_memory` is the medium of a single
machine. Tensors are named as in ``model.named_parameters()``, so tied parameters are published once. With LoRA adapters
only A and the scaled B of each layer are published, under the layer's name with the suffix `LORA_A` or `LORA_B`. The
weights of such a layer are the run's initial weights plus B A.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from stretto.core.canary import TensorDigest
from stretto.weights.copying import nothing

#: Suffixes of adapter names, after their layer's name.
LORA_A, LORA_B = ".lora_A", ".lora_B"

#: Called with (name, tensor, dtype) of a parameter; returns the full tensor to publish, unsharded and in this dtype.
Gather = Callable[[str, Tensor, torch.dtype], Tensor]


def as_it_is(name: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """The `Gather` for tensors that are not sharded: only convert the dtype."""
    return tensor.to(dtype)


def stored(tensor: Tensor, dtype: torch.dtype | None) -> torch.dtype:
    """The dtype in which a tensor is published: `dtype` for a floating-point tensor, unless it is None; otherwise the
    tensor's own."""
    return dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype


@dataclass(frozen=True)
class Publication:
    """A version whose tensors are being copied, and which no engine can load yet.

    `write` publishes it, and returns the digest of each tensor as written: when it returns, every subscriber can load
    the version. It may run in any thread. `hold` makes later work on the tensors' device wait for the copies; call it
    before the tensors change. `size`: bytes of the version; `copied`: bytes of the copies in host memory.
    """

    write: Callable[[], Mapping[str, TensorDigest]]
    hold: Callable[[], None] = nothing
    size: int = 0
    copied: int = 0


class Publisher(Protocol):
    """The trainer's side of the mailbox."""

    def copy(self, version: int, tensors: Iterable[tuple[str, Tensor]], gather: Gather = as_it_is) -> Publication:
        """Start to copy the tensors of `version`, (name, tensor) pairs; the result's `write` publishes the copies.

        `gather` makes the whole tensors one by one, in order; each result is released before the next.
        """


class Subscriber(Protocol):
    """An engine's side of the mailbox. `checked`: number of bytes verified by all loads so far; it grows during a
    load."""

    checked: int

    def newest(self) -> int | None:
        """The newest published version; None before the first."""

    def load(self, version: int) -> Mapping[str, Tensor]:
        """Read and verify `version`; returns its tensors by name, on the CPU. They may become invalid with the next
        load.

        Raises:
            TornPublication: size, names or checksum do not match; nothing was loaded.
            WireError: the version is not available, or no longer.
        """
