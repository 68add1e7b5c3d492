"""The mailbox between the trainer and the engines: the trainer publishes versions, engines load them.

Each medium implements the protocols `Publisher` and `Subscriber`; `weights.shared_memory` is the medium of a single
machine. Tensors are named as in ``model.named_parameters()``, so tied parameters are published once. With LoRA adapters
only A and the scaled B of each layer are published, under the layer's name with the suffix `LORA_A` or `LORA_B`. The
weights of such a layer are the run's initial weights plus B A.

Copies of a version's tensors in host memory, made while their device continues to compute, and checksums that the
device computes: only 16 bytes leave a GPU.

    compute stream   optimizer | forward and backward of the next step | waits | optimizer
    copy stream                  gather, round, copy ─────────► complete
    a thread                                                    hashes and writes, tensor by tensor

The optimizer changes the parameters, so it waits until the copies are complete; the forward and backward passes before
it do not wait. Temporary tensors of the copies are allocated on the copy stream, so that the allocator reuses their
memory for the next tensor in stream order.

The plain sum adds the tensor's words, the placed sum adds each word times its position, both modulo 2^64. A flipped bit
changes the first sum, a swap of two different words the second. The sums detect accidents, not deliberate changes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor

from stretto.core.canary import TensorDigest

_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}
_BLOCK = 1 << 22  # words that are summed at once


def sums(tensor: Tensor) -> Tensor:
    """Two sums of a tensor's bits, as words of up to 8 bytes: of the words, and of each word times its position (from
    1), both modulo 2^64. Returns [2] int64 on the tensor's device."""
    flat, size = tensor.detach().contiguous().reshape(-1), tensor.nbytes
    width = next(width for width in _WORDS if size % width == 0 and width >= tensor.element_size())
    if flat.storage_offset() * flat.element_size() % width:
        flat = flat.clone()  # a view that begins between two words
    words, found = flat.view(_WORDS[width]), torch.zeros(2, dtype=torch.int64, device=tensor.device)
    for first in range(0, len(words), _BLOCK):
        block = words[first : first + _BLOCK].to(torch.int64)
        places = torch.arange(first + 1, first + 1 + len(block), device=tensor.device)
        found += torch.stack([block.sum(), (block * places).sum()])
    return found


def as_text(pair: Tensor) -> str:
    """Format `pair`, a result of `sums`, as 32 hexadecimal digits."""
    return "".join(f"{number % (1 << 64):016x}" for number in pair.tolist())


