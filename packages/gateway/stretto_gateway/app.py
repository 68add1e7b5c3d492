"""Base class of both HTTP applications, with and without sessions: routes, bodies, the model's card, replies and errors
in every dialect."""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
import sys
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from functools import partial
from typing import Any

import msgspec
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from stretto.core.deadlines import deadline
from stretto.core.errors import DeadlineExceeded, EngineLost, RefusedRequest
from stretto.processes.http.asgi import (
    WRITE_NOW,
    Header,
    HostNames,
    foreign_host,
    header,
    read_body,
    reply,
    unless_gone,
)
from stretto.processes.http.reach import url_of
from stretto.processes.http.server import HttpServer, settings_of
from stretto_gateway.dialects.dialect import Dialect, TokenCount, refusal
from stretto_gateway.dialects.openai import ChoiceDialect
from stretto_gateway.model import ServedModel
from stretto_gateway.requests import NotServed, Request
from stretto_workflows.chat.messages import ChatRequest, SampledTurn

_KEEP_ALIVE_SECONDS = 15.0  # usual idle timeouts of proxies and load balancers are 30 s or more
_BODY_SECONDS = 60.0
_BACKLOG = 4096
_SHUTDOWN_SECONDS = 1
_IDLE_SECONDS = 120  # of a connection
_MODELS = "/v1/models"
_JSON = "application/json"
_STREAMED = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # proxies pass keep-alive comments on at once
]
_STATUSES = {
    "400": "a field is wrong",
    "401": "the key is missing or wrong",
    "404": "no such model",
    "409": "the session has ended",
    "413": "the body is too large",
    "503": "the client may try again",
}
_DETAILS = {"type": "object", "required": ["message", "type"]}
_ERROR = {_JSON: {"schema": {"type": "object", "required": ["error"], "properties": {"error": _DETAILS}}}}
_RESPONSES: Mapping[str, Any] = {
    "responses": {
        "200": {"description": "a reply"},
        **{status: {"description": text, "content": _ERROR} for status, text in _STATUSES.items()},
    }
}


class ChatExchange:
    """One HTTP request to a chat server, and its reply, which is sent whole or as a stream of events.

    Attributes:
        status: status of the reply once it has begun; 0 before.
        headers: further headers of the reply.
        path: path of the request, without a session's key in it.
        key: API key that the client sent; "" for none.
        dialect: dialect of the reply, errors included.
        request: decoded body; None until it is parsed.
    """

    def __init__(self, scope: Scope, receive: Receive, send: Send, path: str, key: str) -> None:
        self.scope, self.receive, self._send = scope, receive, send
        self.path, self.key = path, key
        self.status = 0
        self.headers: list[Header] = []
        self.dialect: Dialect | ChoiceDialect
        self.request: Request | None = None

    def add_headers(self, headers: Mapping[str, str]) -> None:
        """Add headers to the reply, which must not have begun."""
        self.headers += [(name.encode(), value.encode()) for name, value in headers.items()]

    async def show(self, found: object) -> None:
        """Send a whole reply with status 200: the value `found` as JSON."""
        await self.reply(msgspec.json.encode(found))

    async def send(self, message: Message) -> None:
        """Send an ASGI message, and keep the status of the first one."""
        self.status = self.status or message["status"]  # the first message of a reply has it
        await self._send(message)

    async def reply(self, body: bytes, status: int = 200, media: str = _JSON) -> None:
        """Send a whole reply with the added headers. `media`: its content type."""
        await reply(self.send, status, media, body, self.headers)

    @property
    def write_now(self) -> Callable[[Callable[[], bytes]], bool] | None:
        """Function that writes events of a stream without waiting; None if the server lacks the extension. Call it with
        a function that makes the events. It returns True once they are written. It returns False, without making them,
        before the headers are sent, after the end of the reply, and while the client lags."""
        found: Callable[[Callable[[], bytes]], bool] | None = self.scope.get("extensions", {}).get(WRITE_NOW)
        return found

    async def write(self, events: bytes, *, last: bool = False) -> None:
        """Send events; the first call also sends the headers, the one with `last` ends the reply."""
        if not self.status:
            headers = [*_STREAMED, *self.headers]
            await self.send({"type": "http.response.start", "status": 200, "headers": headers})
        await self.send({"type": "http.response.body", "body": events, "more_body": not last})


