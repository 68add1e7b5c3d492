"""The mailbox between the trainer and the engines: the trainer publishes versions, engines load them.

One file per medium implements these two protocols; `shared_memory` is the one for a single machine. Names are those of
``model.named_parameters()``, so tied parameters travel once. Of a policy with adapters A and B alone travel, by the
name of their layer (`LORA_A`, `LORA_B`), B with its scale: the policy is the one that the run began with, plus B A.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

from torch import Tensor

from stretto.core.canary import TensorDigest

#: What the names of adapters end with, after that of their layer.
LORA_A, LORA_B = ".lora_A", ".lora_B"

#: Makes the tensor to publish from the named one, in its shape and dtype.
Gather = Callable[[str, Tensor], Tensor]


def as_it_is(name: str, tensor: Tensor) -> Tensor:
    """The gather of a process with unsharded tensors."""
    return tensor


class Publisher(Protocol):
    """The trainer's end."""

    def publish(
        self, version: int, tensors: Iterable[tuple[str, Tensor]], gather: Gather = as_it_is
    ) -> Mapping[str, TensorDigest] | None:
        """Make `version` the newest. When this returns, every subscriber can load it, whole. Returns the digest of each
        tensor as it was written, where the medium makes some.

        `gather` is called for one tensor after the other, in order; each result is released before the next.
        """
        ...


class GatheringPublisher:
    """The publisher of ranks 1, 2, ...: they take part in each gathering, and rank 0 alone publishes."""

    def publish(self, version: int, tensors: Iterable[tuple[str, Tensor]], gather: Gather = as_it_is) -> None:
        for name, tensor in tensors:
            gather(name, tensor)


class Subscriber(Protocol):
    """An engine's end. `checked` are the bytes that all its loads have read so far: they grow while one goes on."""

    checked: int

    def newest(self) -> int | None:
        """The version published last, None before the first."""
        ...

    def load(self, version: int) -> Mapping[str, Tensor]:
        """The tensors of `version` by name, on the CPU; they may be views that end with the next load.

        Raises:
            TornPublication: size, names or checksum do not fit; nothing was loaded.
            WireError: that version is not there (any more).
        """
        ...
