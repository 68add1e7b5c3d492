"""Client of an engine's HTTP server (`engine.http.server`). It is imported without torch, and every wait has a
deadline."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import chain
from typing import Annotated, TypeVar

import msgspec

from stretto.core.canary import Ask, Loaded
from stretto.core.deadlines import deadline, standstill
from stretto.core.engine import EngineHealth
from stretto.core.errors import (
    UNREADABLE,
    DeadlineExceeded,
    EngineLied,
    EngineLost,
    RefusedRequest,
    RoleFailed,
    TornPublication,
    WireError,
    several,
)
from stretto.core.events import MOST_SPANS, Span
from stretto.core.frames import LARGEST_FRAME, Unframer
from stretto.core.records import Completion, GenerateRequest, Partials
from stretto.engine.http.connections import Connection, Connections
from stretto.engine.wire import (
    AbortRequest,
    PartialsRequest,
    Refusal,
    Sampled,
    ScoreRequest,
    SubmitRequest,
    UpdateRequest,
)

Message = TypeVar("Message")

_OK, _SERVER_ERROR = 200, 500
_IDLE_SECONDS = 60.0  # an engine's server keeps its connections for a day
_LOOKS = 6  # a wait for a completion first asks for the engine's health after 1/6 of its limit
_NAMED = 3  # most requests named in a message
_SHOWN = 300  # most characters of an engine's error in a message
_LOAD, _PARTIALS = "/update_weights", "/partials"
_LARGEST_NEWS = 16 << 20  # bytes of a reply about an engine's health, or of its spans: ten times those of `MOST_SPANS`
_FRAME: msgspec.msgpack.Decoder[Completion | list[Refusal]] = msgspec.msgpack.Decoder(
    Completion | Annotated[list[Refusal], msgspec.Meta(min_length=1)]
)


class HttpEngine:
    """Client of one engine. Calls may overlap; each has its own connection. All raise EngineLost if the engine cannot
    be reached, is stopping or breaks off, DeadlineExceeded if it does not reply in time, and WireError if its reply
    cannot be decoded or is too large.

    Example::

        async for completion in engine.generate(request):    # as the completions end, in any order
            ...
        await engine.update(7)                                # version 7 is loaded and samples the next token
    """

    def __init__(
        self,
        name: str,
        address: str,
        *,
        answer_seconds: float = 600.0,
        load_seconds: float = 120.0,
        health_seconds: float = 30.0,
        key: str = "",
        context: ssl.SSLContext | None = None,
    ) -> None:
        """Args:
        name: of the engine, in errors.
        address: ``unix:/path/to.sock`` or ``host:port``.
        answer_seconds: longest wait for scores; and for the next completion while the engine computes no tokens.
        load_seconds: longest time during a load in which the engine reads no further bytes.
        health_seconds: longest wait for any other reply; the engine replies between two steps.
        key: secret sent with each request; "" for none.
        context: TLS settings; None: no TLS."""
        self.name = name
        self._owner = f"the client of {name}"
        self._answer_seconds, self._load_seconds, self._health_seconds = answer_seconds, load_seconds, health_seconds
        self._connections = Connections(name, address, key, context, idle=_IDLE_SECONDS)

    async def generate(self, *requests: GenerateRequest) -> AsyncIterator[Completion]:
        """Completions as they end, one per seed of every request. Leaving the iteration early aborts the rest.

        Requests sent together start in the same step.

        Raises:
            RefusedRequest: the engine refused one of the requests, and so all; a server such as vLLM behind the engine
                may refuse one after others have been yielded.
            RoleFailed: the engine failed to accept them, by an error that no request should cause.
            EngineLost: as all calls, or the engine ended before the last completion.
            EngineLied: the server behind it returned impossible results.
            DeadlineExceeded: no completion ended and no token was computed for `answer_seconds`.
        """
        asked, had = {request.id: request for request in requests}, set[tuple[str, int]]()
        missing, unframer = sum(len(request.seeds) for request in requests), Unframer()
        requested = ", ".join(request.id for request in requests[:_NAMED]) + (", ..." if len(requests) > _NAMED else "")
        body = _encoded(requests)
        async with self._connections.one() as connection:
            connection.send("POST", "/generate", body)
            while True:
                parts = await self._parts(connection, f"the next completion to {requested}")
                if connection.status != _OK:
                    async with deadline(self._owner, f"the end of a refusal of {requested}", self._health_seconds):
                        raise refusal(
                            self.name, connection.status, b"".join([*parts, await connection.rest()]), ends=True
                        )
                arrived, failure = self._completions(chain.from_iterable(map(unframer.feed, parts)))
                self._check_all(arrived, asked, had)
                missing -= len(arrived)
                for completion in arrived:
                    yield completion
                if failure is not None:
                    raise failure
                if not parts:
                    break
        if missing:
            raise EngineLost(self.name, f"ended {requested} with {several(missing, 'completion')} missing")

    def _check_all(
        self, arrived: Sequence[Completion], asked: Mapping[str, GenerateRequest], had: set[tuple[str, int]]
    ) -> None:
        """Check what an untrusted engine sent; does nothing here: an engine on this machine is trusted. `arrived`:
        completions that came together; `asked`: requests by id; `had`: (request, member) of those before, for a
        subclass to keep."""

    async def _parts(self, connection: Connection, awaited: str) -> list[bytes]:
        """The next bytes of a reply, none at its end. A completion may take any time as long as the engine computes
        tokens, for it or for others, since the length of each completion is limited. Raises DeadlineExceeded, which
        names `awaited` as overdue, once it has computed none for `answer_seconds`."""
        with suppress(DeadlineExceeded):  # most completions end before the engine's health must be asked for
            async with deadline(self._owner, awaited, self._answer_seconds / _LOOKS):
                return await connection.parts()
        async with standstill(self._owner, awaited, self._answer_seconds, self._computed):
            return await connection.parts()

    async def tokens(self, feed: str) -> AsyncIterator[Sampled]:
        """Open a feed of a native engine, by a name that no other has, and yield what steps sample for it; the first
        message is empty, and tells that the feed is open. Leaving the iteration aborts the requests of the feed.
        It has no timeout, because an idle engine samples nothing; the errors are those of all calls."""
        unframer = Unframer()
        async with self._connections.one() as connection:
            connection.send("POST", "/tokens", _encoded(feed))
            while part := await connection.read():
                if connection.status != _OK:
                    raise refusal(self.name, connection.status, part + await connection.rest())
                for body in unframer.feed(part):
                    yield decoded(body, Sampled)
        raise EngineLost(self.name, "ended a feed")

    async def submit(self, feed: str, requests: Sequence[GenerateRequest], *, every_token: bool) -> None:
        """Submit requests, which start in the same step, to an open feed. `every_token`: the feed gets each token in
        the step that samples it; else it gets completions as they end. Raises RefusedRequest if one of them is invalid
        or the feed is not open; then none is accepted."""
        order = SubmitRequest(feed, list(requests), every_token)
        await self._exchange("/submit", order, "the acceptance of requests", self._health_seconds)

    async def update(self, version: int, ask: Ask | None = None) -> Loaded:
        """Make the engine load a published version; returns the version that samples the next token, and the scores
        with which the engine answers the challenge, if any. `ask` returns the challenge (a text that the engine must
        score) for a version; None: no challenge.

        A load may take longer than `load_seconds` as long as it makes progress; the order is sent once.

        Raises:
            TornPublication: the publication is incomplete, or not of this model; the engine keeps its version.
            RefusedRequest: the version is older than the version in use.
            RoleFailed: the load or the challenge failed; the engine samples nothing until a version is loaded.
            DeadlineExceeded: the engine has read no bytes for `load_seconds`.
        """
        awaited = f"{self.name} to load version {version}"
        order = UpdateRequest(version=version, challenge=await ask(version) if ask is not None else None)
        async with standstill(self._owner, awaited, self._load_seconds, self.moved):
            return decoded(await self._reply(_LOAD, order), Loaded)

    async def moved(self) -> object:
        """Bytes of published versions that the engine has read; None if it replies late or with an error."""
        health = await self._look()
        return None if health is None else health.checked

    async def _computed(self) -> object:
        """Counters that grow while the engine computes or loads; None if it replies late or with an error."""
        health = await self._look()
        return None if health is None else (health.generated, health.prefilled, health.recomputed, health.checked)

    async def _look(self) -> EngineHealth | None:
        """The engine's health; None if it does not reply within `load_seconds`, or with an error."""
        with suppress(EngineLost, DeadlineExceeded, WireError, TimeoutError):
            async with asyncio.timeout(self._load_seconds):
                return await self.health()
        return None

    async def abort(self, request_id: str | list[str]) -> None:
        """Abort a request or several; a `generate` of theirs that is open ends with EngineLost. Unknown ids are
        ignored."""
        await self._exchange("/abort", AbortRequest(request=request_id), "an abort", self._health_seconds)

    async def partials(self, known: Mapping[str, Sequence[int]]) -> Partials:
        """New tokens of unfinished completions, by request id and member. `known`: by request id, the number of tokens
        of each member that the caller already has; other requests are left out. Raises WireError if a checksum of the
        tokens does not match, RoleFailed if the engine failed to tell them."""
        message = PartialsRequest(known={request: list(counts) for request, counts in known.items()})
        body = await self._exchange(_PARTIALS, message, "the tokens of unfinished completions", self._health_seconds)
        found = decoded(body, Partials)
        for id, pieces in found.items():
            if not all(piece.intact for piece in pieces.values()):
                raise WireError(f"{self.name} sent tokens of {id!r} whose checksum does not fit")
        return found

    async def score(self, texts: Sequence[Sequence[int]]) -> list[tuple[float, ...]]:
        """Log-probabilities of all tokens but the first of each text (token ids), by the version in use, at temperature
        1. Raises RefusedRequest if a text is empty, longer than the context, or has tokens outside the vocabulary."""
        message = ScoreRequest(texts=tuple(map(tuple, texts)))
        body = await self._exchange("/score", message, "the scores of texts", self._answer_seconds)
        return decoded(body, list[tuple[float, ...]])

    async def health(self) -> EngineHealth:
        """The engine's version, queue length and counters. Raises EngineLied for a reply that no engine sends."""
        return await self._news("/health", "its health", EngineHealth)

    async def spans(self) -> list[Span]:
        """Times at which the engine was busy, since the last call, each returned once; of too many, the newest.
        Raises EngineLied for a reply that no engine sends."""
        return (await self._news("/spans", "its spans", list[Span]))[-MOST_SPANS:]

    async def _news(self, path: str, awaited: str, kind: type[Message]) -> Message:
        async with deadline(self._owner, awaited, self._health_seconds), self._connections.one() as connection:
            connection.send("GET", path, b"")
            try:
                reply = await connection.rest(_LARGEST_NEWS)
                if connection.status == _OK:
                    return decoded(reply, kind)
            except WireError as nonsense:
                raise EngineLied(self.name, f"told nonsense about itself: {nonsense}") from None
            raise refusal(self.name, connection.status, reply)

    def break_off(self) -> None:
        """Close every connection at once; open calls end with EngineLost."""
        self._connections.break_off()

    async def close(self) -> None:
        """Close the idle connections; open calls are not ended."""
        self._connections.close()

    async def _exchange(
        self, path: str, message: object, awaited: str, seconds: float, most: int = LARGEST_FRAME
    ) -> bytes:
        async with deadline(self._owner, awaited, seconds):
            return await self._reply(path, message, most)

    async def _reply(self, path: str, message: object, most: int = LARGEST_FRAME) -> bytes:
        """Send a message (None: a GET without body) and return the body of the reply. The caller sets the deadline.

        Raises the error that the engine replied with, EngineLost if the connection breaks, WireError if the body has
        more than `most` bytes, and the errors of `Connections.one`."""
        method, body = ("GET", b"") if message is None else ("POST", _encoded(message))
        async with self._connections.one() as connection:
            connection.send(method, path, body)
            reply = await connection.rest(most)
            if connection.status != _OK:
                raise refusal(self.name, connection.status, reply, ends=path in (_LOAD, _PARTIALS))
            return reply

    def _completions(self, bodies: Iterable[memoryview]) -> tuple[list[Completion], WireError | EngineLost | None]:
        """Decode frames of /generate, up to the first that is no completion. Returns the completions, and the error to
        raise behind them: the one that the frame holds, or EngineLied if its checksum does not fit; None: none."""
        found = list[Completion]()
        for body in bodies:
            try:
                told = _FRAME.decode(body)
            except UNREADABLE as error:
                return found, _unknown(body, error)
            if isinstance(told, list):
                return found, error_of(told[0])
            if not told.segment.intact:
                return found, EngineLied(self.name, f"sent tokens of {told.request!r} whose checksum does not fit")
            found.append(told)
        return found, None


