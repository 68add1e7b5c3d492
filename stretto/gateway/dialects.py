"""What a dialect is: how one kind of client asks, is answered and is refused.

A dialect is pure: bytes in, a record out; a record in, bytes out. It knows no session, no token and no engine. The
events of a stream are made from the whole turn, so that a replay tells them byte for byte.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol

from stretto.conversation.messages import AskedTurn, SaidTurn
from stretto.core.records import Record


class NotServed(Record, frozen=True):
    """Why a request is not served."""

    status: int  # of HTTP: 4xx, or 503 when it may be tried again
    message: str
    field: str = ""  # the wrong field of the body, as a path of its names
    code: str = ""  # "context_length_exceeded", "model_not_found", "session_ended", "invalid_api_key", "unavailable"


class Dialect(Protocol):
    """One way to ask for a turn."""

    path: str  #: behind the address of the session, such as ``/v1/chat/completions``

    def parse(self, body: bytes) -> AskedTurn:
        """What the body asks for.

        Raises:
            RefusedRequest: names the first wrong field, with what is allowed there.
        """
        ...

    def reply(self, asked: AskedTurn, said: SaidTurn) -> bytes:
        """The whole reply, as JSON."""
        ...

    def events(self, asked: AskedTurn, said: SaidTurn) -> Iterable[bytes]:
        """The same reply as server-sent events, to the last one."""
        ...

    def refuse(self, why: NotServed) -> bytes:
        """The body of an error, as JSON."""
        ...

    def headers(self, said: SaidTurn) -> Mapping[str, str]:
        """Headers of a reply that clients of the dialect look for, such as a request id."""
        ...
