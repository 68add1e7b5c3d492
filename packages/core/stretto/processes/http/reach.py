"""Addresses: listen at one, write one as a URL, and check whether another accepts connections."""

from __future__ import annotations

import errno
import ipaddress
import socket
import threading
from urllib.parse import urlsplit

from stretto.core.errors import Problem, RecipeError, UserError

_SECONDS = 5.0


def bind(host: str, port: int, keys: tuple[str, str], refusal: type[UserError] = RecipeError) -> socket.socket:
    """A TCP socket bound to an address of this machine, not listening yet; port 0 takes a free port. `keys`: the
    settings of host and port, for the error. Raises `refusal` if no interface has the host, or the port is not
    available."""
    bound = None
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        bound = socket.socket(family, kind, protocol)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except (OSError, UnicodeError) as error:
        place, remedy = f"{keys[1]}: {host}:{port}", "choose a free port"
        if bound is None or getattr(error, "errno", None) == errno.EADDRNOTAVAIL:
            place, remedy = f"{keys[0]}: {host}", "give an address of this machine"
        if bound is not None:
            bound.close()
        raise refusal([Problem(place, getattr(error, "strerror", None) or str(error), remedy)]) from None
    return bound


def names_loopback(host: str) -> bool:
    """Whether a host, a name or an address, is the loopback interface: localhost, or an address of it."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def url_of(host: str, port: int | None, scheme: str = "http") -> str:
    """URL ``scheme://host:port``, with brackets around an IPv6 host."""
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"


def unreachable(address: str) -> str:
    """Try to connect to ``host:port`` or ``scheme://host:port``; returns why that failed, "" if it succeeded. Without a
    port: 443 for https, else 80.

    A connection is opened and closed; nothing is sent. An address that does not reply within 5 seconds counts as
    unreachable.
    """
    found: list[str] = []
    trying = threading.Thread(target=lambda: found.append(_tried(address)), name="reach", daemon=True)
    trying.start()
    trying.join(_SECONDS)  # a name that is looked up has no deadline of its own
    return found[0] if found else f"no reply within {_SECONDS:g} s"


def _tried(address: str) -> str:
    try:
        parts = urlsplit(address if "://" in address else f"//{address}")
        port = parts.port or (443 if parts.scheme == "https" else 80)
        with socket.create_connection((parts.hostname or "", port), timeout=_SECONDS):
            return ""
    except (OSError, ValueError) as error:  # ValueError: no port, or a name that no resolver takes
        return getattr(error, "strerror", None) or str(error)
