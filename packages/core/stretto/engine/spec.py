"""What the process of an engine is started with; light, so that the loop can name it without torch."""

from __future__ import annotations

from stretto.core.records import Record

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
