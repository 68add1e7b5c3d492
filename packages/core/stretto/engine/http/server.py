"""HTTP server of an engine: one thread, one event loop, one task that steps the engine.

    request ─► submit ─► stream ◄─ frames ◄─ step, step, step ...        (Generation.run)
                                               ▲
    update_weights ───────────────────────────┘ runs between two steps, because both run in this loop

All code that uses the native engine runs in the event loop's thread and does not await meanwhile, so an update cannot
happen inside a step. `stretto.engine.wire` describes the messages.
"""

from __future__ import annotations

import asyncio
import hmac
import os
import traceback
from collections.abc import Callable, Coroutine
from typing import Annotated, Any

import msgspec
from starlette.routing import Route, Router
from starlette.types import ASGIApp, Receive, Scope, Send

from stretto.core.canary import Loaded
from stretto.core.engine import EngineHealth
from stretto.core.errors import UNREADABLE, EngineLost, RefusedRequest, RoleFailed, WireError
from stretto.core.events import Span
from stretto.core.frames import LARGEST_FRAME, frame
from stretto.core.records import GenerateRequest, Partials
from stretto.engine.backend import Backend
from stretto.engine.http.lifecycle import Run, run_app, server_of
from stretto.engine.native.engine import NativeEngine
from stretto.engine.native.generation import Feed, Generation
from stretto.engine.wire import (
    MSGPACK,
    AbortRequest,
    PartialsRequest,
    Refusal,
    Sampled,
    ScoreRequest,
    SubmitRequest,
    UpdateRequest,
    split_address,
)
from stretto.processes import event_loop
from stretto.processes.http.asgi import (
    LARGEST_BODY,
    HostNames,
    by_own_names,
    header,
    is_loopback,
    read_body,
    refusal_of,
    reply,
    unless_gone,
    when_gone,
)
from stretto.processes.http.reach import bind
from stretto.processes.http.server import admit
from stretto.processes.tree import resident_bytes
from stretto.weights.mailbox import Subscriber

_HEADERS = [(b"content-type", MSGPACK.encode())]
_UPDATE = msgspec.msgpack.Decoder(UpdateRequest)
_ABORT = msgspec.msgpack.Decoder(AbortRequest)
_PARTIALS = msgspec.msgpack.Decoder(PartialsRequest)
_SCORE = msgspec.msgpack.Decoder(ScoreRequest)
_TOKENS = msgspec.msgpack.Decoder(str)
_SUBMIT = msgspec.msgpack.Decoder(SubmitRequest)
_REQUESTS = Annotated[list[GenerateRequest], msgspec.Meta(min_length=1)]
_DOCUMENTED = "see stretto.engine.wire"


