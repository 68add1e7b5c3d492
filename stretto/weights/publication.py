"""The bytes of one published version: a safetensors file, which any library of the field reads, with checksums.

    offset  size
    0       8     length of the header, little endian
    8       n     JSON: __metadata__, then dtype, shape and place of each tensor; spaces up to a multiple of 64
    8 + n   m     tensors without gaps, those of the widest numbers first, so that each begins at a multiple of its own

    __metadata__  {"version": "7", "checksums": "<16 digits a tensor>", "header": "<16 digits>", "format": "pt", ...}

`header` is the xxh3 of length and header, computed with zeros in its own place; `checksums` has the xxh3 of each tensor
in the order of the header. So every byte is covered: a cut, a flipped bit or a write that stopped half-way is found
before any tensor is handed out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import msgspec
import torch
import xxhash
from torch import Tensor

from stretto.core.errors import TornPublication

_LENGTH = 8
_ALIGNMENT = 64
_DIGITS = 16
_NO_CHECKSUM = "0" * _DIGITS

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


class TensorEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Example: ``TensorEntry("F32", (64,), (40960, 41216))``: bytes 40960 to 41215, counted from the first tensor."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]

    @property
    def size(self) -> int:
        """Bytes."""
        return self.data_offsets[1] - self.data_offsets[0]


class _Metadata(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    version: str
    checksums: str
    header: str = _NO_CHECKSUM
    format: str = "pt"
    stretto: Literal["1"] = "1"


@dataclass(frozen=True)
class WeightsManifest:
    """The header of a publication; `checksums` has those of `tensors`, in their order."""

    version: int
    tensors: Mapping[str, TensorEntry]
    checksums: tuple[str, ...]

    @property
    def size(self) -> int:
        """Bytes of all tensors."""
        return max((entry.data_offsets[1] for entry in self.tensors.values()), default=0)


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
    return WeightsManifest(version, entries, (_NO_CHECKSUM,) * len(entries))


def header(manifest: WeightsManifest) -> bytes:
    """All bytes before the first tensor; their number does not depend on the checksums."""
    metadata = _Metadata(version=str(manifest.version), checksums="".join(manifest.checksums))
    sealed = msgspec.structs.replace(metadata, header=checksum(_encoded(manifest, metadata)))
    return _encoded(manifest, sealed)


def pieces(tensor: Tensor) -> Iterator[memoryview]:
    """The bytes of a tensor, in pieces of at most 1 MiB. A tensor of another device is copied here."""
    raw = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
    for start in range(0, len(raw), _CHUNK):
        yield raw[start : start + _CHUNK]


def checksum(data: bytes | memoryview) -> str:
    """The xxh3 of `data` in 16 hexadecimal digits."""
    return xxhash.xxh3_64_hexdigest(data)


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
    for (name, entry), expected in zip(manifest.tensors.items(), manifest.checksums, strict=True):
        begin, end = entry.data_offsets
        if checksum(raw[start + begin : start + end]) != expected:
            raise TornPublication(f"version {version}: the checksum of {name} does not fit its {entry.size} bytes")
    return manifest, start


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


def _encoded(manifest: WeightsManifest, metadata: _Metadata) -> bytes:
    text = msgspec.json.encode({"__metadata__": metadata} | dict(manifest.tensors))
    length = -(-(_LENGTH + len(text)) // _ALIGNMENT) * _ALIGNMENT - _LENGTH
    return length.to_bytes(_LENGTH, "little") + text.ljust(length)


def _read_header(raw: memoryview) -> tuple[WeightsManifest, int]:
    start = _LENGTH + int.from_bytes(raw[:_LENGTH], "little")
    if len(raw) < _LENGTH or start > len(raw):
        raise TornPublication(f"{len(raw)} bytes that do not begin like a publication, or end before their header")
    text = bytes(raw[:start])
    try:
        fields = msgspec.json.decode(text[_LENGTH:], type=dict[str, msgspec.Raw])
        metadata = msgspec.json.decode(fields.pop("__metadata__", msgspec.Raw(b"null")), type=_Metadata)
        entries = {name: msgspec.json.decode(entry, type=TensorEntry) for name, entry in fields.items()}
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise TornPublication(f"the header cannot be read: {error}") from error
    if checksum(text.replace(metadata.header.encode(), _NO_CHECKSUM.encode(), 1)) != metadata.header:
        raise TornPublication("the checksum of the header does not fit")
    width = range(0, len(metadata.checksums), _DIGITS)
    checksums = tuple(metadata.checksums[place : place + _DIGITS] for place in width)
    return WeightsManifest(int(metadata.version), entries, checksums), start
