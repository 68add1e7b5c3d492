"""A run's weights on another machine: one mirror per machine pulls versions into a local mailbox; without torch.

    pull        stretto-<run>-v000007.<pid>.partial   from the weights server, on from where a transfer broke off
    verify      every byte, by the checksums of the publication itself
    switch      stretto-<run>-v000007.weights         as the publisher does it: engines of the machine read it with
                                                      `SharedMemorySubscriber` and do not know the difference

What is torn, of another run, or not what was asked for is never switched in. The versions of a past that the run has
abandoned (it was resumed before them) are unlinked as soon as the server tells a lower newest one.
"""

from __future__ import annotations

import asyncio
import http.client
import os
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from io import FileIO
from pathlib import Path
from typing import TypeVar

import msgspec

from stretto.core.deadlines import deadline, waiting
from stretto.core.errors import RefusedRequest, SourceLost, TornPublication, WireError
from stretto.weights.folder import KEPT, map_file, path_of, prefix, private, unlink, versions, write_all
from stretto.weights.manifest import NEWEST, RUN, ModelFile, digest_of, manifest_of, verify

_PIECE = 1 << 20
_RETRY_SECONDS = 0.1
_LONGEST_TEXT = 1 << 20

T = TypeVar("T")


@dataclass(frozen=True)
class Pulled:
    """A version that the local mailbox has now; `bytes` travelled for it, and `reason` says why in this form."""

    version: int
    bytes: int
    seconds: float
    delta: bool
    reason: str


