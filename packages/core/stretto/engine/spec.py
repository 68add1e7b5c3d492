"""Spec of an engine process; light, so that the loop can import it without torch."""

from __future__ import annotations

import tempfile
from pathlib import Path

from stretto.core.records import Record

ENGINE_ROLE, EXTERNAL_ENGINE_ROLE = "stretto.engine.role", "stretto_servers.role"
_LONGEST_SOCKET_FOLDER = 70

#: Environment variable with the key that an engine's clients have to send; unset for none.
ENGINE_KEY = "STRETTO_ENGINE_KEY"


class EngineSpec(Record, frozen=True):
    """Arguments of an engine process; `config` is the JSON text of an `EngineConfig`.

    `publication_seconds`: how long to wait for the first publication after loading the model; 0: serve the folder as
    version 0 until something is published. `kernels`: file with the run's choice of kernels. `server`: address of a
    running vLLM or SGLang server. `scratch`: a folder for this engine alone. `token_seconds`, `load_seconds`,
    `start_seconds`: timeouts of such a server for the next tokens, for loading a version, and for being ready.
    `broadcast`: it gets versions by a collective (`weights.broadcast`) instead of a folder. `tls`: folder of
    certificates (`processes.tls`), for an engine on another machine. `path`: folder searched first for the module of
    `engine.kind`. `gpus`: ids of the GPUs that it sees; empty: all that the conductor sees. `share`: part of their
    memory that its tensors may take; `memory`: bytes of the smallest of them, 0 if unknown; `planned`: bytes of weights
    and cache on each.
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
    gpus: tuple[str, ...] = ()
    share: float = 1.0
    memory: int = 0
    planned: int = 0


def socket_folder() -> Path:
    """A new folder with a short path: that of a socket has 107 bytes at most."""
    root = tempfile.gettempdir()
    return Path(tempfile.mkdtemp(prefix="stretto-", dir=root if len(root) < _LONGEST_SOCKET_FOLDER else "/tmp"))
