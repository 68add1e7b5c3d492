"""HTTP server of a run's publications and model folders, for the mirrors of other machines, and the process that
serves them: ``python -m stretto_cluster.weights.server SPEC``; without torch.

    GET /versions/7         the publication; its seal is the ETag
    GET /versions/7?base=S  a delta from the publication with the seal S (`weights.delta`), if that is smaller
    GET /model              list of the files of version 0's model folder: [{"name", "size", "digest"}]; status 503
                            until they are read, with the bytes so far in `stretto-read`
    GET /model/NAME         one of these files; its digest is the ETag
    GET /reference          the same for a reference policy with a folder of its own

Every request has the key as a bearer token and the run's name in `stretto-run`. Every reply has the run and, in
`stretto-newest`, the newest version. The reply with a publication also has `stretto-form`: "delta" or "in full", with
the reason. ``Range: bytes=N-`` or ``N-M`` requests a part, with ``If-Range`` only of known content. ``If-None-Match``
avoids a transfer of known content. The kernel sends the files; over an encrypted connection they are read in pieces.
"""

from __future__ import annotations

import asyncio
import hmac
import os
import re
import socket
import ssl
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from urllib.parse import parse_qs

import msgspec
from starlette.types import Message, Receive, Scope, Send

from stretto.core.deadlines import deadline
from stretto.core.errors import TornPublication
from stretto.core.records import Record
from stretto.processes import event_loop
from stretto.processes.channel import run_role
from stretto.processes.heartbeat import begin_role
from stretto.processes.http.asgi import when_gone
from stretto.processes.http.server import HttpServer, admit, settings_of
from stretto.processes.http.transport import ZERO_COPY
from stretto.weights.folder import path_of, versions
from stretto_cluster.weights.delta import Deltas, NoDelta
from stretto_cluster.weights.wire import FORM, NEWEST, READ, RUN, ModelFile, digest_of, seal_of

_PIECE, _SENT_PIECE = 1 << 20, 4 << 20  # bytes of a piece; the second if the kernel sends it
_TAKE_SECONDS = 60.0  # most seconds in which a mirror takes a piece
_LIST_SECONDS = 5.0  # until a request for a list is answered with 503: less than a mirror waits for a byte
_SHUTDOWN_SECONDS = 1
_VERSION = re.compile(r"/versions/(\d{1,12})")
_RANGE = re.compile(rb"bytes=(\d{1,18})-(\d{0,18})")

Headers = Mapping[bytes, bytes]


@dataclass(frozen=True)
class _Request:
    """Headers of a request, and its ASGI channels. `zero_copy`: whether the server can send files itself."""

    headers: Headers
    receive: Receive
    send: Send
    zero_copy: bool


