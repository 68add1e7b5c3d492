"""Blocking HTTP/1.1 transfers from a weights server, which reconnect after interruptions."""

from __future__ import annotations

import contextlib
import http.client
import re
import select
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from io import FileIO
from itertools import pairwise
from pathlib import Path
from typing import TypeVar

import msgspec

from stretto.core.errors import UNREADABLE, RefusedRequest, SourceLost, WireError, naming
from stretto.weights.folder import cut
from stretto_cluster.weights.splicing import Splice
from stretto_cluster.weights.wire import FORM, NEWEST, READ, RUN, write_at

PART_SIZE = 16 << 20
CONNECTIONS = 4  #: connections at once, and threads of a transfer
_CONTENT_RANGE = re.compile(r"bytes (\d{1,18})-(\d{1,18})/(\d{1,18})", re.ASCII)
_PIECE = 1 << 20
_RETRY_SECONDS = 0.1
_LONGEST_TEXT = 1 << 20

T = TypeVar("T")


class Transfer:
    """One transfer in the caller's thread, which blocks. The public attributes describe the last reply or file."""

    def __init__(
        self,
        source: str,
        key: str,
        run: str,
        tls: ssl.SSLContext | None,
        patience: float,
        came: Callable[[int], object],
        part_size: int,
    ) -> None:
        """Prepare a transfer; nothing is sent yet. `source`: the server's ``host:port``; `key`, `run`: sent with each
        request. `tls`: None: plain HTTP. `patience`: seconds without a byte after which the server is lost. `came` is
        called with the size of each received piece, maybe in other threads. `part_size`: bytes of the first part of a
        file; the rest comes over several connections."""
        self._came = came
        self._source, self._run, self._tls, self._patience = source, run, tls, patience
        self._headers = {"authorization": f"Bearer {key}", RUN: run}
        self._quiet_since = time.monotonic()
        self._stopped, self._failed = threading.Event(), threading.Event()
        self._connected: set[socket.socket] = set()
        self._part_size, self._counting = part_size, threading.Lock()
        self.tag = ""  #: the ETag of the last file
        self.form = ""  #: form of the last file ("delta" or "in full", with the reason), as reported by the server
        self.newest: int | None = None  #: newest version at the server, by its last reply
        self.received = 0  #: bytes received in all bodies
        self._read = ""  # what the server had read for its list when it last said so

    def stop(self) -> None:
        """Abort the transfer, from another thread, and return at once. Its reads from the server are interrupted, and
        `check_wanted` raises from now on."""
        self._stopped.set()
        self._end_parts()

    def _end_parts(self) -> None:
        self._failed.set()
        for connected in tuple(self._connected):
            with contextlib.suppress(OSError):  # the socket is closed already
                connected.shutdown(socket.SHUT_RDWR)

    def check_wanted(self) -> None:
        """Raise SourceLost if the transfer was stopped, or another part of it has failed."""
        if self._stopped.is_set() or self._failed.is_set():
            raise SourceLost(self._source, "was given up")

    def read_json(self, path: str, form: type[T]) -> T:
        """Send a GET request for a short JSON reply, and decode it as `form`.

        Raises:
            WireError: the server serves another run, has nothing at `path`, or its reply does not have this form.
            RefusedRequest: the key is wrong.
            SourceLost: no byte came for `patience` seconds, or the transfer was stopped.
        """

        def read(response: http.client.HTTPResponse, connection: socket.socket) -> bytes:
            if not 0 < (response.length or 0) <= _LONGEST_TEXT:
                raise WireError(f"{self._source}{path} has {response.length} bytes")
            with self._network():
                return response.read()

        try:
            return msgspec.json.decode(self._until_done(path, dict, read), type=form)
        except UNREADABLE as error:
            raise WireError(f"{self._source}{path} cannot be read: {error}") from error

    def download(self, path: str, file: FileIO, has: str | None = None) -> bool:
        """Replace all bytes of `file` by the content at `path`. Return False, with nothing written, if the server's
        content still has the tag `has` (None: always write). Large content is transferred in parts over several
        connections at once.

        Raises:
            OSError: the file cannot be written.
            WireError: the server serves another run, or has nothing at `path`.
            RefusedRequest: the key is wrong.
            SourceLost: no byte came for `patience` seconds, or the transfer was stopped.
        """
        while True:
            try:
                return self._download(path, file, has)
            except _Changed:  # the content was replaced meanwhile
                file.truncate(0)

    def _download(self, path: str, file: FileIO, has: str | None) -> bool:
        first = _Part(0, self._part_size)
        if not self._fetch(path, file, first, has):
            return False
        cut(file, first.size)
        rest = first.size - first.end
        count = min(CONNECTIONS, -(-rest // self._part_size))
        cuts = [first.end + rest * number // count for number in range(count + 1)] if count else []
        with ThreadPoolExecutor(CONNECTIONS) as pool:
            parts = [_Part(begin, end, first.size, first.tag) for begin, end in pairwise(cuts)]
            fetching = [pool.submit(self._fetch, path, file, part) for part in parts]
            done, _ = wait(fetching, return_when=FIRST_EXCEPTION)
            if any(one.exception() for one in done):
                self._end_parts()
        self._failed.clear()
        for one in done:
            one.result()
        return True

    def _fetch(self, path: str, file: FileIO, part: _Part, has: str | None = None) -> bool:
        """Fetch a part of the file at `path`, reconnecting as needed. Return False if the content still has the tag
        `has` (None: always fetch). Raises _Changed if the content was replaced, WireError if the server says "not
        changed" without `has`, and the errors of `download`."""

        def asked() -> dict[str, str]:
            known = {"if-range": part.tag} if part.tag else {"if-none-match": f'"{has}"'} if has else {}
            return known | {"range": f"bytes={part.begin}-{part.end - 1}"}

        def read(response: http.client.HTTPResponse, connection: socket.socket) -> bool:
            if response.status == 304:
                if has is None:
                    raise WireError(f"{self._source}{path}: nothing new, says the server, and nothing is here")
                return False
            self._begin(path, part, response)
            for count in self._moves(response, connection, file, part):
                part.begin += count
                with self._counting:
                    self.received += count
                    self._came(count)
                    self._quiet_since = time.monotonic()
                self.check_wanted()
            return True

        return self._until_done(path, asked, read)

    def _begin(self, path: str, part: _Part, response: http.client.HTTPResponse) -> None:
        """Note the size and the tag of the whole file from a reply. Raises _Changed if the tag is not the one that the
        part has, and WireError for a reply without a size or with other bytes than requested."""
        tag = response.headers["etag"] or ""
        if part.tag and (tag != part.tag or response.status != 206):
            raise _Changed
        if response.length is None:
            raise WireError(f"{self._source}{path}: a file without a length")
        begin, end, size = 0, response.length, response.length
        if response.status == 206:
            if not (told := _CONTENT_RANGE.fullmatch(response.headers.get("content-range", ""))):
                raise WireError(f"{self._source}{path}: a part without its place")
            begin, end, size = int(told[1]), int(told[2]) + 1, int(told[3])
        if begin != part.begin or end - begin != response.length or not begin <= end <= size:
            raise WireError(f"{self._source}{path}: bytes {begin} to {end} of {size} came for those from {part.begin}")
        part.end, part.size, part.tag = end, size, tag
        self.tag, self.form = tag, response.headers[FORM] or ""

    def _moves(
        self, response: http.client.HTTPResponse, connection: socket.socket, file: FileIO, part: _Part
    ) -> Iterator[int]:
        """Write the body of a reply into the file; yield the size of each piece. Raises _BrokenOff at an early end."""
        with Splice() as splice, naming(Path(str(file.name))):
            piece = b""
            while left := part.end - part.begin:
                with self._network():
                    if spliced := self._tls is None and bool(piece):  # after the first piece nothing is buffered
                        count = self._take(splice, connection, left)
                    else:
                        piece = response.read1(min(_PIECE, left))
                        count = len(piece)
                if not count:
                    raise _BrokenOff("broke off a transfer")
                if spliced:
                    splice.place(file.fileno(), part.begin)
                else:
                    write_at(file, memoryview(piece), part.begin)
                yield count

    def _take(self, splice: Splice, connection: socket.socket, most: int) -> int:
        """Take at most `most` bytes from the connection; returns their number, 0 at its end. TimeoutError if none comes
        for `patience` seconds."""
        while True:
            try:
                return splice.take(connection.fileno(), most)
            except BlockingIOError:
                poll = select.poll()
                poll.register(connection.fileno(), select.POLLIN)
                if not poll.poll(1000 * self._patience):
                    raise TimeoutError("timed out") from None

    def _until_done(
        self,
        path: str,
        headers: Callable[[], dict[str, str]],
        read: Callable[[http.client.HTTPResponse, socket.socket], T],
    ) -> T:
        """Repeat a request until it succeeds, as long as bytes keep coming; SourceLost after `patience` seconds without
        one. Only broken connections and errors of the server are tried again; other errors are raised. `headers`
        returns those of each attempt; `read` processes the response."""
        self._quiet_since = time.monotonic()
        while True:
            try:
                with self._reply(path, headers()) as (response, connection):
                    return read(response, connection)
            except _BrokenOff as broken:
                self.check_wanted()
                if time.monotonic() - self._quiet_since >= self._patience:
                    raise SourceLost(self._source, f"{broken}; nothing came for {self._patience:g} s") from broken
                time.sleep(_RETRY_SECONDS)

    @contextmanager
    def _reply(self, path: str, headers: dict[str, str]) -> Iterator[tuple[http.client.HTTPResponse, socket.socket]]:
        left = max(self._patience - (time.monotonic() - self._quiet_since), _RETRY_SECONDS)
        host, _, port = self._source.rpartition(":")
        connection: http.client.HTTPConnection
        connected: socket.socket | None = None
        if self._tls is not None:
            connection = http.client.HTTPSConnection(host.strip("[]"), int(port), timeout=left, context=self._tls)
        else:
            connection = http.client.HTTPConnection(host.strip("[]"), int(port), timeout=left)
        try:
            with self._network():
                connection.connect()
                connected = connection.sock
                self._connected.add(connected)
                self.check_wanted()
                connection.request("GET", path, headers=self._headers | headers)
                response = connection.getresponse()
            with response:  # it owns the socket if the server closes the connection after it
                self._check(response)
                yield response, connected
        finally:
            self._connected.discard(connected)
            connection.close()

    def _check(self, response: http.client.HTTPResponse) -> None:
        """Record the newest version that a good reply names. Raises RefusedRequest for status 401, WireError for
        another run or a missing file, and _BrokenOff for any other error, which is tried again. A server that is still
        reading its model folder, and has read further bytes, counts as alive, as if a byte had come."""
        if response.status in (200, 206, 304) and response.headers[RUN] == self._run:
            newest = response.headers[NEWEST]
            self.newest = int(newest) if newest and newest.isdecimal() else None
            return
        with self._network():
            said = response.read(_LONGEST_TEXT).decode(errors="replace")[:200]
        if response.status == 401:
            raise RefusedRequest("key", f"refused by the weights server {self._source}", "that of the run")
        if response.status == 503 and response.headers.get(READ, self._read) != self._read:
            self._read, self._quiet_since = response.headers[READ], time.monotonic()
            self._came(1)
        if response.status in (200, 206, 304, 409):
            raise WireError(f"{self._source} serves run {response.headers[RUN]}, not {self._run}")
        if response.status == 404:
            raise WireError(f"{self._source}: {said}; the newest there is {response.headers[NEWEST]}")
        raise _BrokenOff(f"answered with status {response.status} ({said})")

    @contextmanager
    def _network(self) -> Iterator[None]:
        """Context manager: a certificate that does not verify raises WireError, any other network error of the block
        `_BrokenOff`."""
        try:
            yield
        except ssl.SSLCertVerificationError as error:
            raise WireError(f"{self._source}: {error.verify_message}") from error
        except (OSError, http.client.HTTPException) as error:
            raise _BrokenOff(f"cannot be reached ({getattr(error, 'strerror', None) or error})") from error


class _BrokenOff(Exception):
    """An attempt was interrupted; another attempt may succeed."""


class _Changed(Exception):
    """The server's content is not the content of which a part was received."""


@dataclass
class _Part:
    """Missing bytes `begin` to `end` of a file. `size`, `tag`: those of the whole file, once they are known."""

    begin: int
    end: int
    size: int = 0
    tag: str = ""
