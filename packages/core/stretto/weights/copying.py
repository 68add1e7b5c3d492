"""Copies of a version's tensors in host memory, made while their device continues to compute.

    compute stream   optimizer | forward and backward of the next step | waits | optimizer
    copy stream                  gather, round, copy ─────────► complete
    a thread                                                    hashes and writes, tensor by tensor

The optimizer changes the parameters, so it waits until the copies are complete; the forward and backward passes before
it do not wait. Temporary tensors of the copies are allocated on the copy stream, so that the allocator reuses their
memory for the next tensor in stream order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor

from stretto.weights.sums import sums


def nothing() -> None:
    """Do nothing."""


@dataclass(frozen=True)
class Copies:
    """Host copies of tensors by name, complete once `wait` has returned. `wait` blocks the calling thread. `hold` makes
    later work on the device's current stream wait for the copies, and returns at once. `sums`: checksums of the tensors
    (`weights.sums`) that the device computed; empty on a CPU."""

    tensors: dict[str, Tensor]
    wait: Callable[[], None] = nothing
    hold: Callable[[], None] = nothing
    sums: Mapping[str, Tensor] = field(default_factory=dict)


def copied(whole: Iterable[tuple[str, Tensor]], forms: Mapping[str, torch.dtype], device: torch.device) -> Copies:
    """Copy (name, tensor) pairs to host memory. `whole` yields the pairs, and is advanced only when the previous tensor
    has been copied or its copy is queued. `forms`: dtype of each copy by name. `device`: device of the parameters; on
    CUDA the copies are made on a stream of their own."""
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
    """Queue the copies of `copied` on a stream of their own, and return before they are complete. `cuda`: module with
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
