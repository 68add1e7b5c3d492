"""Checksum of a tensor from two sums of its bits, computed on the tensor's device: only 16 bytes leave a GPU.

The plain sum adds the tensor's words, the placed sum adds each word times its position, both modulo 2^64. A flipped bit
changes the first sum, a swap of two different words the second. The sums detect accidents, not deliberate changes.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}
_BLOCK = 1 << 22  # words that are summed at once


def sums(tensor: Tensor) -> Tensor:
    """The plain and the placed sum of a tensor's bits: [2] int64, on the tensor's device."""
    flat, size = tensor.detach().contiguous().reshape(-1), tensor.nbytes
    width = next(width for width in _WORDS if size % width == 0 and width >= tensor.element_size())
    words, found = flat.view(_WORDS[width]), torch.zeros(2, dtype=torch.int64, device=tensor.device)
    for first in range(0, len(words), _BLOCK):
        block = words[first : first + _BLOCK].to(torch.int64)
        places = torch.arange(first + 1, first + 1 + len(block), device=tensor.device)
        found += torch.stack([block.sum(), (block * places).sum()])
    return found


def as_text(pair: Tensor) -> str:
    """Format the two sums (a result of `sums`) as 32 hexadecimal digits."""
    return "".join(f"{number % (1 << 64):016x}" for number in pair.tolist())


def texts(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """The sums of each tensor as 32 hexadecimal digits, by name. All sums leave the device in one copy."""
    if not tensors:
        return {}
    return dict(zip(tensors, map(as_text, torch.stack([sums(one) for one in tensors.values()]).cpu()), strict=True))
