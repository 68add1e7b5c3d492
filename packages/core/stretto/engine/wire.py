"""The messages between an engine and its clients, in MessagePack; without torch.

    POST /generate         [GenerateRequest] →  frames (`core.frames`) of one Completion each, as they end; all requests
                                                begin in the same step. A list of one Refusal ends them: the server
                                                behind the engine will not serve one of them, or has lied of it
    POST /update_weights   UpdateRequest     →  Loaded (`core.canary`), when the weights are loaded and proven or not
    POST /abort            AbortRequest      →  EngineHealth
    POST /partials         PartialsRequest   →  Partials: the tokens of unfinished completions beyond the known ones
    POST /score            ScoreRequest      →  [[float]]: the log-probability of each token but the first of each text
    GET  /health                             →  EngineHealth
    GET  /spans                              →  [Span] since the last call

Closing the connection of /generate aborts its requests. A refusal has a status of 400 or above and a `Refusal` as its
body. `stretto serve` has these paths beside OpenAI's; its /health is JSON unless MessagePack is accepted.
"""

from __future__ import annotations

from stretto.core.canary import Challenge
from stretto.core.errors import EngineLied, RefusedRequest
from stretto.core.records import Record

#: The media type of all bodies.
MSGPACK = "application/msgpack"


class UpdateRequest(Record, frozen=True):
    """Load this version from the mailbox, and answer the challenge, if there is one."""

    version: int
    challenge: Challenge | None = None


class AbortRequest(Record, frozen=True):
    """Abort this request."""

    request: str


class PartialsRequest(Record, frozen=True):
    """The known tokens of each member, by request; other requests are left out."""

    known: dict[str, list[int]]


class ScoreRequest(Record, frozen=True):
    """Compute the log-probabilities of the tokens of these texts by the version in use."""

    texts: tuple[tuple[int, ...], ...]


class Refusal(Record, frozen=True):
    """Why a request was not served: the name of the error and its arguments, so that the client raises the same."""

    error: str
    found: str
    field: str = ""
    allowed: str = ""

    @classmethod
    def of(cls, error: RefusedRequest | EngineLied) -> Refusal:
        """As it is sent."""
        if isinstance(error, EngineLied):
            return cls(error="EngineLied", field=error.engine, found=error.how)
        return cls(error="RefusedRequest", field=error.field, found=error.found, allowed=error.allowed)


def split_address(address: str) -> tuple[str | None, str, int]:
    """The path of a Unix socket, or host and port.

    >>> split_address("unix:/run/engine-0.sock"), split_address("127.0.0.1:8300")
    (('/run/engine-0.sock', '', 0), (None, '127.0.0.1', 8300))
    """
    if address.startswith("unix:"):
        return address.removeprefix("unix:"), "", 0
    host, _, port = address.rpartition(":")
    return None, host, int(port)
