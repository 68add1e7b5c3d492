"""Arguments of an engine's process, and messages between it and its clients, in MessagePack. Imported without torch.

    POST /generate         [GenerateRequest] →  frames (`core.frames`) of one Completion each, as they end; all requests
                                                begin in the same step. A frame with a list of one Refusal ends the
                                                response if the server behind the engine refuses a request later, or
                                                returns invalid results
    POST /tokens           name of a feed    →  endless frames of one Sampled each: what steps sample for the requests
                                                of this new feed. Closing the connection aborts them
    POST /submit           SubmitRequest     →  true, once the requests are accepted; they begin in the same step
    POST /update_weights   UpdateRequest     →  Loaded (`core.canary`), sent when the weights are loaded and the
                                                challenge, if any, is answered
    POST /abort            AbortRequest      →  EngineHealth
    POST /partials         PartialsRequest   →  Partials: the tokens of unfinished completions beyond the known tokens
    POST /score            ScoreRequest      →  [[float]]: the log-probability of each token but the first of each text
    GET  /health                             →  EngineHealth
    GET  /spans                              →  [Span] since the last call

Closing the connection of /generate aborts its requests. Only native engines have /tokens and /submit. A refused request
gets a status of 400 or above and a `Refusal` as the body; with 500 it is an error that no request should cause.
`stretto serve` has these paths in addition to OpenAI's, but for /tokens, /submit and /score; its /health replies in
JSON unless the client accepts MessagePack.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

import msgspec

from stretto.core.canary import Challenge
from stretto.core.engine import NewToken
from stretto.core.errors import EngineLost, RefusedRequest
from stretto.core.frames import Count
from stretto.core.records import Completion, GenerateRequest, Record

ENGINE_ROLE, EXTERNAL_ENGINE_ROLE = "stretto.engine.role", "stretto_servers.role"

#: Environment variable with the key that clients of an engine must send; unset if no key is needed.
ENGINE_KEY = "STRETTO_ENGINE_KEY"


class EngineSpec(Record, frozen=True):
    """Arguments of an engine process; `config` is the JSON text of an `EngineConfig`.

    `address`: where it listens, ``unix:/path/to.sock`` or ``host:port``. `model`: model folder. `mailbox`,
    `mailbox_folder`: name of the run and folder of its published versions (`weights.shared_memory`). `threads`: of
    torch. `publication_seconds`: longest wait for the first publication after the model is loaded; 0: serve the model
    folder as version 0 until a version is published. `kernels`: file that keeps the run's choice of kernels; None: no
    file. `server`: address of a running vLLM or SGLang server; None: start one. `scratch`: a folder for this engine
    alone. `token_seconds`, `load_seconds`, `start_seconds`: timeouts of such a server for the next tokens, for loading
    a version, and for being ready. `broadcast`: the server receives versions by a collective
    (`stretto_servers.broadcast`) instead of a folder. `tls`: folder of certificates (`http.tls`), for an engine on
    another machine. `path`: folder searched first for the module of `engine.kind`. `gpus`: ids of the GPUs that the
    engine sees; empty: all GPUs that the conductor sees. `share`: part of their memory that its tensors may take, 0 to
    1. `memory`: bytes of the smallest of these GPUs, 0 if unknown. `planned`: bytes of weights and cache on each GPU.
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


#: Most tokens of one message of a feed: 21 MB if each has its 20 top log-probabilities.
MOST_TOKENS = 1 << 16

#: The media type of all bodies.
MSGPACK = "application/msgpack"


class UpdateRequest(Record, frozen=True):
    """Order to load a published version, and to answer the canary `challenge`, if any, before further sampling."""

    version: int
    challenge: Challenge | None = None


class AbortRequest(Record, frozen=True):
    """Order to abort the request with this id, or those with these ids."""

    request: str | list[str]


class SubmitRequest(Record, frozen=True):
    """Requests for an open feed, which gets each token in the step that samples it (`every_token`), or else completions
    as they end."""

    feed: str
    requests: Annotated[list[GenerateRequest], msgspec.Meta(min_length=1)]
    every_token: bool  # each token in the step that samples it; else only whole completions


class PartialsRequest(Record, frozen=True):
    """Request for new tokens of unfinished completions. `known`: by request id, the number of tokens of each member
    that the client already has; other requests are left out of the reply."""

    known: dict[str, list[Count]]


class ScoreRequest(Record, frozen=True):
    """Request for the log-probabilities of texts (token ids) by the version in use."""

    texts: tuple[tuple[int, ...], ...]


class Refusal(Record, frozen=True):
    """An error as its class name and arguments, from which the client raises the same error. `found`: the wrong value,
    or what happened; `field`: the wrong field, or the name of a lost engine."""

    error: str  # name of the class
    found: str  # wrong value, or what happened
    field: str = ""  # wrong field of the request; name of the engine in EngineLost and EngineLied
    allowed: str = ""

    @classmethod
    def of(cls, error: RefusedRequest | EngineLost) -> Refusal:
        """The refusal for an error."""
        if isinstance(error, EngineLost):
            return cls(error=type(error).__name__, field=error.engine, found=error.how)
        return cls(error="RefusedRequest", field=error.field, found=error.found, allowed=error.allowed)


class Sampled(Record, frozen=True):
    """What one or more steps have sampled for a feed. A completion that has ended is whole, with all its tokens.
    `refused`: requests that ended with an error, by id."""

    tokens: list[NewToken]
    ended: list[Completion]
    refused: list[tuple[str, Refusal]]  # requests that ended with an error, by their ids

    def parts(self) -> Iterator[Sampled]:
        """This message, or several with the same content in the same order, so that a frame has room for each: at most
        `MOST_TOKENS` tokens, or one completion."""
        if len(self.tokens) + sum(completion.segment.length for completion in self.ended) <= MOST_TOKENS:
            yield self
            return
        for begin in range(0, len(self.tokens), MOST_TOKENS):
            yield Sampled(self.tokens[begin : begin + MOST_TOKENS], [], [])
        yield from (Sampled([], [completion], []) for completion in self.ended)
        yield Sampled([], [], self.refused)


def split_address(address: str) -> tuple[str | None, str, int]:
    """Split an engine's address: (path of a Unix socket, "", 0), or (None, host, port). ValueError if the port is not a
    number.

    >>> split_address("unix:/run/engine-0.sock"), split_address("127.0.0.1:8300"), split_address("[::1]:8300")
    (('/run/engine-0.sock', '', 0), (None, '127.0.0.1', 8300), (None, '::1', 8300))
    """
    if address.startswith("unix:"):
        return address.removeprefix("unix:"), "", 0
    host, _, port = address.rpartition(":")
    return None, host.removeprefix("[").removesuffix("]"), int(port)  # IPv6: the brackets are no part of the host
