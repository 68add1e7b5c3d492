"""The mailbox between the trainer and the engines: the trainer publishes versions, engines load them.

One file per medium implements these two protocols; `shared_memory` is the one for a single machine. Names are those of
``model.named_parameters()``, so tied parameters are published once. For a policy with adapters only A and the scaled B
are published, under their layer's name (`LORA_A`, `LORA_B`): the policy is the run's initial one plus B A.
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

#: (name, tensor, dtype) -> the full tensor to publish, of the same shape, rounded to the dtype.
Gather = Callable[[str, Tensor, torch.dtype], Tensor]


def as_it_is(name: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """The `Gather` for tensors that are not sharded."""
    return tensor.to(dtype)


def stored(tensor: Tensor, dtype: torch.dtype | None) -> torch.dtype:
    """The dtype of a tensor in a version whose floating-point numbers have this one; None: their own."""
    return dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype


@dataclass(frozen=True)
class Publication:
    """A version whose tensors are copied, and which no engine can load yet.

    `write` makes it the newest, in any thread: when it returns, every subscriber can load it. It returns the digest of
    each tensor as written. `hold` makes later work on the tensors' device wait for the copies: call it before the
    tensors change. `size` of the version and `copied` for it so far, in bytes.
    """

    write: Callable[[], Mapping[str, TensorDigest]]
    hold: Callable[[], None] = nothing
    size: int = 0
    copied: int = 0


class Publisher(Protocol):
    """The trainer's side of the mailbox."""

    def copy(self, version: int, tensors: Iterable[tuple[str, Tensor]], gather: Gather = as_it_is) -> Publication:
        """Copy the tensors of `version`.

        `gather` is called for the tensors one by one, in order; each result is released before the next.
        """
        ...


class GatheringPublisher:
    """Publisher of ranks 1, 2, ...: takes part in each gather; only rank 0 publishes. `dtype`: as that of rank 0's."""

    def __init__(self, dtype: torch.dtype | None = None) -> None:
        self._dtype = dtype

    def copy(self, version: int, tensors: Iterable[tuple[str, Tensor]], gather: Gather = as_it_is) -> Publication:
        for name, tensor in tensors:
            gather(name, tensor, stored(tensor, self._dtype))
        return Publication(dict)


class Subscriber(Protocol):
    """An engine's side of the mailbox. `checked`: bytes read by all loads so far; it grows during a load."""

    checked: int

    def newest(self) -> int | None:
        """The newest published version; None before the first."""
        ...

    def load(self, version: int) -> Mapping[str, Tensor]:
        """The tensors of `version` by name, on the CPU. They may be views that become invalid with the next load.

        Raises:
            TornPublication: size, names or checksum do not match; nothing was loaded.
            WireError: the version is not available (any more).
        """
        ...
