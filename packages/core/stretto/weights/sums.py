"""Two sums of a tensor's bits, computed where the tensor lies: 16 bytes leave a GPU in place of the tensor.

`plain` adds the tensor's words, `placed` adds each times its position, both modulo 2^64: a flipped bit changes the
first, a swap of two words the second. They tell a tensor from what it should be, not from what somebody made alike.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}
_BLOCK = 1 << 22  # words at once


def sums(tensor: Tensor) -> Tensor:
    """Plain and placed sum, [2] int64, on the device of the tensor."""
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
    """Sums on the host as 32 hexadecimal digits."""
    return "".join(f"{number % (1 << 64):016x}" for number in pair.tolist())


def texts(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Sums of all tensors by name, in one copy from their device."""
    if not tensors:
        return {}
    return dict(zip(tensors, map(as_text, torch.stack([sums(one) for one in tensors.values()]).cpu()), strict=True))
