"""TLS between the machines of a run, where both sides show a certificate signed by the run's own authority.

A folder holds `ca.pem`, `cert.pem` and `key.pem`; docs/how_to/cluster.md says how to make them. Host names are not
checked, because machines come and go: any certificate of the authority admits.
"""

from __future__ import annotations

import ssl
from pathlib import Path

from stretto.core.errors import Problem, RecipeError

CA, CERTIFICATE, KEY = "ca.pem", "cert.pem", "key.pem"


def server_context(folder: str) -> ssl.SSLContext | None:
    """TLS context of a listener; None (no TLS) for an empty `folder`. Raises RecipeError if a file of the folder is
    missing or invalid."""
    return _context(folder, ssl.PROTOCOL_TLS_SERVER)


def client_context(folder: str) -> ssl.SSLContext | None:
    """TLS context of the side that connects; None (no TLS) for an empty `folder`. Raises RecipeError if a file of the
    folder is missing or invalid."""
    return _context(folder, ssl.PROTOCOL_TLS_CLIENT)


def _context(folder: str, protocol: int) -> ssl.SSLContext | None:
    if not folder:
        return None
    ca, certificate, key = (Path(folder) / name for name in (CA, CERTIFICATE, KEY))
    missing = [path for path in (ca, certificate, key) if not path.is_file()]
    if missing:
        remedy = f"a folder with {CA}, {CERTIFICATE} and {KEY} is needed"
        raise RecipeError([Problem("cluster.tls", f"{path} does not exist", remedy) for path in missing])
    context = ssl.SSLContext(protocol)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    try:
        context.load_verify_locations(ca)
        context.load_cert_chain(certificate, key)
    except (ssl.SSLError, OSError) as error:
        raise RecipeError([Problem("cluster.tls", f"{folder}: {error}", "give PEM files")]) from None
    return context
