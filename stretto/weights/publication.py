"""Tensors of torch as a publication (`weights.manifest` has its form), and back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from stretto.weights.manifest import NO_CHECKSUM, TensorEntry, WeightsManifest, verify

#: Bytes hashed and copied together, so that the copy finds them in the processor's cache.
_CHUNK = 1 << 20

_DTYPES: dict[str, torch.dtype] = {
    "F32": torch.float32,
    "F64": torch.float64,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


@dataclass(frozen=True)
class Publication:
    """A publication that has been verified; `tensors` are views of the bytes it was read from."""

    manifest: WeightsManifest
    tensors: Mapping[str, Tensor]


def plan(version: int, tensors: Mapping[str, Tensor]) -> WeightsManifest:
    """Where each tensor will stand; the checksums are still zero.

    Raises:
        ValueError: a dtype that safetensors does not know.
    """
    begin, offset = {}, 0
    for name in sorted(tensors, key=lambda name: -tensors[name].element_size()):
        begin[name], offset = offset, offset + tensors[name].numel() * tensors[name].element_size()
    entries = {}
    for name, tensor in tensors.items():
        if tensor.dtype not in _NAMES:
            allowed = ", ".join(str(dtype).removeprefix("torch.") for dtype in _NAMES)
            raise ValueError(f"{name}: {tensor.dtype} cannot be published; allowed: {allowed}")
        end = begin[name] + tensor.numel() * tensor.element_size()
        entries[name] = TensorEntry(_NAMES[tensor.dtype], tuple(tensor.shape), (begin[name], end))
    return WeightsManifest(version, entries, (NO_CHECKSUM,) * len(entries))


def pieces(tensor: Tensor) -> Iterator[memoryview]:
    """The bytes of a tensor, in pieces of at most 1 MiB. A tensor of another device is copied here."""
    raw = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
    for start in range(0, len(raw), _CHUNK):
        yield raw[start : start + _CHUNK]


def read(raw: memoryview, version: int) -> Publication:
    """Verify a publication and view its tensors without copying them. `raw` must be writable memory for torch.

    Raises:
        TornPublication: it is not whole, or it is another version.
    """
    manifest, start = verify(raw, version)
    return Publication(manifest, {name: _view(raw, start, entry) for name, entry in manifest.tensors.items()})


def _view(raw: memoryview, start: int, entry: TensorEntry) -> Tensor:
    dtype = _DTYPES[entry.dtype]
    if not entry.size:
        return torch.empty(entry.shape, dtype=dtype)
    count = entry.size // dtype.itemsize
    return torch.frombuffer(raw, dtype=dtype, count=count, offset=start + entry.data_offsets[0]).view(entry.shape)
