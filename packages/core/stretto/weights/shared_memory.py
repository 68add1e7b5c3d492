"""The mailbox of one machine: one file per version in shared memory.

    publish     stretto-<run>-v000007.<pid>.partial     write, read back, compare the checksum
    switch      stretto-<run>-v000007.weights           one atomic rename: before it the version does not exist
    keep        the newest two versions, so that an engine can finish loading the older one; an older file is
                overwritten by the next version (`weights.folder`) when nobody has it open or mapped

A process that dies in the middle leaves at most a ``.partial`` file, which the next publication removes.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from io import FileIO
from pathlib import Path

import msgspec
import torch
import xxhash
from torch import Tensor

from stretto.core.canary import TensorDigest
from stretto.core.errors import DeadlineExceeded, TornPublication, WireError
from stretto.weights.folder import cut, drop, held, map_file, new_version, path_of, prefix, unlink, versions, write_all
from stretto.weights.mailbox import Gather, Publication, as_it_is, as_text, copied, stored, sums
from stretto.weights.manifest import NO_CHECKSUM, TensorEntry, WeightsManifest, header, verify

_LOOK_SECONDS = 0.02

#: Bytes hashed and copied together, so that the copy finds them in the processor's cache.
_CHUNK = 1 << 20

DTYPES: dict[str, torch.dtype] = {
    "F32": torch.float32,
    "F64": torch.float64,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class SharedMemoryPublisher:
    """Publishes versions as files; the trainer's side of the mailbox. A new publisher for the same run and folder
    continues with the files of an earlier one.

    Example::

        publisher = SharedMemoryPublisher("a1b2", folder)
        publisher.publish(7, model.named_parameters())   # v6 and v7 are there, v5 is gone
        remove("a1b2", folder)                           # nothing is left
    """

    def __init__(self, run: str, folder: Path, dtype: torch.dtype | None = None) -> None:
        """Create the folder, if it is missing. `dtype`: dtype of published floating-point numbers; None: unchanged. If
        all engines compute in bfloat16, publishing in bfloat16 halves the size and gives them the same weights. Raises
        ValueError if the run name has characters that `prefix` refuses."""
        self._run, self._folder, self._dtype = run, folder, dtype
        folder.mkdir(parents=True, exist_ok=True)
        prefix(run)

    def publish(
        self, version: int, tensors: Iterable[tuple[str, Tensor]], gather: Gather = as_it_is
    ) -> dict[str, TensorDigest]:
        """Write the file of `version`, check it, and rename it into place; returns the digest of each tensor as
        written. `gather` makes the whole tensor from each (name, tensor, dtype) when it is written. Files of later
        versions, left from before a resume, are unlinked, and all but the newest two versions dropped (`drop`).

        Raises:
            TornPublication: the file read back differs; the version is not published.
            ValueError: a dtype cannot be published, or the version is below 0.
            OSError: no space left, for example, with the path; the version is not published, and no file is left.
        """
        held = dict(tensors)
        manifest, forms = self._manifest(version, held)
        return self._switch(manifest, ((name, gather(name, one, forms[name])) for name, one in held.items()))

    def copy(self, version: int, tensors: Iterable[tuple[str, Tensor]], gather: Gather = as_it_is) -> Publication:
        """Start to copy the tensors of `version`, made whole by `gather`, to host memory. Call `hold` of the result
        before the tensors change. Its `write` waits for the copies, and then does the same as `publish`. Raises
        ValueError if a dtype cannot be published, or the version is below 0."""
        held = dict(tensors)
        manifest, forms = self._manifest(version, held)
        device = next((tensor.device for tensor in held.values()), torch.device("cpu"))
        copies = copied(((name, gather(name, tensor, forms[name])) for name, tensor in held.items()), forms, device)

        def write() -> dict[str, TensorDigest]:
            copies.wait()
            digests = self._switch(manifest, ((name, copies.tensors.pop(name)) for name in held))
            sums = {name: as_text(one) for name, one in copies.sums.items()}
            return {name: msgspec.structs.replace(one, sums=sums.get(name, "")) for name, one in digests.items()}

        return Publication(write, copies.hold, manifest.size, sum(one.nbytes for one in copies.tensors.values()))

    def _manifest(self, version: int, tensors: Mapping[str, Tensor]) -> tuple[WeightsManifest, dict[str, torch.dtype]]:
        """The manifest, without checksums, and each tensor's published dtype by name. Raises ValueError for a negative
        version, and for a dtype that cannot be published."""
        if version < 0:
            raise ValueError(f"versions start at 0, not {version}")
        forms = {name: stored(tensor, self._dtype) for name, tensor in tensors.items()}
        sizes = {name: torch.empty(one.shape, dtype=forms[name], device="meta") for name, one in tensors.items()}
        return _plan(version, sizes), forms

    def _switch(self, manifest: WeightsManifest, whole: Iterable[tuple[str, Tensor]]) -> dict[str, TensorDigest]:
        """Write and check the file of a version, rename it into place, drop old versions (`drop`), and unlink newer
        ones and partial files of earlier processes. Returns the digest of each tensor. On an error the file is removed,
        and the earlier versions stay."""
        path = path_of(self._run, self._folder, manifest.version)
        partial = path.with_suffix(f".{os.getpid()}.partial")
        try:
            with new_version(self._run, self._folder, partial) as file:
                digests = _write(file, manifest, whole)
            verify(map_file(partial), manifest.version)
            unlink(file for number, file in versions(self._run, self._folder) if number > manifest.version)
            partial.replace(path)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise
        drop(self._run, self._folder)
        unlink(self._folder.glob(f"{prefix(self._run)}*.partial"))
        return digests


class SharedMemorySubscriber:
    """Loads the versions that a `SharedMemoryPublisher` of the same run and folder publishes; an engine's side."""

    def __init__(self, run: str, folder: Path) -> None:
        self._run, self._folder, self.checked = run, folder, 0

    def _check(self, size: int) -> None:
        self.checked += size

    def newest(self) -> int | None:
        """The newest published version; None before the first."""
        there = versions(self._run, self._folder)
        return there[-1][0] if there else None

    def await_first(self, owner: str, seconds: float) -> int:
        """Wait for a publication; returns the newest version. `owner`: name of the waiting role, for the error. Raises
        DeadlineExceeded if nothing was published within `seconds`."""
        end = time.monotonic() + seconds
        while (newest := self.newest()) is None:
            if time.monotonic() > end:
                raise DeadlineExceeded(owner, "the first publication", seconds)
            time.sleep(_LOOK_SECONDS)
        return newest

    def load(self, version: int) -> Mapping[str, Tensor]:
        """Verify `version`, and return its tensors by name as views of the mapped file. The file stays mapped as long
        as a view is used.

        Writes to the views are visible to this process alone (the mapping is private).

        Raises:
            TornPublication: size, version or checksum do not match, or the file is another user's; nothing was loaded.
            WireError: the version is not available, or no longer; call `newest` again.
        """
        try:
            raw = map_file(path_of(self._run, self._folder, version))
        except FileNotFoundError:
            raise self._gone(version) from None
        manifest, start = verify(raw, version, self._check)
        return {name: _view(raw, start, entry) for name, entry in manifest.tensors.items()}

    def hold(self, version: int, holder: str) -> Path:
        """Verify `version`, give its safetensors file a second name (a hard link) for `holder` (name of an engine's
        folder), and return that path. The file stays until `holder` holds another version or is released
        (`weights.folder.release`), even if newer versions are published.

        Raises:
            TornPublication: size, version or checksum do not match, or the file is another user's.
            WireError: the version is not available, or no longer; call `newest` again. After either error, `holder`
                keeps the version that it held before.
        """
        mine = held(self._run, self._folder, holder)
        file = mine.with_name(f"{mine.name}{version:06d}.held")
        new = file.with_suffix(".new.held")  # `file` may be what is held now
        new.unlink(missing_ok=True)
        try:
            new.hardlink_to(path_of(self._run, self._folder, version))
            verify(map_file(new), version, self._check)
        except FileNotFoundError:
            raise self._gone(version) from None
        except TornPublication:
            new.unlink()
            raise
        new.replace(file)  # does nothing where both are one file already: `new` goes with the others
        unlink(other for other in self._folder.glob(f"{mine.name}*.held") if other != file)
        return file

    def _gone(self, version: int) -> WireError:
        return WireError(f"{self._folder}: version {version} is not published; the newest there is {self.newest()}")