def texts(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """The two `sums` of each tensor as 32 hexadecimal digits, by name; empty for no tensors. The tensors are on one
    device, which all sums leave in one copy."""
    if not tensors:
        return {}
    return dict(zip(tensors, map(as_text, torch.stack([sums(one) for one in tensors.values()]).cpu()), strict=True))


@dataclass(frozen=True)
class Copies:
    """Host copies of tensors by name, complete once `wait` has returned. `wait` blocks the calling thread. `hold` makes
    later work on the device's current stream wait for the copies, and returns at once. `sums`: the two checksums of
    each tensor by name (see the function `sums`), valid after `wait`; empty on a CPU."""

    tensors: dict[str, Tensor]
    wait: Callable[[], None] = lambda: None
    hold: Callable[[], None] = lambda: None
    sums: Mapping[str, Tensor] = field(default_factory=dict)


def copied(whole: Iterable[tuple[str, Tensor]], forms: Mapping[str, torch.dtype], device: torch.device) -> Copies:
    """Copy (name, tensor) pairs to host memory; on CUDA the copies are only queued, on a stream of their own
    (`copied_beside`). `whole` yields the pairs, and is advanced only when the previous tensor has been copied or its
    copy is queued. `forms`: dtype of each copy by name. `device`: device of the parameters."""
    if device.type == "cuda":
        return copied_beside(whole, forms, device)
    return Copies({name: torch.empty(one.shape, dtype=forms[name]).copy_(one) for name, one in whole})


def pinned(tensor: Tensor) -> Tensor:
    """Uninitialized pinned host memory with the shape and dtype of `tensor`. torch caches freed pinned memory, so the
    next version reuses it."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)


def copied_beside(
    whole: Iterable[tuple[str, Tensor]],
    forms: Mapping[str, torch.dtype],
    device: torch.device,
    cuda: Any = torch.cuda,
    room: Callable[[Tensor], Tensor] = pinned,
) -> Copies:
    """Queue copies of (name, tensor) pairs to host memory, with the `sums` of each, on a stream of their own, and
    return before they are complete. `forms`: dtype of each copy by name, converted on the device. `cuda`: module with
    the streams and events of `torch.cuda`; `room`: allocates host memory for a tensor."""
    stream, done, tensors, found = _stream(cuda, device), cuda.Event(), dict[str, Tensor](), dict[str, Tensor]()
    stream.wait_stream(cuda.current_stream(device))  # the version's last update comes first
    with cuda.stream(stream):
        for name, tensor in whole:
            rounded = tensor.to(forms[name])  # on the device: fewer bytes leave it
            tensors[name] = room(rounded)
            tensors[name].copy_(rounded, non_blocking=True)
            summed = sums(rounded)
            found[name] = room(summed)
            found[name].copy_(summed, non_blocking=True)
            del tensor, rounded, summed  # their memory is reused for the next tensor
        done.record(stream)
    return Copies(tensors, done.synchronize, lambda: cuda.current_stream(device).wait_event(done), found)


@cache
def _stream(cuda: Any, device: torch.device) -> Any:
    return cuda.Stream(device)


#: Suffixes of adapter names, after their layer's name.
LORA_A, LORA_B = ".lora_A", ".lora_B"

#: Called with (name, tensor, dtype) of a parameter; returns the full tensor to publish, unsharded and in this dtype.
Gather = Callable[[str, Tensor, torch.dtype], Tensor]


def as_it_is(name: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """The `Gather` for tensors that are not sharded: returns the tensor in this dtype."""
    return tensor.to(dtype)


def stored(tensor: Tensor, dtype: torch.dtype | None) -> torch.dtype:
    """The dtype in which a tensor is published: `dtype` for a floating-point tensor, unless it is None; otherwise the
    tensor's own."""
    return dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype


@dataclass(frozen=True)
class Publication:
    """A version whose tensors are being copied, and which no engine can load yet.

    `write` publishes it, and returns the digest of each tensor as written: when it returns, every subscriber can load
    the version. `write` may run in any thread. `hold` makes later work on the tensors' device wait for the copies; call
    it before the tensors change. `size`: bytes of the version; `copied`: bytes of the copies in host memory.
    """

    write: Callable[[], Mapping[str, TensorDigest]]
    hold: Callable[[], None] = lambda: None
    size: int = 0
    copied: int = 0


class Publisher(Protocol):
    """The trainer's side of the mailbox: publishes versions of the weights."""

    def copy(self, version: int, tensors: Iterable[tuple[str, Tensor]], gather: Gather = as_it_is) -> Publication:
        """Start to copy the tensors of `version`, (name, tensor) pairs; the result's `write` publishes the copies.

        `gather` makes the whole tensors one by one, in order; each result is released before the next.
        """


class Subscriber(Protocol):
    """An engine's side of the mailbox: loads published versions. `checked`: number of bytes verified by all loads so
    far; it grows during a load."""

    checked: int

    def newest(self) -> int | None:
        """The newest published version; None before the first."""

    def load(self, version: int) -> Mapping[str, Tensor]:
        """Read and verify `version`; returns its tensors by name, on the CPU. The tensors may become invalid with the
        next load.

        Raises:
            TornPublication: size, names or checksum do not match; nothing was loaded.
            WireError: the version is not available, or no longer.
        """
