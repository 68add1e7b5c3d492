"""The mailbox between the trainer and the engines: the trainer publishes versions, engines load them.

One file per medium implements these two protocols; `shared_memory` is the one for a single machine. Names are those of
``model.named_parameters()``, so tied parameters travel once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol

from torch import Tensor


class Publisher(Protocol):
    """The trainer's end."""

    def publish(self, version: int, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Make `version` the newest. When this returns, every subscriber can load it, whole."""
        ...


class Subscriber(Protocol):
    """An engine's end."""

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