class Mirror:
    """Example::

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
        tls: Path | None = None,
        *,
        patience: float = 10.0,
        seconds: float = 600.0,
    ) -> None:
        """
        Args:
            source: ``host:port`` of the weights server.
            tls: a folder with ``ca.pem``, ``cert.pem``, ``key.pem``; None if the server has none.
            patience: seconds without a new byte, over all attempts, after which the server is lost.
            seconds: in which a version, or the model, has to be here.
        """
        prefix(run)
        self._source, self._key, self._run, self._folder = source, key, run, folder
        self._tls = _context(tls) if tls is not None else None
        self._patience, self._seconds = patience, seconds
        self._one = asyncio.Lock()  # one transfer at a time, so what a reply says is newest is so at its end
        folder.mkdir(parents=True, exist_ok=True)

    async def pull(self, version: int) -> Pulled:
        """Have `version` in the local mailbox, verified; the newest two are kept. What is there already is compared by
        its seal, and travels again only if the server has other bytes under this number.

        Raises:
            TornPublication: what came is not whole, or is not this version; nothing was switched.
            WireError: the server does not have it (any more), or is that of another run.
            RefusedRequest: the key is not that of the run.
            SourceLost: the server cannot be reached, or broke off and did not come back.
            DeadlineExceeded: it was not here in time.
            OSError: no room, with the path; nothing was switched, nothing is left.
        """
        return await self._in_thread(f"version {version}", partial(self._pull, version))

    async def fetch_model(self, folder: Path) -> None:
        """The model folder of version 0, every file checked by its digest; it appears as a whole.

        Raises:
            WireError: the folder is there with other files; and as for `pull`.
        """
        await self._in_thread("the model folder", partial(self._fetch_model, folder))

    async def _in_thread(self, what: str, work: Callable[[_Transfer], T]) -> T:
        """Run `work`; when it is cancelled or late, its connection is closed and it switches nothing."""
        with waiting("the mirror", "its transfer before", self._seconds):
            await self._one.acquire()
        try:
            transfer = _Transfer(self._source, self._key, self._run, self._tls, self._patience)
            async with deadline("the mirror", f"{what} from {self._source}", self._seconds):
                task = asyncio.ensure_future(asyncio.to_thread(work, transfer))
                try:
                    return await asyncio.shield(task)
                except asyncio.CancelledError:
                    transfer.stop()
                    await asyncio.wait([task])  # at most as long as a connection takes
                    if not task.cancelled():
                        task.exception()
                    raise
        finally:
            self._one.release()

    def _pull(self, version: int, transfer: _Transfer) -> Pulled:
        start = time.perf_counter()
        path = path_of(self._run, self._folder, version)
        unlink(self._folder.glob(f"{prefix(self._run)}*.{os.getpid()}.partial"))
        partial_file = path.with_suffix(f".{os.getpid()}.partial")
        try:
            with open(partial_file, "wb", buffering=0, opener=private) as file:
                came = transfer.download(f"/versions/{version}", file, has=self._seal(version))
            if came:
                manifest, _ = verify(map_file(partial_file), version)
                if f'"{manifest.seal}"' != transfer.tag:
                    raise TornPublication(f"version {version} is whole, and not what the server has announced")
                transfer.check_wanted()
                self._forget_abandoned(transfer.newest)
                partial_file.replace(path)
        finally:
            partial_file.unlink(missing_ok=True)
        self._forget_abandoned(transfer.newest)
        unlink(file for _, file in versions(self._run, self._folder)[:-KEPT])
        reason = "in full" if came else "it was here already"
        return Pulled(version, transfer.received, time.perf_counter() - start, delta=False, reason=reason)

    def _seal(self, version: int) -> str | None:
        """That of a version that is here; None if it is not."""
        try:
            with open(path_of(self._run, self._folder, version), "rb", buffering=0) as file:
                return manifest_of(file.fileno())[0].seal
        except (FileNotFoundError, TornPublication):
            return None

    def _forget_abandoned(self, newest: int | None) -> None:
        if newest is not None:
            unlink(file for number, file in versions(self._run, self._folder) if number > newest)

    def _fetch_model(self, folder: Path, transfer: _Transfer) -> None:
        files = {file.name: file for file in transfer.read_json("/model", list[ModelFile])}
        if wrong := [name for name in files if name != Path(name).name or name.startswith(".")]:
            raise WireError(f"{self._source} lists a model file {wrong[0]!r}, which is no name of a file")
        if folder.exists() and any(folder.iterdir()):
            if _has(folder, files) != files.keys():
                raise WireError(f"{folder} is there, and is not the model folder of run {self._run}")
            return
        making = folder.with_name(f".{folder.name}.partial")
        making.mkdir(parents=True, exist_ok=True)
        here = _has(making, files)
        for file in files.values():
            if file.name not in here:
                path = making / file.name
                path.unlink(missing_ok=True)
                with open(path, "wb", buffering=0, opener=private) as opened:
                    transfer.download(f"/model/{file.name}", opened)
                if path.stat().st_size != file.size or digest_of(path) != file.digest:
                    path.unlink()
                    raise TornPublication(f"{file.name} of the model folder came with other bytes than listed")
        unlink(path for path in making.iterdir() if path.name not in files)
        transfer.check_wanted()
        making.replace(folder)


class _Transfer:
    """One transfer over as many connections as it takes, in the thread of its caller."""

    def __init__(self, source: str, key: str, run: str, tls: ssl.SSLContext | None, patience: float) -> None:
        self._source, self._run, self._tls, self._patience = source, run, tls, patience
        self._headers = {"authorization": f"Bearer {key}", RUN: run}
        self._quiet_since = time.monotonic()
        self._stopped = threading.Event()
        self._socket: socket.socket | None = None
        self.tag = ""  #: the ETag of the last file
        self.newest: int | None = None  #: version at the server, by its last reply
        self.received = 0  #: bytes of all bodies

    def stop(self) -> None:
        """Called by another thread: what waits for the server ends, and nothing else is switched."""
        self._stopped.set()
        if (open_socket := self._socket) is not None:
            try:
                open_socket.shutdown(socket.SHUT_RDWR)
            except OSError:  # it is closed
                return

    def check_wanted(self) -> None:
        """Raises SourceLost once it was stopped."""
        if self._stopped.is_set():
            raise SourceLost(self._source, "was given up")

    def read_json(self, path: str, form: type[T]) -> T:
        """A short reply.

        Raises:
            WireError: it does not have this form.
        """

        def read(response: http.client.HTTPResponse) -> bytes:
            if not 0 < (response.length or 0) <= _LONGEST_TEXT:
                raise WireError(f"{self._source}{path} has {response.length} bytes")
            with self._network():
                return response.read()

        try:
            return msgspec.json.decode(self._until_done(path, dict, read), type=form)
        except msgspec.DecodeError as error:
            raise WireError(f"{self._source}{path} cannot be read: {error}") from error

    def download(self, path: str, file: FileIO, has: str | None = None) -> bool:
        """Write what is at `path` into `file`, which is empty; False if it is what we have under the tag `has`."""
        written = 0
        buffer = memoryview(bytearray(_PIECE))

        def asked() -> dict[str, str]:
            if written:
                return {"range": f"bytes={written}-", "if-range": self.tag}
            return {"if-none-match": f'"{has}"'} if has else {}

        def read(response: http.client.HTTPResponse) -> bool:
            nonlocal written
            if response.status == 304:
                return False
            if response.length is None:
                raise WireError(f"{self._source}{path}: a file without a length")
            goes_on = response.status == 206 and response.headers.get("content-range", "").startswith(
                f"bytes {written}-"
            )
            if written and not (goes_on and response.headers["etag"] == self.tag):
                written = 0
                file.seek(0)
                file.truncate()
            self.tag = response.headers["etag"] or ""
            left = response.length
            while left:
                self.check_wanted()
                with self._network():
                    count = response.readinto(buffer)
                if not count:
                    raise _BrokenOff("broke off a transfer")
                write_all(file, buffer[:count])
                written, left = written + count, left - count
                self.received += count
                self._quiet_since = time.monotonic()
            return True

        return self._until_done(path, asked, read)

    def _until_done(
        self, path: str, headers: Callable[[], dict[str, str]], read: Callable[[http.client.HTTPResponse], T]
    ) -> T:
        """Ask again as long as bytes come now and then.

        Raises:
            SourceLost: none came for `patience` seconds.
        """
        self._quiet_since = time.monotonic()
        while True:
            try:
                with self._reply(path, headers()) as response:
                    return read(response)
            except _BrokenOff as broken:
                self.check_wanted()
                if time.monotonic() - self._quiet_since >= self._patience:
                    raise SourceLost(self._source, f"{broken}; nothing came for {self._patience:g} s") from broken
                time.sleep(_RETRY_SECONDS)

    @contextmanager
    def _reply(self, path: str, headers: dict[str, str]) -> Iterator[http.client.HTTPResponse]:
        left = max(self._patience - (time.monotonic() - self._quiet_since), _RETRY_SECONDS)
        host, _, port = self._source.rpartition(":")
        connection: http.client.HTTPConnection
        if self._tls is not None:
            connection = http.client.HTTPSConnection(host.strip("[]"), int(port), timeout=left, context=self._tls)
        else:
            connection = http.client.HTTPConnection(host.strip("[]"), int(port), timeout=left)
        try:
            with self._network():
                connection.connect()
                self._socket = connection.sock
                self.check_wanted()
                connection.request("GET", path, headers=self._headers | headers)
                response = connection.getresponse()
            self._check(response)
            yield response
        finally:
            self._socket = None
            connection.close()

    def _check(self, response: http.client.HTTPResponse) -> None:
        """Raises what a reply says that is no file."""
        if response.status in (200, 206, 304) and response.headers[RUN] == self._run:
            newest = response.headers[NEWEST]
            self.newest = int(newest) if newest and newest.isdecimal() else None
            return
        with self._network():
            said = response.read(_LONGEST_TEXT).decode(errors="replace")[:200]
        if response.status == 401:
            raise RefusedRequest("key", f"refused by the weights server {self._source}", "that of the run")
        if response.status in (200, 206, 304, 409):
            raise WireError(f"{self._source} serves run {response.headers[RUN]}, not {self._run}")
        if response.status == 404:
            raise WireError(f"{self._source}: {said}; the newest there is {response.headers[NEWEST]}")
        raise _BrokenOff(f"answered with status {response.status} ({said})")

    @contextmanager
    def _network(self) -> Iterator[None]:
        """What the network does wrong, as one error; what is no bad luck is raised at once."""
        try:
            yield
        except ssl.SSLCertVerificationError as error:
            raise WireError(f"{self._source}: {error.verify_message}") from error
        except (OSError, http.client.HTTPException) as error:
            raise _BrokenOff(f"cannot be reached ({getattr(error, 'strerror', None) or error})") from error


class _BrokenOff(Exception):
    """An attempt has ended before its reply; another one may do better."""


def _context(tls: Path) -> ssl.SSLContext:
    """The client's end of TLS: the authority is the run's own, so it and not the host's name says who is there."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.load_verify_locations(tls / "ca.pem")
    context.load_cert_chain(tls / "cert.pem", tls / "key.pem")
    return context


def _has(folder: Path, files: dict[str, ModelFile]) -> set[str]:
    """The files of `folder` that are as listed, and the names of those that are not listed at all."""
    return {
        path.name
        for path in folder.iterdir()
        if path.name not in files
        or (path.stat().st_size == files[path.name].size and digest_of(path) == files[path.name].digest)
    }
