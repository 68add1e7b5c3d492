"""Check of the header ``Host`` against DNS rebinding.

A web page of another site can point its own host name at this machine; the browser then takes the server for that site
and sends the name in ``Host``. IP addresses, and names that only this machine gives itself, cannot be forged so.
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
    """Values of ``Host`` that a server accepts."""

    def __init__(self, *given: str, loopback: bool) -> None:
        """Collect the names by which the server may be addressed.

        Args:
            given: further names from the user.
            loopback: the server listens on loopback only, so of IP addresses only loopback ones are accepted, and no
                name of the machine.
        """
        self._loopback = loopback
        self._names = _LOOPBACK_NAMES | {name.lower() for name in given}
        if not loopback:  # getfqdn asks the resolver, which may take seconds
            self._names |= {socket.gethostname().lower(), socket.getfqdn().lower()}

    def has(self, host: str) -> bool:
        """Whether `host`, a value of Host, is an address or a name of this server."""
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
        """Host of a request if it is not accepted, else None. A missing Host is accepted: browsers always send one."""
        if (value := header(scope, b"host")) is None or self.has(host := value.decode("latin-1")):
            return None
        return host[:80]


LOOPBACK = HostNames(loopback=True)  #: for servers that listen on loopback only


def is_loopback(bound: socket.socket) -> bool:
    """Whether a socket is bound to a loopback address."""
    return ipaddress.ip_address(bound.getsockname()[0]).is_loopback


def own_address(scope: Scope) -> str:
    """Address at which a request reached this server, as ``http://host:port``."""
    host, port = scope["server"]
    return f"{scope['scheme']}://{f'[{host}]' if ':' in host else host}:{port}"


class OwnNames:
    """ASGI middleware that refuses requests with a foreign Host, with status 403."""

    def __init__(self, inner: ASGIApp, names: HostNames) -> None:
        self._inner, self._names = inner, names

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if (host := self._names.foreign(scope)) is None:
            await self._inner(scope, receive, send)
            return
        error = {"message": foreign_host(host), "type": "invalid_request_error", "param": "host", "code": None}
        await reply(send, 403, "application/json", msgspec.json.encode({"error": error}))


def foreign_host(host: str) -> str:
    """Error message for a foreign Host."""
    return f"host: {host!r} is no name of this server; ask it by its address, or by localhost on its own machine"
