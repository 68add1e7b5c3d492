"""Deltas between two publications: changed elements by position and new value; without torch.

An optimizer step changes few of the numbers in bfloat16: most change by less than the last digit. So each piece of a
publication is encoded by its changed elements, each with one byte for the distance from the previous one. A gap of more
than 256 elements is bridged by including unchanged elements. There is no compression: it is slower than the network
(benchmarks, `weights`).

    8 bytes     length of the head, little endian
    head        MessagePack: _DeltaHead
    pieces      for each piece of at most a million elements: distances - 1 (one byte each), then values

The result is verified like every publication, by its own checksums, so a delta applied to a wrong base is detected.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from stretto.core.errors import UNREADABLE, TornPublication
from stretto.core.records import Record
from stretto.weights.folder import cut, map_file, path_of, prefix, private_file, unlink, versions, write_all
from stretto.weights.manifest import WeightsManifest, read_header

_LENGTH = 8
_ELEMENTS = 1 << 20  # most elements of a piece
_STEP = 256  # the longest distance
_SAMPLES = 64
_SAMPLED = 1 << 14  # elements of each sample
_UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}

_MAKE_SECONDS = 8.0  # seconds to wait for a delta: less than a mirror waits for a byte
_REMEMBERED = 8

#: A delta that is larger than this share of the whole is not sent.
LARGEST = 0.5

Elements = npt.NDArray[Any]


class _DeltaHead(Record, frozen=True):
    """Head of a delta. `base` and `seal`: seals (checksums) of the old and the new publication. `header`: header of the
    new one. `counts`: number of encoded elements in each piece."""

    base: str
    seal: str
    header: bytes
    counts: tuple[int, ...]


@dataclass(frozen=True)
class _Run:
    """Bytes `begin` to `end` of a publication's tensor data, in which all elements have `width` bytes."""

    begin: int
    end: int
    width: int

    def pieces(self) -> Iterator[tuple[int, int]]:
        step = _ELEMENTS * self.width
        for begin in range(self.begin, self.end, step):
            yield begin, min(begin + step, self.end)


