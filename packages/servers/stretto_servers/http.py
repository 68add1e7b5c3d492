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
_SHOWN = 300
LOOK_SECONDS = 5.0  #: longest wait for status and measurements of a server
_LARGEST_EVENT = 64 << 20


class JsonServer:
    """Client of one server. Calls may overlap; each uses its own connection."""

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
            EngineLost: the server cannot be reached, or the connection breaks.
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
        """Post a message; yields the data of each server-sent event of the reply, without ``[DONE]``. Leaving the
        iteration closes the connection.

        Raises:
            RefusedRequest: the server replies that the request is wrong (status 400, 413 or 422), with its message.
            WireError: it replies with another status than 200, or an event has more than 64 MiB.
            EngineLost: the server cannot be reached, or the connection broke.
            DeadlineExceeded: no event came for `token_seconds`.
        """
        rest = b""
        async with self._connections.one() as connection:
            self._send(connection, "POST", path, message)
            while True:
                async with deadline(self._owner, f"the next tokens of {self.name}", self._token_seconds):
                    part = await connection.read()
                    if connection.status != _OK:
                        raise refused(self.name, path, connection.status, part + await connection.rest())
                *events, rest = (rest + part).split(b"\n\n")
                if len(rest) > _LARGEST_EVENT:
                    raise WireError(f"{self.name} sends an event of {path} without an end: {len(rest):,} bytes so far")
                for event in events:
                    data = event.strip().removeprefix(b"data:").strip()
                    if data and data != b"[DONE]" and not data.startswith(b":"):  # ":" begins a keep-alive comment
                        yield data
                if not part:
                    return

    async def close(self) -> None:
        self._connections.close()

    @staticmethod
    def _send(connection: Connection, method: str, path: str, message: object) -> None:
        connection.send(method, path, b"" if message is None else msgspec.json.encode(message), _JSON)


def refused(server: str, path: str, status: int, body: bytes) -> WireError:
    """Make the error for an HTTP error reply, with the server's message: a RefusedRequest if the status means a mistake
    in the request, otherwise a WireError."""
    said = body.decode(errors="replace")[:_SHOWN]
    with suppress(AttributeError, KeyError, TypeError, *UNREADABLE):
        told = msgspec.json.decode(body)
        said = str(told["error"]["message"] if isinstance(told.get("error"), dict) else told.get("message") or told)
    if status in _OF_THE_REQUEST:
        return RefusedRequest(f"{server}{path}", said[:_SHOWN], f"what the server allows (status {status})")
    return WireError(f"{server} answers {path} with status {status}: {said[:_SHOWN]}")
