"""What goes over the wire between an engine and its clients. No torch here: clients are light.

    POST /generate         list of           →  frames (`core.frames`) of one Completion each, as the answers finish;
                           GenerateRequest      all requests of the list begin in the same step
    POST /update_weights   UpdateRequest     →  UpdateReply, when the weights are loaded
    POST /abort            AbortRequest      →  EngineHealth
    POST /partials         PartialsRequest   →  Partials: what unfinished completions have beyond the known tokens
    GET  /health                             →  EngineHealth
    GET  /spans                              →  list of Span; each span is handed out once, the newest are kept for it

Closing the connection of /generate says the same as /abort. Bodies are MessagePack. A refusal has a
status of 400 or above and a `Refusal` as its body. The server of `stretto serve` has these beside OpenAI's; its /health
is JSON unless MessagePack is asked for (``accept``).
"""

from __future__ import annotations

from stretto.core.records import Record

#: The media type of all bodies.
MSGPACK = "application/msgpack"


class UpdateRequest(Record, frozen=True):
    """Load this version from the mailbox."""

    version: int


class UpdateReply(Record, frozen=True):
    """The version that the next step uses."""

    version: int


class AbortRequest(Record, frozen=True):
    """Give up this request; answers that are not finished are forgotten."""

    request: str


class PartialsRequest(Record, frozen=True):
    """Which tokens are known: of each request the tokens of each member. Others are not asked about."""

    known: dict[str, list[int]]


class Refusal(Record, frozen=True):
    """Why a request was not served: the name of the error and its arguments, so that the client raises the same."""

    error: str
    found: str
    field: str = ""
    allowed: str = ""


def split_address(address: str) -> tuple[str | None, str, int]:
    """The path of a Unix socket, or host and port.

    >>> split_address("unix:/run/engine-0.sock"), split_address("127.0.0.1:8300")
    (('/run/engine-0.sock', '', 0), (None, '127.0.0.1', 8300))
    """
    if address.startswith("unix:"):
        return address.removeprefix("unix:"), "", 0
    host, _, port = address.rpartition(":")
    return None, host, int(port)
