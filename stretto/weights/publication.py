"""The bytes of one published version.

    offset  size
    0       8     magic
    8       8     length of the manifest, little endian
    16      8     xxh3 of those 8 bytes of length and of the manifest with its padding
    24      m     manifest (MessagePack), padded with zeros to a multiple of 64 from the start of the file
    ...     n     tensors, each at a multiple of 64, zeros between

The manifest knows n and the xxh3 of all n bytes. So every byte of a publication is covered: a cut, a flipped bit or a
write that stopped half-way is found before any tensor is handed out.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import msgspec
import torch
import xxhash
from torch import Tensor

from stretto.core.errors import TornPublication

_MAGIC = b"STRETTO1"
_HEADER = 24
_ALIGNMENT = 64

#: Bytes hashed and copied together, so that the copy finds them in the processor's cache.
_CHUNK = 1 << 20

_DTYPES: dict[str, torch.dtype] = {
    "float32": torch.float32,
    "float64": torch.float64,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "int64": torch.int64,
    "int32": torch.int32,
    "uint8": torch.uint8,
    "bool": torch.bool,
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


class TensorEntry(msgspec.Struct, frozen=True, array_like=True):
    """Example: ``TensorEntry("model.norm.weight", "float32", (64,), offset=40960, size=256)``"""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int  # bytes from the first tensor
    size: int  # bytes


class WeightsManifest(msgspec.Struct, frozen=True, array_like=True):
    version: int
    size: int  # bytes of all tensors with the zeros between them
    checksum: bytes  # xxh3_64 of those bytes, 8 bytes
    tensors: tuple[TensorEntry, ...]


def plan(version: int, tensors: Mapping[str, Tensor]) -> WeightsManifest:
    """Where each tensor will stand; the checksum is still zero.

    Raises:
        ValueError: a dtype that the wire does not know.
    """
    entries, offset = [], 0
    for name, tensor in tensors.items():
        if tensor.dtype not in _NAMES:
            raise ValueError(f"{name}: {tensor.dtype} cannot be published; allowed: {', '.join(_DTYPES)}")
        size = tensor.numel() * tensor.element_size()
        entries.append(TensorEntry(name, _NAMES[tensor.dtype], tuple(tensor.shape), offset, size))
        offset = _aligned(offset + size)
    return WeightsManifest(version, offset, bytes(8), tuple(entries))


def header(manifest: WeightsManifest) -> bytes:
    """All bytes before the first tensor; its length does not depend on the checksum."""
    encoded = msgspec.msgpack.encode(manifest)
    length = len(encoded).to_bytes(8, "little")
    block = encoded.ljust(_aligned(_HEADER + len(encoded)) - _HEADER, b"\0")
    return _MAGIC + length + xxhash.xxh3_64_digest(length + block) + block


def chunks(manifest: WeightsManifest, tensors: Iterable[Tensor]) -> Iterator[memoryview]:
    """The bytes after the header, in order, in pieces of at most 1 MiB. Tensors of another device are copied here."""
    for entry, tensor in zip(manifest.tensors, tensors, strict=True):
        raw = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
        for start in range(0, entry.size, _CHUNK):
            yield raw[start : start + _CHUNK]
        if gap := _aligned(entry.size) - entry.size:
            yield memoryview(bytes(gap))


@dataclass(frozen=True)
class Publication:
    """A publication that has been verified; `tensors` are views of the bytes it was read from."""

    manifest: WeightsManifest
    tensors: Mapping[str, Tensor]


def verify(raw: memoryview, version: int) -> tuple[WeightsManifest, int]:
    """Check every byte of a publication; returns its manifest and where its tensors begin.

    Raises:
        TornPublication: it is not whole, or it is another version.
    """
    manifest, start = _read_header(raw)
    if manifest.version != version:
        raise TornPublication(f"publication of version {manifest.version} was found in place of version {version}")
    if len(raw) != start + manifest.size:
        raise TornPublication(f"version {version} has {len(raw)} bytes, its manifest says {start + manifest.size}")
    if xxhash.xxh3_64_digest(raw[start:]) != manifest.checksum:
        raise TornPublication(f"version {version}: the checksum of its {manifest.size} bytes does not fit")
    return manifest, start


def read(raw: memoryview, version: int) -> Publication:
    """Verify a publication and view its tensors without copying them. `raw` must be writable memory for torch.

    Raises:
        TornPublication: it is not whole, or it is another version.
    """
    manifest, start = verify(raw, version)
    return Publication(manifest, {entry.name: _view(raw, start, entry) for entry in manifest.tensors})


def _view(raw: memoryview, start: int, entry: TensorEntry) -> Tensor:
    dtype = _DTYPES[entry.dtype]
    if not entry.size:
        return torch.empty(entry.shape, dtype=dtype)
    count = entry.size // dtype.itemsize
    return torch.frombuffer(raw, dtype=dtype, count=count, offset=start + entry.offset).view(entry.shape)


def _read_header(raw: memoryview) -> tuple[WeightsManifest, int]:
    if len(raw) < _HEADER or raw[:8] != _MAGIC:
        raise TornPublication(f"{len(raw)} bytes that do not begin like a publication")
    length = int.from_bytes(raw[8:16], "little")
    start = _aligned(_HEADER + length)
    if start > len(raw):
        raise TornPublication(f"{len(raw)} bytes, but the manifest alone has {length}")
    if xxhash.xxh3_64_digest(bytes(raw[8:16]) + bytes(raw[_HEADER:start])) != raw[16:_HEADER]:
        raise TornPublication("the checksum of the manifest does not fit")
    try:
        return msgspec.msgpack.decode(raw[_HEADER : _HEADER + length], type=WeightsManifest), start
    except msgspec.MsgspecError as error:
        raise TornPublication(f"the manifest cannot be read: {error}") from error


def _aligned(offset: int) -> int:
    return -(-offset // _ALIGNMENT) * _ALIGNMENT
