"""The address of a gate: ``join.json`` of a run folder, with the token of machines that join; binding a socket, and
detecting TLS. Imports no torch.
"""

from __future__ import annotations

import socket
import ssl
from pathlib import Path

import msgspec

from stretto.core.errors import (
    UNREADABLE,
    DeadlineExceeded,
    HandshakeRefused,
    MachineLost,
    Problem,
    RecipeError,
    RunFolderError,
)
from stretto.core.records import Record
from stretto_cluster.wire import connect

JOIN = "join.json"  #: name of the join file in a run folder
PATIENCE_SECONDS = 120.0


class JoinFile(Record, frozen=True):
    """Content of ``join.json``: addresses and token of a run, for machines that can read its folder. `control`: for
    `stretto scale`, on the run's own machine. `patience`: seconds for a reply to it. `tls`: folder of certificates.
    `before`: addresses of earlier conductors. `superseded`: epoch of a newer conductor, of a copy of the folder; 0:
    none."""

    run: str
    token: str
    address: str = ""  # address of the gate for other machines; "" if none can join
    control: str = ""  # address of the gate for commands on the run's own machine
    tls: str = ""  # folder of certificates, as a path on the run's machine; "" for none
    patience: float = PATIENCE_SECONDS  # seconds that the reply to `stretto scale` may take
    before: tuple[str, ...] = ()  # addresses of earlier conductors, which were not informed yet
    superseded: int = 0  # epoch of a newer conductor, which uses a copy of the folder; 0: none


def read_join_file(folder: Path) -> JoinFile:
    """Read the join file of a run. After the run has ended, it has no addresses.

    Raises:
        RecipeError: the file is missing or damaged, or this user cannot read it.
    """
    try:
        return msgspec.json.decode((folder / JOIN).read_bytes(), type=JoinFile)
    except (OSError, *UNREADABLE) as error:
        found = (error.strerror if isinstance(error, OSError) else None) or str(error)
        raise RecipeError([Problem(str(folder / JOIN), found, "give the folder of a run that is going on")]) from None


def recorded_join_file(folder: Path) -> JoinFile | None:
    """Read the join file of an earlier conductor of the run; None if there is none.

    Raises:
        RunFolderError: the file is there and cannot be read. It is not replaced by a new one, since the run would no
            longer know its earlier and newer conductors.
    """
    if not (folder / JOIN).exists():
        return None
    try:
        return read_join_file(folder)
    except RecipeError as error:
        remedy = "restore it, or remove it if no copy of this folder was continued: machines then need the new token"
        raise RunFolderError([Problem(at.place, at.found, remedy) for at in error.problems]) from None


def bound(listen: str, port: int | None = None) -> socket.socket:
    """Bind a socket to `listen`, a ``host:port`` of this machine, or to another `port` on that host (None: that of
    `listen`). An empty host means every interface. The socket does not listen yet.

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
    """Whether the listener at `address` expects TLS, by a TLS handshake with it. False if it cannot be reached."""
    anyone = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    anyone.check_hostname, anyone.verify_mode = False, ssl.CERT_NONE  # nothing is sent, so no check is needed
    try:
        _, writer = await connect(address, anyone)
    except (MachineLost, HandshakeRefused, DeadlineExceeded):
        return False
    writer.transport.abort()
    return True