def _plan(version: int, tensors: Mapping[str, Tensor]) -> WeightsManifest:
    """Manifest for these tensors, with zeros for checksums. Raises ValueError for a dtype that cannot be published."""
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


def _pieces(tensor: Tensor) -> Iterator[memoryview]:
    """The bytes of a tensor, row-major, in pieces of at most 1 MiB; a tensor on another device is copied first."""
    raw = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
    for start in range(0, len(raw), _CHUNK):
        yield raw[start : start + _CHUNK]


def _view(raw: memoryview, start: int, entry: TensorEntry) -> Tensor:
    dtype = DTYPES[entry.dtype]
    if not entry.size:
        return torch.empty(entry.shape, dtype=dtype)
    count = entry.size // dtype.itemsize
    return torch.frombuffer(raw, dtype=dtype, count=count, offset=start + entry.data_offsets[0]).view(entry.shape)


def _write(file: FileIO, manifest: WeightsManifest, whole: Iterable[tuple[str, Tensor]]) -> dict[str, TensorDigest]:
    """Write the tensors to a file at the manifest's offsets, then the header with their checksums; returns the digest
    of each tensor. `whole` yields them in the order of the manifest."""
    checksums: list[str] = []
    start = len(header(manifest))
    cut(file, start + manifest.size)
    for name, tensor in whole:
        file.seek(start + manifest.tensors[name].data_offsets[0])
        checksum = xxhash.xxh3_64()
        for piece in _pieces(tensor):
            checksum.update(piece)
            write_all(file, piece)
        checksums.append(checksum.hexdigest())
    file.seek(0)
    write_all(file, memoryview(header(replace(manifest, checksums=tuple(checksums)))))
    entries = zip(manifest.tensors.items(), checksums, strict=True)
    return {name: TensorDigest(entry.dtype, checksum) for (name, entry), checksum in entries}


def digest_of_tensor(tensor: Tensor) -> TensorDigest:
    """Compute the digest of a tensor in memory; it agrees with the published digest if dtype and values are equal. The
    digest of a tensor on a GPU includes its sums. Raises KeyError for a dtype that cannot be published."""
    checksum = xxhash.xxh3_64()
    for piece in _pieces(tensor):
        checksum.update(piece)
    told = as_text(sums(tensor).cpu()) if tensor.device.type == "cuda" else ""
    return TensorDigest(_NAMES[tensor.dtype], checksum.hexdigest(), told)


def name_of(dtype: torch.dtype) -> str:
    """Name of a dtype in digests and manifests, as "BF16". Raises KeyError for one that cannot be published."""
    return _NAMES[dtype]
