"""Addresses of a gate: binding a socket, and detecting TLS."""

from __future__ import annotations

import socket
import ssl

from stretto.core.errors import DeadlineExceeded, HandshakeRefused, MachineLost, Problem, RecipeError
from stretto.processes.wire import connect


def bound(listen: str, port: int | None = None) -> socket.socket:
    """Bind a socket to ``host:port`` of this machine, or to another `port` on that host. An empty host means every
    interface.

    Raises:
        RecipeError: the address is malformed, or cannot be bound.
    """
    host, _, told = listen.rpartition(":")
    found = "is no host:port"
    if told.isdecimal() and int(told) < 65_536:
        try:
            where = socket.getaddrinfo(host.strip("[]") or "0.0.0.0", told, type=socket.SOCK_STREAM)
            family, _, _, _, address = min(where, key=lambda entry: entry[0])  # IPv4 first
            reserved = socket.socket(family)
            reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                reserved.bind(address if port is None else (address[0], port, *address[2:]))
            except OSError:
                reserved.close()
                raise
            return reserved
        except (OSError, UnicodeError) as error:  # or a host name that cannot be encoded
            found = getattr(error, "strerror", None) or str(error)
    raise RecipeError(
        [Problem(f"cluster.listen: {listen!r}", found, "give host:port of this machine, with a free port")]
    )


async def speaks_tls(address: str) -> bool:
    """Whether the listener at `address` expects TLS: tries a TLS handshake with it."""
    anyone = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    anyone.check_hostname, anyone.verify_mode = False, ssl.CERT_NONE  # nothing is sent, so no check is needed
    try:
        _, writer = await connect(address, anyone)
    except (MachineLost, HandshakeRefused, DeadlineExceeded):
        return False
    writer.transport.abort()
    return True
