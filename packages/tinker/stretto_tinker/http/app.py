"""ASGI application: routes, API keys, error replies. Endpoints of the SDK that are not served reply 404 with the
reason."""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import Mapping
from functools import partial

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from stretto.core.errors import DeadlineExceeded, RefusedRequest
from stretto.processes.http.asgi import HostNames, foreign_host
from stretto.processes.http.server import admit
from stretto_tinker.http.archive import Archive
from stretto_tinker.http.exchange import Call, Handler, NotServed, told
from stretto_tinker.http.futures import Futures
from stretto_tinker.http.sampling import SamplingHandlers
from stretto_tinker.http.service import Service
from stretto_tinker.http.sessions import Sessions
from stretto_tinker.http.training import Training

log = logging.getLogger(__name__)

_NOT_SERVED = {
    "auth/token": "keys are checked as they are, there are no tokens to exchange",
    "auth/apikey/me": "keys are given on the command line of the server",
    "unload_model": "models leave the memory when their session ends, or falls silent",
    "create_custom_loss": "custom losses run on the client's side (forward_backward_custom with a function)",
    "copy_weights": "there are no projects; a checkpoint stays with the key that saved it",
    "sessions/{id}/project": "there are no projects",
    "sessions/{id}/trace_export": "no trace is kept of a session",
    "audit": "no audit log is kept",
    "billing/usage/events": "nothing is billed",
    "billing/usage/checkpoints/current": "nothing is billed",
}


class TinkerApp:
    """ASGI application of `stretto tinker`. It replies to every request: errors of handlers become HTTP errors with a
    reason."""

    def __init__(self, service: Service, names: HostNames | None = None) -> None:
        """Serve all paths of the interface by `service`. `names`: names of this server; requests with another ``Host``
        are refused. None allows every name."""
        self._service, self._names = service, names
        archive = Archive(service)
        kept: dict[str, Handler] = {
            **Sessions(service).routes(),
            **Training(service).routes(),
            **SamplingHandlers(service).routes(),
            **Futures(service).routes(),
            **archive.routes(),
        }
        opened = {"GET /api/v1/healthz": _healthy, "GET /health": _healthy, **archive.open_routes()}
        refused = [
            Route(f"/api/v1/{path}", partial(_refused, path, why), methods=_ALL) for path, why in _NOT_SERVED.items()
        ]
        routes = [*self._routes(kept, keyed=True), *self._routes(opened, keyed=False), *refused]
        self._app = Starlette(routes=[*routes, Route("/{path:path}", _unknown, methods=_ALL)])

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and self._names is not None and (host := self._names.foreign(scope)) is not None:
            await _error(403, foreign_host(host))(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _routes(self, handlers: Mapping[str, Handler], *, keyed: bool) -> list[Route]:
        routes = []
        for name, handler in handlers.items():
            method, path = name.split(" ")
            routes.append(Route(path, partial(self._answered, handler, keyed), methods=[method]))
        return routes

    async def _answered(self, handler: Handler, keyed: bool, request: Request) -> Response:
        """The handler's reply to a request, or the HTTP error for its error. `keyed`: require an API key; otherwise the
        call has no owner."""
        try:
            owner = ""
            if keyed:
                owner = self._service.owner(request.headers.get("x-api-key", ""))
                admit(request.scope)
            return await handler(Call(request, owner))
        except NotServed as error:
            return _error(error.status, error.message)
        except RefusedRequest as error:
            return _error(400, str(error))
        except DeadlineExceeded as error:
            return _error(408, str(error))
        except sqlite3.Error as error:
            log.error("%s %s: the record: %s", request.method, request.url.path, error)
            return _error(429, f"try again: the record cannot be read ({error})")
        except Exception:  # a bug: its traceback goes to the server's log, the client gets a 500
            log.exception("%s %s", request.method, request.url.path)
            return _error(500, "internal error of the server; its log has the traceback")


_ALL = ["GET", "POST", "PUT", "DELETE", "PATCH"]


async def _refused(path: str, why: str, request: Request) -> Response:
    return _error(404, f"{path} is not served: {why}")


async def _unknown(request: Request) -> Response:
    return _error(404, f"{request.method} {request.url.path:.120} is not served: no such path is known here")


async def _healthy(call: Call) -> Response:
    return told({"status": "ok"})


def _error(status: int, message: str) -> Response:
    return told({"detail": message}, status)