class _Streaming:
    """Passes a route's raw ASGI call to `app`; a class, since starlette gives a function a parsed request."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app(scope, receive, send)


class _Exchange:
    """An endpoint that receives one message and replies with one message or a refusal. `handler`: takes the request's
    body, and returns the reply or raises the error to send; `largest`: most bytes of a body. `ends`: the handler is
    cancelled when the client disconnects."""

    def __init__(
        self, handler: Callable[[bytes], Coroutine[Any, Any, object]], largest: int, *, ends: bool = False
    ) -> None:
        self._handler, self._largest, self._ends = handler, largest, ends

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            body = await read_body(scope, receive, self._largest)
            if body is None:
                await _reply(send, 413, _too_large(self._largest))
                return
            work = self._handler(body)
            status, message = 200, await (unless_gone(receive, work) if self._ends else work)
        except (WireError, EngineLost, *UNREADABLE) as error:
            status, message = _refusal(error)
        except Exception as error:  # whatever it is, it must not look like a connection that broke
            status, message = _failure(error)
        if message is not None:  # else the client has gone
            await _reply(send, status, message)


class EngineApp:
    """ASGI application of an engine, with one method per endpoint of `engine.wire`. `body`: a request in msgpack."""

    def __init__(self, backend: Backend, largest: int = LARGEST_BODY, key: str = "") -> None:
        """`largest`: most bytes of a request body. `key`: secret that clients must send; "" for a private socket."""
        self._backend, self._largest = backend, largest
        self._bearer = f"Bearer {key}".encode() if key else b""
        self._requests = msgspec.msgpack.Decoder(_REQUESTS)
        routes = [
            Route("/generate", _Streaming(self.stream_completions), methods=["POST"]),
            Route("/update_weights", _Exchange(self.update_weights, largest), methods=["POST"]),
            Route("/abort", _Exchange(self.abort, largest), methods=["POST"]),
            Route("/partials", _Exchange(self.partials, largest), methods=["POST"]),
            Route("/score", _Exchange(self.score, largest, ends=True), methods=["POST"]),
            Route("/health", _Exchange(self.health, largest)),
            Route("/spans", _Exchange(self.spans, largest)),
        ]
        # A bare router: starlette's middleware would turn errors into pages, and every request through it costs time.
        self._router = Router(routes)

    @property
    def has_key(self) -> bool:
        """Whether clients must send a key."""
        return bool(self._bearer)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._bearer and not hmac.compare_digest(header(scope, b"authorization") or b"", self._bearer):
            await _reply(send, 401, Refusal(error="RefusedRequest", field="key", found="is wrong", allowed="the run's"))
            return
        if self.has_key:
            admit(scope)
        await self._router(scope, receive, send)

    async def stream_completions(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Stream each completion of the requests as it ends, or reply with a refusal if one is invalid, the body is too
        large, or the engine is stopping or full. If the client disconnects, the rest is aborted."""
        try:
            body = await read_body(scope, receive, self._largest)
            if body is None:
                await _reply(send, 413, _too_large(self._largest))
                return
            requests = self._requests.decode(body)
            await self._backend.prepare(requests)
            stream = self._backend.submit_all(requests)
        except msgspec.ValidationError as error:
            await _reply(send, *_refusal(refusal_of(str(error), list[GenerateRequest], _DOCUMENTED)))
            return
        except (RefusedRequest, EngineLost, *UNREADABLE) as error:
            await _reply(send, *_refusal(error))
            return
        except Exception as error:  # as in `_Exchange`
            await _reply(send, *_failure(error))
            return
        watch = asyncio.create_task(when_gone(receive, stream.break_off))
        try:
            await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
            while stream.missing or stream.ready:
                chunk = await stream.next()
                await send({"type": "http.response.body", "body": chunk, "more_body": stream.missing > 0})
                if stream.broken:
                    return  # the server closes a connection whose response was not finished: the client notices
        finally:
            watch.cancel()
            for request in requests:
                self._backend.close(request.id)

    async def update_weights(self, body: bytes) -> Loaded:
        """Load a published version, and answer the challenge in the request, if any."""
        order = _UPDATE.decode(body)
        return await self._backend.update(order.version, order.challenge)

    async def abort(self, body: bytes) -> EngineHealth:
        """Abort a request or several, as far as they are open; replies with the engine's health."""
        asked = _ABORT.decode(body).request
        for request in [asked] if isinstance(asked, str) else asked:
            self._backend.close(request)
        return await self._backend.health()

    async def partials(self, body: bytes) -> Partials:
        """Answer a `PartialsRequest`: the tokens of unfinished completions beyond those that the client knows."""
        return self._backend.partials(_PARTIALS.decode(body).known)

    async def score(self, body: bytes) -> list[tuple[float, ...]]:
        """Log-probabilities of all tokens but the first of each text in a `ScoreRequest`."""
        return await self._backend.score(_SCORE.decode(body).texts)

    async def health(self, _: bytes) -> EngineHealth:
        return msgspec.structs.replace(await self._backend.health(), resident=resident_bytes(os.getpid()))

    async def spans(self, _: bytes) -> list[Span]:
        return self._backend.drain_spans()