def _encoded(message: object) -> bytes:
    """Encode a message as MessagePack. Raises RefusedRequest, as an engine of this process does, if it has an integer
    of more than 64 bits, or a text that UTF-8 cannot encode (half of a surrogate pair)."""
    try:
        return msgspec.msgpack.encode(message)
    except (OverflowError, UnicodeEncodeError) as error:
        raise RefusedRequest("request", str(error), "numbers of 64 bits, and whole letters") from None


def decoded(body: bytes | memoryview, kind: type[Message]) -> Message:
    """Decode a MessagePack reply. Raises WireError if it is not of type `kind`."""
    try:
        return msgspec.msgpack.decode(body, type=kind)
    except UNREADABLE as error:
        raise _unknown(body, error) from None


def _unknown(body: bytes | memoryview, error: Exception) -> WireError:
    return WireError(f"a reply that no stretto engine sends: {bytes(body[:80])!r} ({error})")


def one_line(told: object) -> str:
    """What an engine told, as a line of 300 characters at most: it may be anything."""
    return " ".join(str(told).split())[:_SHOWN]


def refusal(engine: str, status: int, body: bytes, *, ends: bool = False) -> WireError | EngineLost | RoleFailed:
    """The error, to be raised by the caller, for an engine's reply with an HTTP `status` other than 200: the one in
    `body`. If the body holds none, EngineLost for status 500, else WireError. With status 500 `body` holds the text of
    an error that no request should cause: RoleFailed if `ends`, since the caller tells it, else EngineLost."""
    try:
        told = decoded(body, Refusal)
    except WireError as error:
        # The server ends open requests with this status when the engine has failed.
        return EngineLost(engine, "broke off a request") if status == _SERVER_ERROR else error
    if status == _SERVER_ERROR:
        found = one_line(told.found)
        return RoleFailed(engine, found, 1) if ends else EngineLost(engine, f"failed at a request: {found}")
    return error_of(told)


def error_of(told: Refusal) -> WireError | EngineLost:
    """The error that an engine has told, to be raised by the caller: RefusedRequest, EngineLost, EngineLied or
    TornPublication if `told` names it, else WireError."""
    if told.error == "RefusedRequest":
        return RefusedRequest(told.field, told.found, told.allowed)
    if told.error in ("EngineLost", "EngineLied"):
        return (EngineLied if told.error == "EngineLied" else EngineLost)(told.field, told.found)
    return (TornPublication if told.error == "TornPublication" else WireError)(told.found)
