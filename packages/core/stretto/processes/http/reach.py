"""Check whether an address accepts connections."""

from __future__ import annotations

import socket
import threading
from urllib.parse import urlsplit

_SECONDS = 5.0


def unreachable(address: str) -> str:
    """Try to connect to ``host:port`` or ``scheme://host:port``; returns why it failed, "" if it did not. Without a
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