def changed_part(base: memoryview, target: memoryview) -> float | None:
    """Estimate the share of differing elements (0 to 1) from samples; None if the two publications have different
    tensors. Raises TornPublication if a header cannot be read."""
    (old, old_start), (new, new_start) = read_header(base), read_header(target)
    if old.tensors != new.tensors:
        return None
    changed, seen = 0, 0
    for run in _runs(new):
        span = _SAMPLED * run.width
        step = max((run.end - run.begin) // _SAMPLES // span * span, span)
        for begin in range(run.begin, run.end, step):
            end = min(begin + span, run.end)
            differ = _view(base, old_start, begin, end, run.width) != _view(target, new_start, begin, end, run.width)
            changed += int(np.count_nonzero(differ))
            seen += (end - begin) // run.width
    return changed / seen if seen else 0.0


def encode(base: memoryview, target: memoryview, file: FileIO, largest: float = LARGEST) -> bool:
    """Write the delta from `base` to `target`, two publications with the same tensors, to `file`. Return False, with
    nothing written, if the delta exceeds the share `largest` of the whole `target`.

    Raises:
        ValueError: the two have different tensors.
        TornPublication: a header cannot be read.
        OSError: the file cannot be written; with the path.
    """
    (old, old_start), (new, new_start) = read_header(base), read_header(target)
    if old.tensors != new.tensors:
        raise ValueError("a delta is between two publications with the same tensors")
    room = largest * len(target)
    counts, parts = [], []
    for run in _runs(new):
        for begin, end in run.pieces():
            before = _view(base, old_start, begin, end, run.width)
            after = _view(target, new_start, begin, end, run.width)
            distances, values = _encoded(before, after)
            counts.append(len(values))
            parts += [distances.data, values.data.cast("B")]
            room -= len(distances) + values.nbytes
            if room < 0:
                return False
    head = msgspec.msgpack.encode(
        _DeltaHead(base=old.seal, seal=new.seal, header=bytes(target[:new_start]), counts=tuple(counts))
    )
    write_all(file, memoryview(len(head).to_bytes(_LENGTH, "little") + head))
    for part in parts:
        write_all(file, part)
    return True


def apply(base: memoryview, delta: memoryview, file: FileIO) -> None:
    """Apply `delta` to `base` and write the resulting publication to `file`. The caller verifies it.

    Raises:
        TornPublication: the delta is damaged or incomplete, or has another base.
        OSError: the file cannot be written; with the path.
    """
    head, place = _head(delta)
    old, old_start = read_header(base)
    new, _ = read_header(memoryview(head.header))
    if head.base != old.seal or old.tensors != new.tensors or head.seal != new.seal:
        raise TornPublication(f"a delta from {head.base} to {head.seal} cannot be laid over {old.seal}")
    pieces = [(run.width, piece) for run in _runs(new) for piece in run.pieces()]
    sizes = sum(count * (1 + width) for (width, _), count in zip(pieces, head.counts, strict=False))
    if len(pieces) != len(head.counts) or min(head.counts, default=0) < 0 or len(delta) != place + sizes:
        raise TornPublication(f"a delta of {len(delta)} bytes, whose head says {place + sizes}")
    write_all(file, memoryview(head.header))
    for (width, (begin, end)), count in zip(pieces, head.counts, strict=True):
        elements = _view(base, old_start, begin, end, width).copy()
        places = np.cumsum(np.frombuffer(delta, np.uint8, count, place).astype(np.int64) + 1) - 1
        if count and places[-1] >= len(elements):
            raise TornPublication("a delta that goes on after the end of a tensor")
        values = np.frombuffer(delta, np.uint8, count * width, place + count)
        elements[places] = values.view(_UNSIGNED[width])
        write_all(file, elements.data.cast("B"))
        place += count * (1 + width)
    cut(file, file.tell())


class NoDelta(Exception):
    """No delta is sent. The message says why the publication is sent in full."""


class Deltas:
    """Deltas of a weights server. Each is made once, in a thread, into a file beside the publications of `run` in
    `folder`. Files of an earlier server are removed at the start."""

    def __init__(self, run: str, folder: Path) -> None:
        self._run, self._folder = run, folder
        self._tasks: dict[tuple[str, str], asyncio.Task[tuple[Path, str] | NoDelta]] = {}
        unlink(self._files("delta", "making"))

    async def made(self, base: str, version: int, seal: str) -> tuple[Path, str]:
        """Make the delta between two publications, unless that was tried before. Return its file, and a sentence about
        the share of changed elements.

        Args:
            base: seal (checksum) of the publication that the receiver has.
            version: version of the new publication; `seal`: its seal.

        Raises:
            NoDelta: more than half would be sent, `base` is not published any more or has other tensors,
                or the delta cannot be written or is not made within 8 s (a later call may find it).
        """
        if (base, seal) not in self._tasks:
            for old in list(self._tasks)[: -_REMEMBERED + 1]:
                del self._tasks[old]
            self._tasks[base, seal] = asyncio.create_task(asyncio.to_thread(self._attempt, base, version, seal))
        task = self._tasks[base, seal]
        await asyncio.wait([task], timeout=_MAKE_SECONDS)
        if not task.done():
            raise NoDelta(f"the delta was not made within {_MAKE_SECONDS:g} s")
        if isinstance(made := task.result(), NoDelta):
            raise made
        return made

    def _attempt(self, base: str, version: int, seal: str) -> tuple[Path, str] | NoDelta:
        try:
            return self._make(base, version, seal)
        except NoDelta as reason:
            return reason
        except (OSError, TornPublication) as error:  # the publication can still be sent in full
            return NoDelta(f"the delta could not be made: {error}")

    def _make(self, base: str, version: int, seal: str) -> tuple[Path, str]:
        target = map_file(path_of(self._run, self._folder, version))
        held = [path for number, path in versions(self._run, self._folder) if number != version]
        bases = [raw for raw in map(map_file, held) if read_header(raw)[0].seal == base]
        if not bases:
            raise NoDelta("the version that the mirror has is not published any more")
        part = changed_part(bases[0], target)
        if part is None:
            raise NoDelta("the two versions have other tensors")
        begin = f"{prefix(self._run)}{version:06d}.{base}-{seal}"  # `base` is a request's words; here it is a seal
        making = self._folder / f"{begin}.making"
        try:
            with private_file(making) as file:
                if part > LARGEST or not encode(bases[0], target, file):
                    raise NoDelta(f"about {part:.1%} of the elements have changed")
            unlink(path for path in self._files("delta") if self._version_of(path) < version)
            return making.replace(self._folder / f"{begin}.delta"), f"about {part:.1%} of the elements have changed"
        finally:
            making.unlink(missing_ok=True)

    def _files(self, *ends: str) -> list[Path]:
        return [path for end in ends for path in self._folder.glob(f"{prefix(self._run)}*.{end}")]

    def _version_of(self, path: Path) -> int:
        return int(path.name.removeprefix(prefix(self._run)).partition(".")[0])


def _head(delta: memoryview) -> tuple[_DeltaHead, int]:
    """Head of a delta, and the offset of its pieces; TornPublication if it is damaged or cut off."""
    end = _LENGTH + int.from_bytes(delta[:_LENGTH], "little")
    try:
        return msgspec.msgpack.decode(delta[_LENGTH:end], type=_DeltaHead), end
    except UNREADABLE as error:
        raise TornPublication(f"a delta that cannot be read: {error}") from error


def _encoded(before: Elements, after: Elements) -> tuple[npt.NDArray[np.uint8], Elements]:
    """Encode the changed elements of a piece: distances minus one (a byte each), and new values. Longer gaps are
    bridged by unchanged elements."""
    steps = np.diff(np.flatnonzero(before != after), prepend=-1) - 1
    fillers = steps // _STEP
    distances = np.full(len(steps) + fillers.sum(), _STEP - 1, np.uint8)
    distances[np.cumsum(fillers + 1) - 1] = steps % _STEP
    return distances, after[np.cumsum(distances.astype(np.int64) + 1) - 1]


def _runs(manifest: WeightsManifest) -> list[_Run]:
    """Runs of contiguous tensors with elements of one width, in the order of their offsets."""
    runs: list[_Run] = []
    for entry in sorted(manifest.tensors.values(), key=lambda entry: entry.data_offsets):
        begin, end = entry.data_offsets
        if begin == end:
            continue
        if runs and runs[-1].width == entry.width:
            runs[-1] = _Run(runs[-1].begin, end, entry.width)
        else:
            runs.append(_Run(begin, end, entry.width))
    return runs


def _view(raw: memoryview, start: int, begin: int, end: int, width: int) -> Elements:
    """Elements in the bytes `begin` to `end`, counted from `start`, as unsigned integers of their width, so that equal
    bytes compare equal, also for NaN."""
    return np.frombuffer(raw, _UNSIGNED[width], (end - begin) // width, start + begin)
