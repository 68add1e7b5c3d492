"""What the process of an engine is started with; light, so that the loop can name it without torch."""

from __future__ import annotations

import tempfile
from pathlib import Path

from stretto.core.records import Record

ENGINE_ROLE, EXTERNAL_ENGINE_ROLE = "stretto.engine.role", "stretto_servers.role"
_LONGEST_SOCKET_FOLDER = 70

#: Environment variable with the key that an engine's clients have to send; unset for none.
ENGINE_KEY = "STRETTO_ENGINE_KEY"


class EngineSpec(Record, frozen=True):
    """What an engine is started with; `config` is the JSON text of an `EngineConfig`.

    `publication_seconds` is how long it may wait for the first publication, once it has loaded its model; 0 means that
    the folder is served as it is, as version 0, until something is published. `kernels` is the file that says which
    kernels the run uses. `server` is the address of a server of vLLM or SGLang that runs already. `scratch` is a folder
    of the engine's own. `token_seconds`, `load_seconds` and `start_seconds` are how long such a server may take for the
    next tokens, to load a version, and to be ready where none is published; `broadcast`: it gets them by a collective
    (`weights.broadcast`), and not as a folder. `tls` is a folder of certificates (`processes.tls`), for an engine on
    another machine than the conductor. `path` is a folder in which the module of `engine.kind` is looked for first.
    """

    name: str
    address: str
    model: str
    mailbox: str
    mailbox_folder: str
    config: str
    threads: int
    publication_seconds: float
    kernels: str | None = None
    server: str | None = None
    scratch: str = ""
    tls: str = ""
    token_seconds: float = 300.0
    load_seconds: float = 120.0
    start_seconds: float = 600.0
    broadcast: bool = False
    path: str = ""


def socket_folder() -> Path:
    """A new folder with a short path: that of a socket has 107 bytes at most."""
    root = tempfile.gettempdir()
    return Path(tempfile.mkdtemp(prefix="stretto-", dir=root if len(root) < _LONGEST_SOCKET_FOLDER else "/tmp"))
