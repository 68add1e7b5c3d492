"""Life cycle of an HTTP server: listen, receive a signal, finish open requests, end."""

from __future__ import annotations

import asyncio
import resource
import socket
import time
from collections.abc import Callable, Coroutine, Sequence
from types import FrameType
from typing import Any, Protocol

import uvicorn
from starlette.types import ASGIApp

from stretto.processes.http.server import STRANGERS, HttpServer, settings_of
from stretto.processes.http.tls import server_context

_SHUTDOWN_SECONDS = 1
_CLIENT_IDLE_SECONDS = 24 * 3600  # an idle client stays connected; a client that ends closes its socket
_IDLE_SECONDS = 120  # of arbitrary clients
_BACKLOG = 4096  # connections that may wait to be accepted while a step runs


def server_of(app: ASGIApp, unix_path: str | None = None, tls: str = "", *, has_key: bool = False) -> HttpServer:
    """Create an HTTP server that ends at once on a signal. `unix_path`: socket to listen at; None: sockets are given
    later. `tls`: folder of certificates (`http.tls`), "" for none; RecipeError if they cannot be used. `has_key`:
    clients must send a key, so only a few connections without a valid key are allowed."""
    config = _config(app, _CLIENT_IDLE_SECONDS, unix_path)
    config.load()
    config.ssl = server_context(tls)
    return HttpServer(config, strangers=STRANGERS if has_key else _BACKLOG)


#: The engine's loop: runs until it is cancelled; an error ends all requests and is raised.
Run = Callable[[], Coroutine[Any, Any, None]]


class OpenWork(Protocol):
    """The open requests of an application, for which an ending server waits. `stopping`: these are finished, new ones
    refused."""

    stopping: bool  # open requests are finished, new ones refused

    @property
    def open_requests(self) -> int:
        """Number of requests whose replies are not complete."""

    def break_off(self) -> None:
        """End every open request now."""


#: An application, its open requests, and what runs beside it until the server ends.
Parts = tuple[ASGIApp, OpenWork, Run]


class GracefulServer(HttpServer):
    """A server that, on a signal, finishes open requests and refuses new ones.

    A second signal ends it at once. The signal is not raised again after the end, since ending is the expected result.
    """

    def __init__(self, app: ASGIApp, work: OpenWork, *, patience: float, signals: bool = True) -> None:
        """`work`: the open requests of `app`. `patience`: seconds that they have to end after a signal. `signals`:
        whether it handles SIGINT and SIGTERM."""
        config = _config(app, _IDLE_SECONDS, None)
        # Arbitrary clients: many may wait, and idle between two requests. Half of the descriptors are left for engines.
        most = min(_BACKLOG, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2)
        super().__init__(config, strangers=most, patience=_IDLE_SECONDS, signals=signals)
        self._work, self._patience = work, patience
        self._until: float | None = None

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Handle SIGINT or SIGTERM: refuse new requests, and end when the open ones have ended; at the second signal,
        end at the next tick."""
        if self.should_exit:
            self.hurry()
        self.should_exit = True
        self._work.stopping = True

    def hurry(self) -> None:
        """Break open requests off at the next tick, once the server ends."""
        self._until = 0.0

    async def on_tick(self, counter: int) -> bool:
        """Called by uvicorn ten times a second. Returns True to end the server: once it was told to end (by a signal,
        or because the engine's loop has ended), and open requests have ended, or `patience` is over, when the rest is
        broken off."""
        if not await super().on_tick(counter):
            return False
        self._work.stopping = True
        now = time.monotonic()
        self._until = now + self._patience if self._until is None else self._until
        if self._work.open_requests and now < self._until:
            return False
        self._work.break_off()
        return True


async def run_app(server: HttpServer, sockets: Sequence[socket.socket] | None, run: Run) -> None:
    """Serve HTTP and `run` the engine's loop concurrently. When one of them ends, the other is ended too. If this call
    is cancelled, both are ended at once. `sockets`: where to listen; None: as configured.

    Raises:
        Exception: the error that ended the engine's loop, after open requests were ended; else the server's error.
    """
    serving = asyncio.create_task(server.serve(None if sockets is None else list(sockets)))
    steps = asyncio.create_task(run())
    try:
        # Without a deadline: a healthy engine serves until it is told to end.
        await asyncio.wait((serving, steps), return_when=asyncio.FIRST_COMPLETED)
    except asyncio.CancelledError:
        if isinstance(server, GracefulServer):
            server.hurry()
        raise
    finally:
        server.should_exit = True
        steps.cancel()
        await asyncio.wait((serving, steps))  # uvicorn has a deadline of its own for what is still open
    if not steps.cancelled():
        steps.result()
    serving.result()


def _config(app: ASGIApp, keep_alive_seconds: int, unix_path: str | None) -> uvicorn.Config:
    return settings_of(
        app,
        uds=unix_path,
        backlog=_BACKLOG,
        timeout_keep_alive=keep_alive_seconds,
        timeout_graceful_shutdown=_SHUTDOWN_SECONDS,
    )