class NativeApp(EngineApp):
    """Application of a native engine, which passes on tokens as they are sampled, by feeds. All requests of a client
    share its feed, so that a step costs one message for each client."""

    def __init__(self, generation: Generation, largest: int = LARGEST_BODY, key: str = "") -> None:
        """`largest`: most bytes of a request body. `key`: secret that clients must send; "" for a private socket."""
        super().__init__(generation, largest, key)
        self._generation, self._feeds = generation, dict[str, Feed]()
        self._router.routes += [
            Route("/tokens", _Streaming(self.stream_tokens), methods=["POST"]),
            Route("/submit", _Exchange(self.submit, largest), methods=["POST"]),
        ]

    async def stream_tokens(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Open the feed that the body names (a name in use is refused), and send what it gets until the client
        disconnects. Then its requests are aborted."""
        try:
            name = _TOKENS.decode(await read_body(scope, receive, self._largest) or b"")
            if name in self._feeds:
                raise RefusedRequest("feed", repr(name), "a name that no open feed has")
        except (RefusedRequest, *UNREADABLE) as error:
            await _reply(send, *_refusal(error))
            return
        feed = self._feeds[name] = Feed(self._generation.engine.name)
        watch = asyncio.create_task(when_gone(receive, feed.close))
        try:
            await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
            await send({"type": "http.response.body", "body": frame(Sampled([], [], [])), "more_body": True})
            while not feed.closed:
                tokens, ended, errors = await self._generation.next(feed)
                sampled = Sampled(tokens, ended, [(request, Refusal.of(error)) for request, error in errors])
                for message in sampled.parts():
                    await send({"type": "http.response.body", "body": frame(message), "more_body": True})
        finally:
            watch.cancel()
            del self._feeds[name]
            self._generation.end(feed)

    async def submit(self, body: bytes) -> bool:
        """Submit the requests of a `SubmitRequest` to its feed; returns True. Raises RefusedRequest if that feed is not
        open."""
        order = _SUBMIT.decode(body)
        await self._generation.prepare(order.requests)
        if (feed := self._feeds.get(order.feed)) is None:
            raise RefusedRequest("feed", repr(order.feed), "an open one")
        self._generation.submit_to(feed, order.requests, every_token=order.every_token)
        return True


def serve(engine: NativeEngine, subscriber: Subscriber, listen: str, key: str = "", tls: str = "") -> None:
    """Load the newest published version, if it is newer than the engine's, then serve until SIGTERM or SIGINT.

    Args:
        subscriber: where versions are loaded from.
        listen: ``unix:/path/to.sock`` or ``host:port``.
        key: secret that clients must send; "" for none.
        tls: folder of certificates (`http.tls`), "" for none.

    Raises:
        RecipeError: the address is not available, or the certificates cannot be used.
        Exception: the error that ended the engine's loop, after open requests were ended.
    """
    event_loop.run(run_server(engine, subscriber, listen, key, tls))


async def run_server(engine: NativeEngine, subscriber: Subscriber, listen: str, key: str = "", tls: str = "") -> None:
    """Serve as `serve` does (newest version, then requests), in the running event loop; cancelling stops it."""
    newest = subscriber.newest()
    if newest is not None and newest > engine.version:
        engine.update(newest, subscriber.load(newest))
    generation = Generation(engine, subscriber)
    # Bodies are large: lost groups come with all their tokens, rounds with all their groups.
    await serve_app(NativeApp(generation, LARGEST_FRAME, key), listen, generation.run, tls)


async def serve_app(app: EngineApp, listen: str, run: Run, tls: str = "") -> None:
    """Serve `app` at the address `listen` and run the engine's loop `run`, until either ends. Then both have ended.
    `tls`: folder of certificates for a TCP address, "" for none; a Unix socket has no TLS.

    Raises:
        RecipeError: the address is not available, or the certificates cannot be used.
        Exception: the error that ended the engine's loop.
    """
    unix_path, host, port = split_address(listen)
    if unix_path is not None:
        await run_app(server_of(app, unix_path), None, run)
    else:
        bound = bind(host, port, ("engine.base_port", "engine.base_port"))
        asked = by_own_names(app, HostNames(host, loopback=True)) if is_loopback(bound) and not app.has_key else app
        await run_app(server_of(asked, tls=tls, has_key=app.has_key), [bound], run)


async def _reply(send: Send, status: int, message: object) -> None:
    """Send a message as MessagePack; with status 503, the client may try again after a second."""
    headers = [(b"retry-after", b"1")] if status == 503 else []
    await reply(send, status, MSGPACK, msgspec.msgpack.encode(message), headers)


def _too_large(largest: int) -> Refusal:
    return Refusal(error="RefusedRequest", field="body", found="too many bytes", allowed=f"at most {largest:,} bytes")


def _failure(error: Exception) -> tuple[int, Refusal]:
    """HTTP status 500 and body for an error that no request should cause; its traceback goes to the engine's log."""
    traceback.print_exception(error)
    found = error.problem if isinstance(error, RoleFailed) else f"{type(error).__name__}: {error}"
    return 500, Refusal(error="RoleFailed", found=found)


def _refusal(error: Exception) -> tuple[int, Refusal]:
    """HTTP status (400, 503 or 409) and body from which the client raises the same error."""
    if isinstance(error, RefusedRequest):
        return 400, Refusal.of(error)
    if isinstance(error, EngineLost):
        return 503, Refusal.of(error)
    if isinstance(error, UNREADABLE):
        return 400, Refusal(error="RefusedRequest", field="body", found=str(error), allowed=_DOCUMENTED)
    return 409, Refusal(error=type(error).__name__, found=str(error))
