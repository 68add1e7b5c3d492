"""Format of one published version: a standard safetensors file with checksums.

    offset  size
    0       8     length of the header, little endian
    8       n     JSON: __metadata__, then dtype, shape and byte range of each tensor; spaces up to a multiple of 64
    8 + n   m     tensors without gaps, widest dtype first, so that each begins at a multiple of its element size

    __metadata__  {"version": "7", "checksums": "<16 digits a tensor>", "header": "<16 digits>", "format": "pt", ...}

`header` is the xxh3 of length and header, computed with zeros in place of the value itself. `checksums` has the xxh3 of
each tensor in the order of the header. So every byte is covered: a truncated file, a flipped bit or an incomplete write
is detected before any tensor is returned.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Literal

import msgspec
import xxhash

from stretto.core.errors import UNREADABLE, TornPublication

LENGTH = 8  #: bytes before the header, which say its length
_ALIGNMENT = 64

_DIGITS = 16
NO_CHECKSUM = "0" * _DIGITS


class TensorEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Dtype, shape and byte range of a tensor.

    Example: ``TensorEntry("F32", (64,), (40960, 41216))``: bytes 40960 to 41215, counted from the first tensor.
    """

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]

    @property
    def size(self) -> int:
        """Size in bytes."""
        return self.data_offsets[1] - self.data_offsets[0]

    @property
    def width(self) -> int:
        """Bytes per element; 1 if the tensor is empty."""
        return self.size // math.prod(self.shape) if self.size else 1


class _Metadata(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    version: str
    checksums: str
    header: str = NO_CHECKSUM
    format: str = "pt"
    stretto: Literal["1"] = "1"


@dataclass(frozen=True)
class WeightsManifest:
    """Decoded header of a publication: its version, its tensors by name, and the checksum of each, in the order of
    `tensors`.

    `seal`: checksum of the header, which contains the checksums of all tensors; publications with equal seals are
    equal.
    """

    version: int
    tensors: Mapping[str, TensorEntry]
    checksums: tuple[str, ...]
    seal: str = NO_CHECKSUM

    @property
    def size(self) -> int:
        """Total bytes of all tensors."""
        return max((entry.data_offsets[1] for entry in self.tensors.values()), default=0)


def header(manifest: WeightsManifest) -> bytes:
    """Encode a manifest: all bytes of the file before the first tensor, with their own checksum (`seal` is ignored).
    Their number does not depend on the checksums."""
    metadata = _Metadata(version=str(manifest.version), checksums="".join(manifest.checksums))
    sealed = msgspec.structs.replace(metadata, header=checksum(_encoded(manifest, metadata)))
    return _encoded(manifest, sealed)


def checksum(data: bytes | memoryview) -> str:
    """The xxh3 of `data` in 16 hexadecimal digits."""
    return xxhash.xxh3_64_hexdigest(data)


def verify(
    raw: memoryview, version: int, checked: Callable[[int], object] = lambda size: None, *, threads: int = 1
) -> tuple[WeightsManifest, int]:
    """Check every byte of the publication `raw`, in `threads` threads; returns its manifest and the offset of its first
    tensor. `checked` is called, in the caller's thread, with the size in bytes of each tensor that is valid. Raises
    TornPublication if the publication is incomplete or damaged, or has another version than `version`."""
    manifest, start = read_header(raw)
    if manifest.version != version:
        raise TornPublication(f"publication of version {manifest.version} was found in place of version {version}")
    if len(raw) != start + manifest.size:
        raise TornPublication(f"version {version} has {len(raw)} bytes, its manifest says {start + manifest.size}")
    data = [raw[start + entry.data_offsets[0] : start + entry.data_offsets[1]] for entry in manifest.tensors.values()]
    with ThreadPoolExecutor(threads) if threads > 1 else nullcontext() as pool:
        found = pool.map(checksum, data) if pool else map(checksum, data)
        for (name, entry), expected, was in zip(manifest.tensors.items(), manifest.checksums, found, strict=True):
            if was != expected:
                raise TornPublication(f"version {version}: the checksum of {name} does not fit its {entry.size} bytes")
            checked(entry.size)
    return manifest, start


def read_header(raw: memoryview) -> tuple[WeightsManifest, int]:
    """Decode and check the header at the start of `raw`; returns the manifest and the offset of the first tensor. The
    tensors are not checked. Raises TornPublication if the header is incomplete or damaged."""
    start = LENGTH + int.from_bytes(raw[:LENGTH], "little")
    if len(raw) < LENGTH or start > len(raw):
        raise TornPublication(f"{len(raw)} bytes that do not begin like a publication, or end before their header")
    text = bytes(raw[:start])
    try:
        fields = msgspec.json.decode(text[LENGTH:], type=dict[str, msgspec.Raw])
        metadata = msgspec.json.decode(fields.pop("__metadata__", msgspec.Raw(b"null")), type=_Metadata)
        entries = {name: msgspec.json.decode(entry, type=TensorEntry) for name, entry in fields.items()}
        version = int(metadata.version)
    except (ValueError, *UNREADABLE) as error:
        raise TornPublication(f"the header cannot be read: {error}") from error
    if checksum(text.replace(metadata.header.encode(), NO_CHECKSUM.encode(), 1)) != metadata.header:
        raise TornPublication("the checksum of the header does not fit")
    places = range(0, len(metadata.checksums), _DIGITS)
    checksums = tuple(metadata.checksums[place : place + _DIGITS] for place in places)
    _check_places(entries, checksums)
    return WeightsManifest(version, entries, checksums, metadata.header), start


def _check_places(entries: Mapping[str, TensorEntry], checksums: tuple[str, ...]) -> None:
    """Raise TornPublication unless every tensor has a checksum and every byte belongs to exactly one tensor."""
    if len(entries) != len(checksums):
        raise TornPublication(f"{len(entries)} tensors with {len(checksums)} checksums")
    expected = 0
    for entry in sorted(entries.values(), key=lambda entry: entry.data_offsets):
        count = math.prod(entry.shape)
        whole = entry.size in (count, 2 * count, 4 * count, 8 * count) and count >= 0
        if entry.data_offsets[0] != expected or entry.size < 0 or not whole:
            raise TornPublication(f"a tensor at the bytes {entry.data_offsets}, where one should begin at {expected}")
        expected = entry.data_offsets[1]


def _encoded(manifest: WeightsManifest, metadata: _Metadata) -> bytes:
    text = msgspec.json.encode({"__metadata__": metadata} | dict(manifest.tensors))
    length = -(-(LENGTH + len(text)) // _ALIGNMENT) * _ALIGNMENT - LENGTH
    return length.to_bytes(LENGTH, "little") + text.ljust(length)
