"""Spec of an engine process; light, so that the loop can import it without torch."""

from __future__ import annotations

from stretto.core.records import Record

#: Environment variable with the key that an engine's clients must send; unset for none.
ENGINE_KEY = "STRETTO_ENGINE_KEY"


class EngineSpec(Record, frozen=True):
    """Arguments of an engine process; `config` is the JSON text of an `EngineConfig`.

    `publication_seconds`: how long to wait for the first publication after loading the model; 0: serve the folder as
    version 0 until something is published. `kernels`: file with the run's choice of kernels. `server`: address of a
    running vLLM or SGLang server. `scratch`: a folder for this engine alone. `token_seconds`, `load_seconds`,
    `start_seconds`: timeouts of such a server for the next tokens, for loading a version, and for being ready.
    `broadcast`: it gets versions by a collective (`weights.broadcast`) instead of a folder. `tls`: folder of
    certificates (`processes.tls`), for an engine on another machine. `path`: folder searched first for the module of
    `engine.kind`.
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
