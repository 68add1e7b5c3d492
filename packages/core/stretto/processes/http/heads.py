"""Bound on the head of a request: its request line and headers, and the trailers of a body.

httptools keeps a head until it ends, however long that is. Here a head of more than `LARGEST_HEAD` bytes is refused
with 431, and its connection is closed. As with a body that is too large, a bounded rest is read and dropped: most
clients send everything before they read the reply.
"""

from __future__ import annotations

from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from stretto.processes.http.asgi import DROPPED_BYTES, DROPPED_SECONDS

LARGEST_HEAD = 64 << 10
_OF_HEADER, _OF_REQUEST = len(": \r\n"), len("  HTTP/1.1\r\n\r\n")  # bytes beside names, values, method and url
_SAID = f"The head of a request has at most {LARGEST_HEAD:,} bytes.".encode()
_REFUSAL = b"\r\n".join(
    [
        b"HTTP/1.1 431 Request Header Fields Too Large",
        b"content-type: text/plain; charset=utf-8",
        b"content-length: %d" % len(_SAID),
        b"connection: close",
        b"",
        _SAID,
    ]
)


class BoundedHeads(HttpToolsProtocol):
    """uvicorn's HTTP protocol with the bound.

    While a head comes, its pieces are counted, from the second on: a piece is bounded by the buffer of the transport. A
    head that has come whole is measured, unless its pieces prove that it is short.
    """

    def __init__(self, *settings: Any) -> None:
        super().__init__(*settings)
        self._piece = self._first = 0  # bytes: of the newest piece, and of the one in which the request began
        self._kept = 0  # bytes that came since the parser has passed something on: it may keep them all
        self._dropped: int | None = None  # bytes that came after a refusal; None: nothing is refused

    def data_received(self, data: bytes) -> None:
        """Parse the next piece, or drop it after a refusal."""
        if self._dropped is not None:
            self._dropped += len(data)
            if self._dropped > DROPPED_BYTES:
                self.transport.close()
            return
        self._piece = len(data)
        self._kept += self._piece
        super().data_received(data)
        if self._kept > LARGEST_HEAD and self._dropped is None:
            self._refuse()

    def on_message_begin(self) -> None:
        """A request begins."""
        self._first, self._kept = self._piece, 0
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """Start the request, unless its head is too large."""
        if self._first + self._kept > LARGEST_HEAD:
            headers = sum(len(name) + len(value) + _OF_HEADER for name, value in self.headers)
            if len(self.parser.get_method()) + len(self.url) + _OF_REQUEST + headers > LARGEST_HEAD:
                self._refuse()
                raise ValueError("too large a head")  # the parser stops, and uvicorn calls `send_400_response`
        self._kept = 0
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Pass on a part of the body."""
        self._kept = 0
        super().on_body(body)

    def send_400_response(self, msg: str) -> None:
        """Refuse what cannot be parsed, unless it is refused already."""
        if self._dropped is None:
            super().send_400_response(msg)

    def _refuse(self) -> None:
        self._dropped = 0
        replied = self.cycle is None or self.cycle.response_complete  # type: ignore[redundant-expr]  # None at first
        if not replied:  # in the middle of a reply there is no other
            self.transport.close()
            return
        self.transport.write(_REFUSAL)
        self.timeout_keep_alive_task = self.loop.call_later(DROPPED_SECONDS, self.timeout_keep_alive_handler)
