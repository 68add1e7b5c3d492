"""Mirror of a run's weights on another machine: pull versions into the local mailbox; without torch.

    pull        stretto-<run>-v000007.<pid>.partial   from the weights server; resumes interrupted transfers
    verify      every byte, by the checksums of the publication itself
    switch      stretto-<run>-v000007.weights         as the publisher does it: engines of the machine read it with
                                                      `SharedMemorySubscriber`, as from a local publisher

Mirrors of one machine pull in turn, and link files that another mirror has verified, so a version crosses the network
once and is in memory once. Torn or foreign data are never switched in. If the run was resumed from an earlier version,
the abandoned later versions are unlinked as soon as the server reports the lower number.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal, TypeVar

from stretto.core.deadlines import standstill, waiting
from stretto.core.errors import TornPublication, WireError
from stretto.processes.http.tls import client_context
from stretto.weights.folder import drop, map_file, new_version, path_of, prefix, private_file, unlink, versions
from stretto.weights.manifest import verify
from stretto_cluster.scratch import in_turn, link_first
from stretto_cluster.weights import delta
from stretto_cluster.weights.source import CONNECTIONS, PART_SIZE, Transfer
from stretto_cluster.weights.wire import ModelFile, digest_of, seal_of

_DELTA = "delta:"
_MEASURE_AGAIN = 16  # pulls after which the slower form is tried again

T = TypeVar("T")


@dataclass(frozen=True)
class Pulled:
    """Result of a pull: the local mailbox has this version. `bytes`: transferred bytes, 0 if it was here already;
    `seconds`: duration of the pull; `delta`: whether it came as a delta; `reason`: form of the transfer, and why."""

    version: int
    bytes: int
    seconds: float
    delta: bool
    reason: str


class Mirror:
    """Pulls the model folder and the versions of one run from its weights server.

    Example::

        mirror = Mirror("10.0.0.1:8400", key, run, Path("/dev/shm"))
        await mirror.fetch_model(Path("/tmp/model"))
        await mirror.pull(7)
        SharedMemorySubscriber(run, Path("/dev/shm")).load(7)
    """

    def __init__(
        self,
        source: str,
        key: str,
        run: str,
        folder: Path,
        tls: str = "",
        *,
        delta: Literal["auto", "always", "never"] = "auto",
        patience: float = 10.0,
        seconds: float = 600.0,
        part_size: int = PART_SIZE,
        beside: Callable[[], Iterable[Path]] = tuple,
    ) -> None:
        """Prepare pulls into `folder`, which is created.

        Args:
            source: ``host:port`` of the weights server; `key`: its bearer token.
            run: the run's name; ValueError if it is not a name of a run.
            folder: the local mailbox, in which versions are written.
            tls: a folder with ``ca.pem``, ``cert.pem``, ``key.pem``; RecipeError if one is missing or invalid. "" if
                the server has none.
            delta: whether a delta from a local version is requested instead of the whole version: "auto" uses the
                faster of the two, by its own measurements; "always" requests one whenever there is a local version.
            patience: seconds without a new byte, over all attempts, after which the server counts as lost.
            seconds: a pull ends after this many seconds without a byte received or checked; its total time is not
                limited.
            part_size: a file larger than this many bytes is transferred in parts, over several connections at once.
            beside: returns the mailboxes of other mirrors on this machine, which may have a version already.
        """
        prefix(run)
        self.source, self.folder, self._key, self._run = source, folder, key, run
        self._tls = client_context(tls)
        self._patience, self._seconds, self._part_size = patience, seconds, part_size
        self._choice, self._beside = _Choice(delta), beside
        self.moved = 0  #: bytes received or checked since the start
        self._one = asyncio.Lock()  # one transfer at a time, so that a reply's newest version holds until its end
        folder.mkdir(parents=True, exist_ok=True)

    async def pull(self, version: int) -> Pulled:
        """Bring `version` into the local mailbox, verified, and keep only the newest two versions. A version that is
        already here is compared by its seal (checksum), and transferred again only if the server's differs.

        Raises:
            TornPublication: the data are incomplete, or of another version; nothing was switched in.
            WireError: the server does not have the version (any more), or serves another run.
            RefusedRequest: the key is not that of the run.
            SourceLost: the server cannot be reached, or broke off and did not come back.
            DeadlineExceeded: no byte was received or checked for too long.
            OSError: there is no space, with the path; nothing was switched in, and no file is left.
        """
        return await self._in_thread(f"version {version}", self._coming, partial(self._pull, version))

    async def fetch_model(
        self, folder: Path, beside: Callable[[], Iterable[Path]] = tuple, kind: str = "model"
    ) -> None:
        """Download the model folder of version 0 (or with `kind` "reference" that of the reference policy) to `folder`.
        Every file is checked by its digest, and the folder appears only when it is complete. If it is complete already,
        nothing is transferred. Files that one of the folders `beside` has are linked.

        Raises:
            TornPublication: a file has other bytes than the server's list says.
            WireError: the folder exists with other files; or the server serves another run, or lists a name that is no
                file name.
            RefusedRequest: the key is not that of the run.
            SourceLost: the server cannot be reached, or broke off and did not come back.
            DeadlineExceeded: no byte was received or checked for too long.
            OSError: there is no space, with the path.
        """

        def coming() -> list[Path]:
            return [file for other in beside() for file in _making(other).glob("*")]

        await self._in_thread(f"the {kind} folder", coming, partial(self._fetch_model, kind, folder, beside))

    async def _in_thread(self, what: str, coming: Callable[[], Iterable[Path]], work: Callable[[Transfer], T]) -> T:
        """Run `work` in a thread, after the transfer before it and those of other mirrors have ended; returns its
        result. `what`: its name in errors. `coming`: files in which other mirrors' transfers show progress. If the call
        is cancelled, or makes no progress for too long (DeadlineExceeded), the transfer's connection is closed, and no
        file is switched in."""
        with waiting("the mirror", "its transfer before", self._seconds):
            await self._one.acquire()
        try:
            transfer = Transfer(
                self.source, self._key, self._run, self._tls, self._patience, self._has_moved, self._part_size
            )

            def work_in_turn() -> T:
                with in_turn(self.folder.parent / f"{prefix(self._run)}pull", self._waiting(transfer, coming)):
                    return work(transfer)

            async with standstill("the mirror", f"{what} from {self.source}", self._seconds, self._so_far):
                task = asyncio.ensure_future(asyncio.to_thread(work_in_turn))
                try:
                    return await asyncio.shield(task)
                except asyncio.CancelledError:
                    transfer.stop()
                    await asyncio.wait([task])  # no longer than it takes to close a connection
                    if not task.cancelled():
                        task.exception()
                    raise
        finally:
            self._one.release()

    def _has_moved(self, size: int) -> None:
        self.moved += size

    async def _so_far(self) -> int:
        return self.moved

    def _waiting(self, transfer: Transfer, coming: Callable[[], Iterable[Path]]) -> Callable[[], None]:
        """Return a function to call while another mirror pulls the files `coming`: it counts each time at which they
        have changed as a byte of progress, and raises if the transfer was stopped."""
        before = _changes(coming())

        def look() -> None:
            nonlocal before
            transfer.check_wanted()
            now = _changes(coming())
            self._has_moved(int(now != before))
            before = now

        return look

    def _coming(self) -> list[Path]:
        return [file for other in self._beside() for file in other.glob(f"{prefix(self._run)}*.partial")]

    def _pull(self, version: int, transfer: Transfer) -> Pulled:
        start, path = time.perf_counter(), path_of(self._run, self.folder, version)
        if not path.exists():
            link_first((path_of(self._run, other, version) for other in self._beside()), path)
        unlink(self.folder.glob(f"{prefix(self._run)}*.{os.getpid()}.partial"))
        base = self._base(version)
        asked, reason = self._choice.delta(base is not None)
        try:
            form = self._bring(version, transfer, base if asked else None)
        except TornPublication:
            if not transfer.form.startswith(_DELTA):
                raise
            form, reason = self._bring(version, transfer, None), "the delta gave other bytes"
        seconds = time.perf_counter() - start
        if form:
            self._choice.took(asked, seconds / path.stat().st_size)
        self._forget_abandoned(transfer.newest)
        drop(self._run, self.folder)
        said = form if ":" in form else f"{form}: {reason}" if form else "it was here already"
        return Pulled(version, transfer.received, seconds, form.startswith(_DELTA), said)

    def _bring(self, version: int, transfer: Transfer, base: Path | None) -> str:
        """Transfer, verify and switch in a version. `base`: file of another version, from which the server may send a
        delta; None: none. Return the form of the transfer, which begins with "delta" or "in full"; "" if the version
        was already here. Raises TornPublication if the file is damaged or is not what the server announced."""
        path = path_of(self._run, self.folder, version)
        came, made = (path.with_suffix(f".{part}.{os.getpid()}.partial") for part in ("came", "made"))
        try:
            place = f"/versions/{version}" + (f"?base={_seal(base)}" if base else "")
            # A delta is small, and a version that is here already is seldom transferred again: neither needs the spare.
            fresh = base is not None or path.exists()
            with private_file(came) if fresh else new_version(self._run, self.folder, came) as file:
                if not transfer.download(place, file, has=_seal(path)):
                    return ""
            whole = came
            if base is not None and transfer.form.startswith(_DELTA):
                whole = made
                with new_version(self._run, self.folder, made) as file:
                    delta.apply(map_file(base), map_file(came), file)
            manifest, _ = verify(map_file(whole), version, self._has_moved, threads=CONNECTIONS)
            if not transfer.tag.startswith(f'"{manifest.seal}'):
                raise TornPublication(f"version {version} is whole, and not what the server has announced")
            transfer.check_wanted()
            self._forget_abandoned(transfer.newest)
            whole.replace(path)
            return transfer.form or "in full"
        finally:
            unlink([came, made])

    def _base(self, version: int) -> Path | None:
        here = [path for number, path in versions(self._run, self.folder) if number != version]
        return next((path for path in reversed(here) if _seal(path)), None)

    def _forget_abandoned(self, newest: int | None) -> None:
        if newest is not None:
            unlink(file for number, file in versions(self._run, self.folder) if number > newest)

    def _fetch_model(self, kind: str, folder: Path, beside: Callable[[], Iterable[Path]], transfer: Transfer) -> None:
        others = [*beside()]
        files = {file.name: file for file in transfer.read_json(f"/{kind}", list[ModelFile])}
        if wrong := [name for name in files if name != Path(name).name or name.startswith(".")]:
            raise WireError(f"{self.source} lists a model file {wrong[0]!r}, which is no name of a file")
        if folder.exists() and any(folder.iterdir()):
            if _has(folder, files, self._has_moved) != files.keys():
                raise WireError(f"{folder} is there, and is not the {kind} folder of run {self._run}")
            return
        making = _making(folder)
        making.mkdir(parents=True, exist_ok=True)
        for name in files:
            if not (making / name).exists():
                link_first((other / name for other in others), making / name)
        here = _has(making, files, self._has_moved)
        for file in files.values():
            if file.name not in here:
                path = making / file.name
                path.unlink(missing_ok=True)
                with private_file(path) as opened:
                    transfer.download(f"/{kind}/{file.name}", opened)
                if path.stat().st_size != file.size or digest_of(path, self._has_moved) != file.digest:
                    path.unlink()
                    raise TornPublication(f"{file.name} of the {kind} folder came with other bytes than listed")
        unlink(path for path in making.iterdir() if path.name not in files)
        transfer.check_wanted()
        making.replace(folder)


class _Choice:
    """Decides between delta and full transfer by measured times."""

    def __init__(self, config: Literal["auto", "always", "never"]) -> None:
        self._config = config
        self._seconds: dict[bool, float] = {}  # per byte of a version at the last pull; key: a delta was requested
        self._turns = 0

    def delta(self, held: bool) -> tuple[bool, str]:
        """Whether to request a delta: as the recipe says, else if deltas have been quicker (at times the other form, to
        measure). Also the reason if the version is then sent in full. `held`: there is a local version to which a delta
        can be applied."""
        if self._config == "never":
            return False, 'weights.delta is "never"'
        if not held:
            return False, "no other version is here"
        if self._config == "always" or len(self._seconds) < 2:
            return True, "the server makes no deltas"
        self._turns += 1
        faster = self._seconds[True] <= self._seconds[False]
        whole, changed = (f"{self._seconds[form] * 1e9:.2f} s" for form in (False, True))
        return faster != (self._turns % _MEASURE_AGAIN == 0), f"a GB took {whole} in full and {changed} as a delta"

    def took(self, asked: bool, seconds: float) -> None:
        """Record the time of a transfer, in seconds per byte of the version. `asked`: a delta was requested, even if
        none was sent."""
        self._seconds[asked] = seconds


def _seal(path: Path) -> str | None:
    try:
        with open(path, "rb", buffering=0) as file:
            return seal_of(file.fileno())
    except (FileNotFoundError, TornPublication):
        return None


def _making(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.partial")


def _changes(files: Iterable[Path]) -> dict[Path, int]:
    """Time of the last write of each file, in nanoseconds; files that are missing are left out. (Sizes show no
    progress: a file has its full size from the first part on.)"""
    changes = {}
    for file in files:
        with contextlib.suppress(FileNotFoundError):  # it was completed and renamed
            changes[file] = file.stat().st_mtime_ns
    return changes


def _has(folder: Path, files: dict[str, ModelFile], read: Callable[[int], object]) -> set[str]:
    """Names of the files of `folder` that match the list `files`, and of files that are not listed. `read` is called
    with the size of each piece that is compared."""
    return {
        path.name
        for path in folder.iterdir()
        if path.name not in files
        or (path.stat().st_size == files[path.name].size and digest_of(path, read) == files[path.name].digest)
    }