class WeightsApp:
    """ASGI application that serves the weights of one run: publications from `folder`, and the folders `model` and
    `reference` (None: there is no reference policy) to mirrors with the `key`.

    Example: ``WeightsApp("a1b2", Path("/dev/shm"), Path("runs/first/policy/v000000"), key)``
    """

    def __init__(self, run: str, folder: Path, model: Path, key: str, reference: Path | None = None) -> None:
        self._run, self._folder = run, folder
        self._models = {"model": model} | ({"reference": reference} if reference is not None else {})
        self._bearer = f"Bearer {key}".encode()
        self._lists = dict[Path, _Listing]()
        self._deltas = Deltas(run, folder)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = _Request(dict(scope["headers"]), receive, send, ZERO_COPY in scope.get("extensions", {}))
        try:
            self._check(scope, request.headers)
            base = parse_qs(scope["query_string"].decode("ascii", "replace")).get("base", [""])[0]
            await self._answer(scope["path"], base, request)
        except _Refused as refused:
            await self._reply(send, refused.status, "text/plain", str(refused).encode(), refused.headers)

    def _check(self, scope: Scope, headers: Headers) -> None:
        if not hmac.compare_digest(headers.get(b"authorization", b""), self._bearer):
            raise _Refused(401, "the key is not that of this run")
        admit(scope)
        if headers.get(RUN.encode()) != self._run.encode():
            raise _Refused(409, f"this is the server of run {self._run}")
        if scope["method"] != "GET":
            raise _Refused(405, "there is nothing but GET")

    async def _answer(self, path: str, base: str, request: _Request) -> None:
        if asked := _VERSION.fullmatch(path):
            return await self._send_version(int(asked[1]), base, request)
        kind, _, name = path.removeprefix("/").partition("/")
        model = self._models.get(kind)
        files = await self._files(model) if model is not None else {}
        if model is not None and path == f"/{kind}":
            return await self._reply(request.send, 200, "application/json", msgspec.json.encode(list(files.values())))
        if model is None or (named := files.get(name)) is None:
            raise _Refused(404, f"nothing is at {path}")
        with _opened(model / named.name, f"{named.name} is gone from the {kind} folder") as file:
            return await self._send_file(file, named.digest, request)

    async def _send_version(self, version: int, base: str, request: _Request) -> None:
        with _opened(path_of(self._run, self._folder, version), f"version {version} is not published") as file:
            try:
                seal = seal_of(file)
            except TornPublication as torn:
                raise _Refused(500, f"version {version}: {torn}") from torn
            form = ""
            if base and request.headers.get(b"if-none-match") != _etag(seal):
                try:
                    path, said = await self._deltas.made(base, version, seal)
                    with _opened(path, "the delta is gone") as delta:
                        form = f"delta: {said}"
                        return await self._send_file(delta, f"{seal}-{base}", request, form)
                except (NoDelta, _Refused) as reason:
                    form = f"in full: {reason}"
            return await self._send_file(file, seal, request, form)

    async def _files(self, model: Path) -> dict[str, ModelFile]:
        """Files of a model folder, by name. They are read once (after an error again), which takes minutes for a large
        model on a slow disk. Raises _Refused (503) if they are not read within five seconds; a further request waits
        for the same."""
        if model not in self._lists:
            self._lists[model] = _Listing(model)
        listing = self._lists[model]
        await asyncio.wait([listing.files], timeout=_LIST_SECONDS)
        if not listing.files.done():
            raise _Refused(503, f"the files of {model.name} are being read", {READ: str(listing.read)})
        if listing.files.exception() is not None:
            self._lists.pop(model, None)  # the next request reads them again
        return listing.files.result()

    async def _send_file(self, file: int, tag: str, request: _Request, form: str = "") -> None:
        """Send an open file, or the requested range of it; status 304 without content if the client has it already. If
        the client disconnects, the sending ends without an error. `tag`: its ETag; `form`: value of `stretto-form`.

        Raises:
            TornPublication: the file became shorter meanwhile.
            DeadlineExceeded: the client took nothing for a minute.
        """
        etag, size, asked, send = _etag(tag), os.fstat(file).st_size, request.headers, request.send
        if asked.get(b"if-none-match") == etag:
            await self._start(send, 304, {b"etag": etag})
            return await send({"type": "http.response.body"})
        part = _part(asked.get(b"range", b""), size) if asked.get(b"if-range", etag) == etag else None
        begin, end = part or (0, size)
        headers = {b"etag": etag, b"content-length": b"%d" % (end - begin), b"connection": b"close"}
        if form:
            headers[FORM.encode()] = form.encode("latin-1", "replace")
        if part:
            headers[b"content-range"] = b"bytes %d-%d/%d" % (begin, end - 1, size)
        await self._start(send, 206 if part else 200, headers)
        gone = asyncio.ensure_future(when_gone(request.receive, lambda: None))
        try:
            while begin < end and not gone.done():
                message, begin = _piece(file, begin, end, zero_copy=request.zero_copy)
                async with deadline("the weights server", "a mirror to take what it asked for", _TAKE_SECONDS):
                    await send(message)
                await asyncio.sleep(0)  # let other mirrors' requests run
            if request.zero_copy:  # the connection has pages of the file: while it is open, nobody overwrites them
                await asyncio.wait([gone], timeout=_TAKE_SECONDS)
            await send({"type": "http.response.body"})
        except OSError:  # the mirror has gone; it requests the rest again
            return None
        finally:
            gone.cancel()

    async def _reply(
        self, send: Send, status: int, media: str, body: bytes, further: Mapping[str, str] = MappingProxyType({})
    ) -> None:
        headers = {b"content-type": media.encode(), b"content-length": b"%d" % len(body)}
        headers |= {name.encode(): value.encode() for name, value in further.items()}
        await self._start(send, status, headers)
        await send({"type": "http.response.body", "body": body})

    async def _start(self, send: Send, status: int, headers: Headers) -> None:
        """Send the status and `headers`, and two further headers, the run and its newest version; these only to a
        client with the key."""
        told: dict[bytes, bytes] = {} if status == 401 else {RUN.encode(): self._run.encode()}
        if told and (there := versions(self._run, self._folder)):
            told[NEWEST.encode()] = b"%d" % there[-1][0]
        await send({"type": "http.response.start", "status": status, "headers": [*headers.items(), *told.items()]})


class _Refused(Exception):
    """Error reply with an HTTP `status`, a sentence, and further `headers`."""

    def __init__(self, status: int, sentence: str, headers: Mapping[str, str] = MappingProxyType({})) -> None:
        super().__init__(sentence)
        self.status, self.headers = status, headers