Handler = Callable[[ChatExchange], Awaitable[None]]


class ChatServer(ABC):
    """Base class of ASGI applications that serve chat dialects. A subclass checks keys and produces completions.
    `title`: name of the application in its OpenAPI description."""

    title: str

    def __init__(
        self, model: ServedModel, dialects: Sequence[Dialect | ChoiceDialect], names: HostNames | None = None
    ) -> None:
        """Serve `model` in these dialects.

        Args:
            dialects: served dialects; the first one also formats errors on other paths.
            names: names of this server; requests with another ``Host`` are refused. None allows every name.
        """
        self.model, self._names, self._created = model, names, date_of_reply()
        self._dialects, self._plain = {dialect.path: dialect for dialect in dialects}, dialects[0]
        self._counts = {count.path: (count, dialect) for dialect in dialects for count in dialect.counts}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path, key = self.address(scope)
        call = ChatExchange(scope, receive, send, path, key)
        call.dialect = self._dialects.get(path) or self._counts.get(path, (None, self._plain))[1]
        try:
            if self._names is not None and (host := self._names.foreign(scope)) is not None:
                raise NotServed(403, foreign_host(host), "host")
            await self.serve(call)
        except (NotServed, RefusedRequest, EngineLost, DeadlineExceeded) as error:
            await self._fail(call, self.error(call, error))
        except Exception as error:  # a bug: its traceback goes to the server's log, the client gets a 500
            traceback.print_exc(file=sys.stderr)
            self.failed(call, error)
            if not call.status:
                await self._fail(call, NotServed(500, "internal error of the server; its log has the traceback"))

    def address(self, scope: Scope) -> tuple[str, str]:
        """Path of a request, without a session's key in it, and its API key ("" for none)."""
        return scope["path"], sent_key(scope)

    def route(self, path: str) -> tuple[str, Handler] | None:
        """HTTP method that a path allows, and its handler; None for an unknown path."""
        if (dialect := self._dialects.get(path)) is not None:
            return "POST", partial(self.complete, dialect)
        if path in self._counts:
            return "POST", partial(self.count, self._counts[path][0])
        if path.startswith(f"{_MODELS}/"):
            return "GET", self.models
        page = self.pages().get(path)
        return None if page is None else ("GET", page)

    def pages(self) -> dict[str, Handler]:
        """Handlers of GET requests by path."""
        return {_MODELS: self.models, "/openapi.json": lambda call: call.reply(self.openapi()), "/health": self.health}

    @property
    def paths(self) -> frozenset[str]:
        """All paths that are served, without those that end with a name."""
        return frozenset({*self._dialects, *self._counts, *self.pages()})

    async def serve(self, call: ChatExchange) -> None:
        """Call the handler of a request.

        Raises:
            NotServed: 404 for an unknown path, 405 for another method.
            NotServed, RefusedRequest, EngineLost, DeadlineExceeded: an error of the handler, which the caller sends to
                the client.
        """
        method = call.scope["method"]
        if (route := self.route(call.path)) is None:
            raise NotServed(404, f"{method} {call.path[:80]}: no such path; GET /openapi.json lists all")
        if method != route[0]:
            raise NotServed(405, f"{call.path[:80]} allows {route[0]}, not {method}", allow=route[0])
        await route[1](call)

    @abstractmethod
    async def complete(self, dialect: Any, call: ChatExchange) -> None:
        """Produce completions for a request in this dialect, and send the reply."""

    @abstractmethod
    async def count(self, count: TokenCount, call: ChatExchange) -> None:
        """Read a request of the kind `count`, and reply with the number of tokens of its prompt."""

    async def health(self, call: ChatExchange) -> None:
        """Reply to ``GET /health`` with the status "ok" and the name of the model."""
        await call.show({"status": "ok", "model": self.model.name})

    def failed(self, call: ChatExchange, error: Exception) -> None:  # noqa: B027  # a hook: most servers need none
        """Hook, called with an unexpected error (a bug). Then the client gets a 500, unless its reply has begun."""

    def error(self, call: ChatExchange, error: Exception) -> NotServed:
        """Convert an exception to an error reply: a RefusedRequest to 400, a NotServed to itself, any other to 503."""
        if isinstance(error, NotServed):
            return error
        if isinstance(error, RefusedRequest):
            return refusal(error, call.dialect.fields, call.request)
        return NotServed(503, str(error), code="unavailable")

    async def _fail(self, call: ChatExchange, why: NotServed) -> None:
        if call.status:
            await call.write(call.dialect.fail(why), last=True)
        else:
            call.headers = why.headers
            await call.reply(call.dialect.refuse(why), why.status)

    async def body(self, call: ChatExchange) -> bytes:
        """Read the body of a request.

        Raises:
            NotServed: 413 for a body that is too large, 408 for one that takes more than a minute.
            RefusedRequest: the client has disconnected before its end.
        """
        most = self.model.config.body_bytes
        try:
            async with deadline("the server", "the body of a request", _BODY_SECONDS):
                raw = await read_body(call.scope, call.receive, most)
        except DeadlineExceeded:
            raise NotServed(408, f"the body did not come within {_BODY_SECONDS:g} s") from None
        if raw is None:
            raise NotServed(413, f"body: more than {most:,} bytes, which is the limit", "body", "body_too_large")
        return raw

    async def parsed(self, parse: Callable[[bytes], Any], call: ChatExchange) -> Any:
        """Read the body and decode it with `parse`; returns the request, which is also set on `call`. If the server
        ignores sampling options of a chat request, the reply gets the header ``x-stretto-unapplied``, which names them.

        Raises:
            NotServed: 404 if another model is requested; and the errors of `body`.
            RefusedRequest: a field is wrong, or `parse` refuses the body.
        """
        raw = await self.body(call)
        call.request = request = parse(raw)
        if request.model is not None and request.model != self.model.name:
            raise self._unknown(request.model)
        if isinstance(request, ChatRequest):
            self.model.rule.check(request)
            if unapplied := self.model.rule.unapplied(request):
                call.add_headers({"x-stretto-unapplied": ", ".join(unapplied)})
        return request

    async def send(
        self, dialect: Dialect, call: ChatExchange, turns: Coroutine[Any, Any, Sequence[SampledTurn]]
    ) -> None:
        """Await `turns` and send them to the client, whole or as a stream of events, as the request of `call` wants. A
        stream gets keep-alive events until then. If the client disconnects, `turns` is cancelled and nothing more is
        sent."""
        request = call.request
        assert isinstance(request, ChatRequest)
        seconds = _KEEP_ALIVE_SECONDS if request.stream else None
        found = await unless_gone(call.receive, turns, lambda: call.write(dialect.keep_alive), seconds)
        if found is None:
            return
        call.add_headers(dialect.reply_headers(found[0].id))
        if request.stream:
            await call.write(b"".join(dialect.events(request, found)), last=True)
        else:
            await call.reply(dialect.reply(request, found))

    async def stream(self, call: ChatExchange, work: Coroutine[Any, Any, None]) -> None:
        """Await `work`, which writes the reply to the request of `call`; it is cancelled if the client disconnects. A
        stream of events gets a keep-alive event every 15 seconds, also while the request waits for an engine."""
        request = call.request
        assert request is not None

        async def alive() -> None:
            if call.write_now is not None:  # writes nothing before the headers, after the end, or to a client that lags
                call.write_now(lambda: call.dialect.keep_alive)

        await unless_gone(call.receive, work, alive, _KEEP_ALIVE_SECONDS if request.stream else None)

    async def models(self, call: ChatExchange) -> None:
        """Reply to ``GET /v1/models`` and ``GET /v1/models/NAME``. Raises NotServed (404) for another name."""
        name, created, most = self.model.name, self._created, self.model.rule.context
        card = {"id": name, "created": created, "max_model_len": most, "object": "model", "owned_by": "stretto"}
        if call.path == _MODELS:
            await call.show({"data": [card], "object": "list"})
        elif call.path == f"{_MODELS}/{name}":
            await call.show(card)
        else:
            raise self._unknown(call.path.removeprefix(f"{_MODELS}/"))

    def _unknown(self, name: str) -> NotServed:
        error = RefusedRequest("model", f"{name[:80]!r} is not served here", f"the model is {self.model.name!r}")
        return NotServed(404, str(error), "model", "model_not_found")

    def openapi(self) -> bytes:
        """OpenAPI 3.1 description as JSON, generated from the record types of the bodies. It does not include limits of
        the model or of a session."""
        forms = {path: dialect.body for path, dialect in self._dialects.items()}
        forms |= {path: count.body for path, (count, _) in self._counts.items()}
        found = msgspec.json.schema_components(forms.values(), ref_template="#/components/schemas/{name}")
        # Classes that are private to their module have plain names here.
        references, schemas = msgspec.json.decode(re.sub(rb'(?<=["/])_', b"", msgspec.json.encode(found)))
        for schema in schemas.values():
            if "model" in schema.get("properties", {}):
                schema["properties"]["model"] = {"enum": [self.model.name]}
        paths: dict[str, Any] = {path: {"get": _RESPONSES} for path in self.pages()}
        for path, reference in zip(forms, references, strict=True):
            body = {"required": True, "content": {"application/json": {"schema": reference}}}
            paths[path] = {"post": {"requestBody": body, **_RESPONSES}}
        named = {"name": "model", "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
        paths[f"{_MODELS}/{{model}}"] = {"parameters": [named], "get": _RESPONSES}
        described = {"openapi": "3.1.0", "info": {"title": self.title, "version": "1"}, "paths": paths}
        return msgspec.json.encode({**described, "components": {"schemas": schemas}})


def date_of_reply() -> int:
    """Current Unix time in seconds."""
    return int(time.time())


def unknown_key() -> NotServed:
    """Make the error for a request whose API key is missing or wrong."""
    return NotServed(401, "the API key is missing or wrong", code="invalid_api_key")


def sent_key(scope: Scope) -> str:
    """API key of a request, from the header ``x-api-key`` (Anthropic) or ``Authorization: Bearer`` (OpenAI); "" for
    none."""
    if (value := header(scope, b"x-api-key")) is None:
        scheme, _, value = (header(scope, b"authorization") or b"").partition(b" ")
        value = value if scheme.lower() == b"bearer" else b""
    return value.decode("latin-1").strip()


@contextlib.asynccontextmanager
async def serving_beside(app: ASGIApp, bound: socket.socket) -> AsyncIterator[str]:
    """Context manager: serve an application on a bound socket, as a task of this event loop; yields the address as
    ``http://host:port``. On leaving, the server stops and the socket is closed."""
    settings = settings_of(
        app, backlog=_BACKLOG, timeout_keep_alive=_IDLE_SECONDS, timeout_graceful_shutdown=_SHUTDOWN_SECONDS
    )
    server = HttpServer(settings, patience=_IDLE_SECONDS, signals=False)
    bound.listen(_BACKLOG)
    serving = asyncio.create_task(server.serve([bound]))
    try:
        yield url_of(*bound.getsockname()[:2])
    finally:
        server.should_exit = True
        await serving  # it has a deadline of its own for open requests
        bound.close()
