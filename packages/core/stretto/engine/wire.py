"""Messages between an engine and its clients, in MessagePack. Imported without torch.

    POST /generate         [GenerateRequest] →  frames (`core.frames`) of one Completion each, as they end; all requests
                                                begin in the same step. A frame with a list of one Refusal ends the
                                                response if the server behind the engine refuses a request later, or
                                                returns invalid results
    POST /update_weights   UpdateRequest     →  Loaded (`core.canary`), sent when the weights are loaded and the
                                                challenge, if any, is answered
    POST /abort            AbortRequest      →  EngineHealth
    POST /partials         PartialsRequest   →  Partials: the tokens of unfinished completions beyond the known tokens
    POST /score            ScoreRequest      →  [[float]]: the log-probability of each token but the first of each text
    GET  /health                             →  EngineHealth
    GET  /spans                              →  [Span] since the last call

Closing the connection of /generate aborts its requests. A refused request gets a status of 400 or above and a `Refusal`
as the body. `stretto serve` has these paths in addition to OpenAI's; its /health replies in JSON unless the client
accepts MessagePack.
"""

from __future__ import annotations

from stretto.core.canary import Challenge
from stretto.core.errors import EngineLied, RefusedRequest
from stretto.core.records import Record

#: The media type of all bodies.
MSGPACK = "application/msgpack"


class UpdateRequest(Record, frozen=True):
    """Order to load a version from the mailbox, and to answer the challenge if there is one."""

    version: int
    challenge: Challenge | None = None


class AbortRequest(Record, frozen=True):
    """Order to abort the request with this id."""

    request: str


class PartialsRequest(Record, frozen=True):
    """Request for new tokens of unfinished completions. `known`: by request id, the number of tokens of each member
    that the client already has; other requests are left out of the reply."""

    known: dict[str, list[int]]


class ScoreRequest(Record, frozen=True):
    """Request for the log-probabilities of texts (token ids) by the version in use."""

    texts: tuple[tuple[int, ...], ...]


class Refusal(Record, frozen=True):
    """An error as its name and arguments, from which the client raises the same error."""

    error: str
    found: str
    field: str = ""
    allowed: str = ""

    @classmethod
    def of(cls, error: RefusedRequest | EngineLied) -> Refusal:
        """The refusal for an error."""
        if isinstance(error, EngineLied):
            return cls(error="EngineLied", field=error.engine, found=error.how)
        return cls(error="RefusedRequest", field=error.field, found=error.found, allowed=error.allowed)


def split_address(address: str) -> tuple[str | None, str, int]:
    """Split an engine's address: (path of a Unix socket, "", 0), or (None, host, port).

    >>> split_address("unix:/run/engine-0.sock"), split_address("127.0.0.1:8300")
    (('/run/engine-0.sock', '', 0), (None, '127.0.0.1', 8300))
    """
    if address.startswith("unix:"):
        return address.removeprefix("unix:"), "", 0
    host, _, port = address.rpartition(":")
    return None, host, int(port)
