"""Copies of a version's tensors in host memory, made beside the work of their device.

    compute stream   optimizer | forward and backward of the next step | waits | optimizer
    copy stream                  gather, round, copy ─────────► whole
    a thread                                                    hashes and writes, tensor by tensor

The parameters may change again once the copies are whole: the optimizer waits for them, what comes before it does not.
All that the copies need on the device is made on their own stream, so that its memory is taken again by the next
tensor, in order.
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
    """No work."""


@dataclass(frozen=True)
class Copies:
    """Tensors on the host by name, whole once `wait` returns. `wait` blocks its thread; `hold` makes later work on the
    current stream of the device wait. `sums`: of the tensors (`weights.sums`), where the device has computed them."""

    tensors: dict[str, Tensor]
    wait: Callable[[], None] = nothing
    hold: Callable[[], None] = nothing
    sums: Mapping[str, Tensor] = field(default_factory=dict)


def copied(whole: Iterable[tuple[str, Tensor]], forms: Mapping[str, torch.dtype], device: torch.device) -> Copies:
    """Copy the tensors in the dtypes of `forms`, each taken from `whole` when its turn comes; `device`: of the
    parameters."""
    if device.type == "cuda":
        return copied_beside(whole, forms, device)
    return Copies({name: torch.empty(one.shape, dtype=forms[name]).copy_(one) for name, one in whole})


def pinned(tensor: Tensor) -> Tensor:
    """Host memory for a tensor that the device writes by itself. torch keeps what is free for the next version."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)


def copied_beside(
    whole: Iterable[tuple[str, Tensor]],
    forms: Mapping[str, torch.dtype],
    device: torch.device,
    cuda: Any = torch.cuda,
    room: Callable[[Tensor], Tensor] = pinned,
) -> Copies:
    """As `copied`, on a stream of its own. `cuda`: streams and events as those of `torch.cuda`."""
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
            del tensor, rounded, summed  # their memory serves the next one
        done.record(stream)
    return Copies(tensors, done.synchronize, lambda: cuda.current_stream(device).wait_event(done), found)


@cache
def _stream(cuda: Any, device: torch.device) -> Any:
    return cuda.Stream(device)
