"""A gateway that listens beside other work of its process."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

from starlette.types import ASGIApp

from stretto.processes.http.server import HttpServer, settings_of

_BACKLOG = 4096
_SHUTDOWN_SECONDS = 1
_KEEP_ALIVE_SECONDS = 120


class _BesideServer(HttpServer):
    """Signals are those of the run, not of the server."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@asynccontextmanager
async def serving_beside(app: ASGIApp, bound: socket.socket) -> AsyncIterator[str]:
    """Serve on a bound socket for as long as the block runs; its address as ``http://host:port``."""
    server = _BesideServer(
        settings_of(
            app,
            backlog=_BACKLOG,
            timeout_keep_alive=_KEEP_ALIVE_SECONDS,
            timeout_graceful_shutdown=_SHUTDOWN_SECONDS,
        ),
        patience=_KEEP_ALIVE_SECONDS,
    )
    bound.listen(_BACKLOG)
    host, port = bound.getsockname()[:2]
    serving = asyncio.create_task(server.serve([bound]))
    try:
        yield f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    finally:
        server.should_exit = True
        await serving  # it has a deadline of its own for what is still open
        bound.close()
