"""Blocking HTTP/1.1 transfer from a weights server, with reconnects."""

from __future__ import annotations

import http.client
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import FileIO
from pathlib import Path
from typing import TypeVar

import msgspec

from stretto.core.errors import RefusedRequest, SourceLost, WireError
from stretto.weights.folder import write_all
from stretto.weights.manifest import FORM, NEWEST, RUN

_PIECE = 1 << 20
_RETRY_SECONDS = 0.1
_LONGEST_TEXT = 1 << 20

T = TypeVar("T")


class Transfer:
    """One transfer, in the caller's thread.

    Example::

        transfer = Transfer("10.0.0.1:8400", key, run, None, patience=10.0)
        transfer.download("/versions/7", file)
    """

    def __init__(
        self,
        source: str,
        key: str,
        run: str,
        tls: ssl.SSLContext | None,
        patience: float,
        came: Callable[[int], object] = lambda size: None,
    ) -> None:
        """`came` is called with the size of each piece received."""
        self._came = came
        self._source, self._run, self._tls, self._patience = source, run, tls, patience
        self._headers = {"authorization": f"Bearer {key}", RUN: run}
        self._quiet_since = time.monotonic()
        self._stopped = threading.Event()
        self._socket: socket.socket | None = None
        self.tag = ""  #: the ETag of the last file
        self.form = ""  #: form of the last file, as told by the server
        self.newest: int | None = None  #: version at the server, by its last reply
        self.received = 0  #: bytes of all bodies

    def stop(self) -> None:
        """Abort from another thread: waits for the server end, and nothing more is switched."""
        self._stopped.set()
        if (open_socket := self._socket) is not None:
            try:
                open_socket.shutdown(socket.SHUT_RDWR)
            except OSError:  # it is closed
                return

    def check_wanted(self) -> None:
        """Raise SourceLost if the transfer was stopped."""
        if self._stopped.is_set():
            raise SourceLost(self._source, "was given up")

    def read_json(self, path: str, form: type[T]) -> T:
        """GET a short JSON reply.

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
        """Write the content at `path` into the empty `file`; False if it still has the tag `has`."""
        written = 0

        def asked() -> dict[str, str]:
            if written:
                return {"range": f"bytes={written}-", "if-range": self.tag}
            return {"if-none-match": f'"{has}"'} if has else {}

        def read(response: http.client.HTTPResponse) -> bool:
            nonlocal written
            if response.status == 304:
                if has is None:
                    raise WireError(f"{self._source}{path}: nothing new, says the server, and nothing is here")
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
            self.tag, self.form = response.headers["etag"] or "", response.headers[FORM] or ""
            left = response.length
            while left:
                self.check_wanted()
                with self._network():
                    piece = response.read1(_PIECE)  # any available bytes: they count as progress
                if not (count := len(piece)):
                    raise _BrokenOff("broke off a transfer")
                write_all(file, memoryview(piece))
                written, left = written + count, left - count
                self.received += count
                self._came(count)
                self._quiet_since = time.monotonic()
            return True

        return self._until_done(path, asked, read)

    def _until_done(
        self, path: str, headers: Callable[[], dict[str, str]], read: Callable[[http.client.HTTPResponse], T]
    ) -> T:
        """Repeat a request until it succeeds, as long as bytes keep coming.

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
            with response:  # the socket is its own where the server ends the connection after it
                self._check(response)
                yield response
        finally:
            self._socket = None
            connection.close()

    def _check(self, response: http.client.HTTPResponse) -> None:
        """Raise the error that a reply stands for, if it is one."""
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
        """Turn transient network errors into `_BrokenOff`; permanent ones are raised at once."""
        try:
            yield
        except ssl.SSLCertVerificationError as error:
            raise WireError(f"{self._source}: {error.verify_message}") from error
        except (OSError, http.client.HTTPException) as error:
            raise _BrokenOff(f"cannot be reached ({getattr(error, 'strerror', None) or error})") from error


class _BrokenOff(Exception):
    """An attempt was interrupted; another one may succeed."""


def tls_context(tls: Path) -> ssl.SSLContext:
    """Client context for TLS: the run's own authority proves the server; host names are not checked."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.load_verify_locations(tls / "ca.pem")
    context.load_cert_chain(tls / "cert.pem", tls / "key.pem")
    return context
