"""HTTP client for an inference server: JSON and server-sent events, over connections of `engine.http`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import suppress
from functools import partial
from typing import Any

import msgspec

from stretto.core.deadlines import deadline, standstill
from stretto.core.errors import UNREADABLE, DeadlineExceeded, EngineLost, RefusedRequest, WireError
from stretto.engine.http.connections import Connection, Connections

_JSON = "application/json"
_OK = 200
_OF_THE_REQUEST = (400, 413, 422)  # statuses for a mistake in the request
_NO_ROOM = (429, 503)  # the server has too many requests, and has not begun this one
_OF_A_PROXY = (502, 504)  # it cannot reach the server, or has stopped waiting for it
_PAUSE_SECONDS, _LONGEST_PAUSE = 0.1, 5.0  # between two requests to a server without room
_SHOWN = 300
LOOK_SECONDS = 5.0  #: longest wait for status and measurements of a server
_LARGEST_EVENT = 64 << 20


class JsonServer:
    """HTTP client of one inference server. Calls may overlap; each uses its own connection."""

    def __init__(self, name: str, address: str, *, seconds: float, token_seconds: float) -> None:
        """Create a client of the server at `address`; nothing is sent yet.

        Args:
            name: name of the server in errors.
            address: ``host:port``.
            seconds: longest wait for a reply.
            token_seconds: longest wait for the next tokens of a stream.
        """
        self.name = name
        self._owner = f"the adapter of {name}"
        self._seconds, self._token_seconds = seconds, token_seconds
        self._connections = Connections(name, address)

    async def exchange(
        self,
        method: str,
        path: str,
        message: object = None,
        seconds: float | None = None,
        progress: Callable[[], int] | None = None,
    ) -> Any:
        """Send a request with this `method` to `path`; returns the JSON of the reply, its text if it is not JSON, None
        without a body.

        Args:
            message: body, sent as JSON; None for no body.
            seconds: time limit; None for the client's own.
            progress: function whose value is polled; the time limit restarts whenever it changes.

        Raises:
            RefusedRequest: the server replies that the request is wrong (status 400, 413 or 422), with its message.
            WireError: it replies with another status than 200, or this process cannot open a connection.
            EngineLost: the server cannot be reached, by us or by a proxy (status 502 or 504), the connection breaks, or
                it has no room (429 or 503).
            DeadlineExceeded: there is no whole reply within the time limit.
        """
        awaited, longest = f"{path} of {self.name}", seconds or self._seconds
        bound = deadline(self._owner, awaited, longest)
        if progress is not None:
            bound = standstill(self._owner, awaited, longest, partial(asyncio.to_thread, progress))
        async with bound, self._connections.one() as connection:
            self._send(connection, method, path, message)
            body = await connection.rest()
            if connection.status != _OK:
                raise refused(self.name, path, connection.status, body)
        try:
            return msgspec.json.decode(body) if body else None
        except UNREADABLE:
            return body.decode(errors="replace")

    async def status(self, path: str) -> int:
        """HTTP status of a GET request; 0 without a reply within five seconds."""
        bound = deadline(self._owner, f"{path} of {self.name}", min(LOOK_SECONDS, self._seconds))
        with suppress(EngineLost, DeadlineExceeded, WireError):
            async with bound, self._connections.one() as connection:
                self._send(connection, "GET", path, None)
                await connection.rest()
                return connection.status
        return 0

    async def events(self, path: str, message: object) -> AsyncGenerator[bytes]:
        """Post a message, as JSON; yields the data of each server-sent event of the reply, without ``[DONE]``. Leaving
        the iteration closes the connection.

        A server that has no room now (status 429 or 503) is asked again, until `token_seconds` are over.

        Raises:
            RefusedRequest: the server replies that the request is wrong (status 400, 413 or 422), with its message.
            WireError: it replies with another status than 200, or an event has more than 64 MiB.
            EngineLost: it cannot be reached, by us or by a proxy (502, 504), the connection broke, or it has no room.
            DeadlineExceeded: no event came for `token_seconds`; comments are none.
        """
        clock, pause = asyncio.get_running_loop().time, _PAUSE_SECONDS
        end = clock() + self._token_seconds
        while True:
            async with self._connections.one() as connection:
                self._send(connection, "POST", path, message)
                rest, more = b"", True
                while more:
                    events, rest, more = await self._next(connection, path, rest)
                    for event in events:
                        yield event
                if connection.status == _OK:
                    return
            if clock() + pause >= end:
                raise refused(self.name, path, connection.status, rest)
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)

    async def _next(self, connection: Connection, path: str, rest: bytes) -> tuple[list[bytes], bytes, bool]:
        """Read on until an event is complete; returns the events, the bytes after the last one (`rest` of the next
        call), and whether more may come. If the server has no room (429 or 503): no events, its message, and False.
        Raises what `refused` makes of other statuses than 200, and WireError for an event that is too large."""
        async with deadline(self._owner, f"the next tokens of {self.name}", self._token_seconds):
            while True:
                part = await connection.read()
                if connection.status != _OK:
                    said = part + await connection.rest()
                    if connection.status in _NO_ROOM:
                        return [], said, False
                    raise refused(self.name, path, connection.status, said)
                *events, rest = (rest + part).split(b"\n\n")
                if len(rest) > _LARGEST_EVENT:
                    raise WireError(f"{self.name} sends an event of {path} without an end: {len(rest):,} bytes so far")
                if (found := [data for data in map(_data, events) if data]) or not part:
                    return found, rest, bool(part)

    async def close(self) -> None:
        self._connections.close()

    @staticmethod
    def _send(connection: Connection, method: str, path: str, message: object) -> None:
        connection.send(method, path, b"" if message is None else msgspec.json.encode(message), _JSON)


def _data(event: bytes) -> bytes:
    """Data of a server-sent event; b"" for a comment, such as one that keeps a connection alive, and for the end."""
    data = event.strip().removeprefix(b"data:").strip()
    return b"" if data == b"[DONE]" or data.startswith(b":") else data


def refused(server: str, path: str, status: int, body: bytes) -> WireError | EngineLost:
    """Make the error for an HTTP error reply to `path`, with the server's message: RefusedRequest if the status means a
    mistake in the request (400, 413, 422); EngineLost if the server has no room (429, 503) or a proxy cannot reach it
    (502, 504), which says nothing against what it has sent before; otherwise WireError."""
    said = body.decode(errors="replace")[:_SHOWN]
    with suppress(AttributeError, KeyError, TypeError, *UNREADABLE):
        told = msgspec.json.decode(body)
        said = str(told["error"]["message"] if isinstance(told.get("error"), dict) else told.get("message") or told)
    if status in _OF_THE_REQUEST:
        return RefusedRequest(f"{server}{path}", said[:_SHOWN], f"what the server allows (status {status})")
    found = f"answers {path} with status {status}: {said[:_SHOWN]}"
    return EngineLost(server, found) if status in (*_NO_ROOM, *_OF_A_PROXY) else WireError(f"{server} {found}")
