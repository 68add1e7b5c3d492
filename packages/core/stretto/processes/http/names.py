"""The names under which a server may be asked.

A page of another site can let a name of its own point at this machine (DNS rebinding); the browser takes the server
for that site then, and the name is in ``Host``. An address as it is, and a name that only this machine gives itself,
cannot be had so.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from urllib.parse import urlsplit

import msgspec
from starlette.types import ASGIApp, Receive, Scope, Send

from stretto.processes.http.asgi import header, reply

_LOOPBACK_NAMES = frozenset({"localhost", "ip6-localhost"})
_AUTHORITY = re.compile(r"(\[[0-9a-fA-F:.]+\]|[\w.-]+)(:\d{1,5})?", re.ASCII)


class HostNames:
    """What ``Host`` may say."""

    def __init__(self, *given: str, loopback: bool) -> None:
        """`given`: further names, as a user has given them. `loopback`: it listens there alone, and its addresses and
        names are the only ones."""
        self._loopback = loopback
        self._names = _LOOPBACK_NAMES | {name.lower() for name in given}
        if not loopback:  # the second asks the resolver, which may take seconds
            self._names |= {socket.gethostname().lower(), socket.getfqdn().lower()}

    def has(self, host: str) -> bool:
        """Whether a value of Host is an address or a name of this server."""
        try:
            name = urlsplit(f"//{host}").hostname if _AUTHORITY.fullmatch(host) else None
        except ValueError:
            return False
        if name is None:
            return False
        try:
            address = ipaddress.ip_address(name)
        except ValueError:
            return name in self._names
        return address.is_loopback or not self._loopback

    def foreign(self, scope: Scope) -> str | None:
        """The Host of a request if it is none of these; no browser leaves it out, and without one a request is of
        a program."""
        if (value := header(scope, b"host")) is None or self.has(host := value.decode("latin-1")):
            return None
        return host[:80]


LOOPBACK = HostNames(loopback=True)  #: of a server that listens there alone


def is_loopback(bound: socket.socket) -> bool:
    """Whether a socket is bound to an address that this machine alone can reach."""
    return ipaddress.ip_address(bound.getsockname()[0]).is_loopback


def own_address(scope: Scope) -> str:
    """Where the connection of a request has reached this server, as ``http://host:port``."""
    host, port = scope["server"]
    return f"{scope['scheme']}://{f'[{host}]' if ':' in host else host}:{port}"


class OwnNames:
    """The ASGI application around another one that is asked under its own names alone."""

    def __init__(self, inner: ASGIApp, names: HostNames) -> None:
        self._inner, self._names = inner, names

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See `ASGIApp`."""
        if (host := self._names.foreign(scope)) is None:
            await self._inner(scope, receive, send)
            return
        error = {"message": foreign_host(host), "type": "invalid_request_error", "param": "host", "code": None}
        await reply(send, 403, "application/json", msgspec.json.encode({"error": error}))


def foreign_host(host: str) -> str:
    """What is said of a Host that is not the server's."""
    return f"host: {host!r} is no name of this server; ask it by its address, or by localhost on its own machine"
