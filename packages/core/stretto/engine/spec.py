"""Arguments of an engine process. The loop imports this module without torch."""

from __future__ import annotations

import tempfile
from pathlib import Path

from stretto.core.records import Record

ENGINE_ROLE, EXTERNAL_ENGINE_ROLE = "stretto.engine.role", "stretto_servers.role"
_LONGEST_SOCKET_FOLDER = 70

#: Environment variable with the key that clients of an engine must send; unset if no key is needed.
ENGINE_KEY = "STRETTO_ENGINE_KEY"


class EngineSpec(Record, frozen=True):
    """Arguments of an engine process; `config` is the JSON text of an `EngineConfig`.

    `publication_seconds`: longest wait for the first publication after the model is loaded; 0: serve the model folder
    as version 0 until a version is published. `kernels`: file with the run's choice of kernels. `server`: address of a
    running vLLM or SGLang server. `scratch`: a folder for this engine alone. `token_seconds`, `load_seconds`,
    `start_seconds`: timeouts of such a server for the next tokens, for loading a version, and for being ready.
    `broadcast`: the server receives versions by a collective (`stretto_servers.broadcast`) instead of a folder. `tls`:
    folder of certificates (`processes.tls`), for an engine on another machine. `path`: folder searched first for the
    module of `engine.kind`. `gpus`: ids of the GPUs that the engine sees; empty: all GPUs that the conductor sees.
    `share`: part of their memory that its tensors may take; `memory`: bytes of the smallest of these GPUs, 0 if
    unknown; `planned`: bytes of weights and cache on each GPU.
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
    """Create a temporary folder for Unix sockets and return its path, which is short: a socket's path has at most 107
    bytes."""
    root = tempfile.gettempdir()
    return Path(tempfile.mkdtemp(prefix="stretto-", dir=root if len(root) < _LONGEST_SOCKET_FOLDER else "/tmp"))