class _Listing:
    """List of the files of a model folder, which a thread begins to make at once. `files`: its task, with the files by
    name. `read`: bytes read so far."""

    def __init__(self, model: Path) -> None:
        self.read = 0
        self.files = asyncio.create_task(asyncio.to_thread(_list, model, self._count))

    def _count(self, size: int) -> None:
        self.read += size


def bound(host: str, port: int) -> socket.socket:
    """Bind a socket to an address of this machine; port 0 takes a free one.

    Raises:
        OSError: the address cannot be bound.
    """
    host = host.strip("[]")
    return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)


def server_of(app: WeightsApp, tls: Path | None = None) -> HttpServer:
    """HTTP server of the application, to be run on a bound socket; SIGTERM and SIGINT end it. `tls`: folder with
    ``ca.pem``, ``cert.pem`` and ``key.pem``; mirrors must present a certificate of that authority. None: no
    encryption."""
    settings = settings_of(
        app,
        timeout_graceful_shutdown=_SHUTDOWN_SECONDS,
        ssl_certfile=str(tls / "cert.pem") if tls else None,
        ssl_keyfile=str(tls / "key.pem") if tls else None,
        ssl_ca_certs=str(tls / "ca.pem") if tls else None,
        ssl_cert_reqs=ssl.CERT_REQUIRED if tls else ssl.CERT_NONE,
    )
    return HttpServer(settings)


def _part(asked: bytes, size: int) -> tuple[int, int] | None:
    """Parse a ``Range`` header for a file of `size` bytes: first byte, and the one after the last. None: send the whole
    file."""
    if not (found := _RANGE.fullmatch(asked)) or int(found[1]) >= size:
        return None
    begin, end = int(found[1]), min(int(found[2]) + 1, size) if found[2] else size
    return (begin, end) if begin < end else None


def _piece(file: int, begin: int, end: int, *, zero_copy: bool) -> tuple[Message, int]:
    """ASGI message with the next of a file's bytes `begin` to `end`, and the offset after it; with `zero_copy` as a
    file range that the server sends itself; TornPublication if the file has become shorter."""
    if zero_copy:
        count = min(_SENT_PIECE, end - begin)
        place = {"file": file, "offset": begin, "count": count, "more_body": True}
        return {"type": ZERO_COPY} | place, begin + count
    body = os.pread(file, min(_PIECE, end - begin), begin)
    if not body:
        raise TornPublication("a file became shorter while it was sent")
    return {"type": "http.response.body", "body": body, "more_body": True}, begin + len(body)


def _etag(tag: str) -> bytes:
    return f'"{tag}"'.encode()


@contextmanager
def _opened(path: Path, gone: str) -> Iterator[int]:
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        raise _Refused(404, gone) from None
    try:
        yield file
    finally:
        os.close(file)


def _list(model: Path, read: Callable[[int], object]) -> dict[str, ModelFile]:
    files = sorted(path for path in model.iterdir() if path.is_file())
    return {path.name: ModelFile(path.name, path.stat().st_size, digest_of(path, read)) for path in files}


class WeightsServerSpec(Record, frozen=True):
    """Spec of a weights server.

    `folder`: that of the publications. `model`: that of version 0. `address`: ``host:port`` to listen at. `key_file`:
    file with the key, because all users of a machine can read a command line. `tls`: folder with ``ca.pem``,
    ``cert.pem`` and ``key.pem``; None: no encryption. `reference`: folder of the reference policy, if it has its own.

    Example: ``WeightsServerSpec("a1b2", "/dev/shm", "runs/first/policy/v000000", "0.0.0.0:8400", "/tmp/s/key")``
    """

    run: str
    folder: str
    model: str
    address: str
    key_file: str
    tls: str | None = None
    reference: str | None = None


def main(arguments: list[str]) -> int:
    """Run the role until the conductor ends it; return the exit code. An error is the last line of the log."""
    spec = msgspec.json.decode(arguments[0], type=WeightsServerSpec)
    begin_role()
    return run_role(lambda: _serve(spec), lambda failed: print(f"weights: {failed.problem}", file=sys.stderr))


def _serve(spec: WeightsServerSpec) -> None:
    key = Path(spec.key_file).read_text(encoding="utf-8").strip()
    reference = Path(spec.reference) if spec.reference is not None else None
    app = WeightsApp(spec.run, Path(spec.folder), Path(spec.model), key, reference)
    host, _, port = spec.address.rpartition(":")
    with bound(host, int(port)) as endpoint:
        event_loop.run(server_of(app, Path(spec.tls) if spec.tls is not None else None).serve([endpoint]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
