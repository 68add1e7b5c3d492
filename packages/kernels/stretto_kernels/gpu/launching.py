"""Triton, where it is installed and torch has GPU support (or TRITON_INTERPRET is set): the decorator of its kernels,
and the devices that run them."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch

try:
    if not (torch.version.cuda or torch.version.hip or "TRITON_INTERPRET" in os.environ):
        raise ImportError("this torch has no GPU to launch kernels on: a tenth of a second is saved")
    import triton
    import triton.language as tl
except ImportError:  # optional on a machine without a GPU
    triton = tl = None

__all__ = ["kernel", "launches_on", "tl", "triton"]


def kernel(function: Callable[..., Any]) -> Any:
    """Decorator: a Triton kernel, of which one compilation serves all values of its arguments `rows` and `count`;
    without Triton, the function itself."""
    return function if triton is None else triton.jit(function, do_not_specialize=["rows", "count"])


def launches_on(device: torch.device) -> bool:
    """Whether kernels can be used on a device: a GPU of Ampere or newer. False in Triton's interpreter, which is for
    tests, and without Triton."""
    if triton is None or triton.knobs.runtime.interpret or device.type != "cuda":
        return False
    return torch.cuda.get_device_capability(device)[0] >= 8
