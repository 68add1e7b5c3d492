"""HTTP client of the rewards `judge` and `reward_model`; retries while the server is busy or unreachable, up to a
deadline.

After any failure the completion is undecided, with the reason; it is never scored zero.
"""

from __future__ import annotations

import os
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from http.client import HTTPConnection, HTTPException, HTTPMessage, HTTPResponse, HTTPSConnection
from typing import IO, Any, Self, TypeVar
from urllib.error import HTTPError
from urllib.request import (
    BaseHandler,
    HTTPHandler,
    HTTPRedirectHandler,
    HTTPSHandler,
    OpenerDirector,
    Request,
    build_opener,
)

from pydantic import BaseModel, Field, model_validator

from stretto_verify.verdicts import Undecided

Read = TypeVar("Read")

_AGAIN = frozenset({408, 409, 425, 429})  # statuses to retry, beside all from 500 on
_LARGEST_REPLY = 1 << 22
_PIECE = 1 << 16


class AddressConfig(BaseModel, extra="forbid", frozen=True):
    """Address of a model, and time limits for its replies."""

    address: str = Field("", description="base address, as http://localhost:8000/v1")
    model: str = Field("", description="name of the model in requests")
    seconds: float = Field(40.0, gt=0, le=3600, description="seconds for one completion, all tries together")
    tries: int = Field(3, ge=1, le=100, description="most tries while the server is busy or cannot be reached")
    wait: float = Field(0.5, ge=0, le=60, description="seconds before the second try; doubled before each further one")
    key_variable: str = Field(
        "OPENAI_API_KEY", description="environment variable with the API key, if the server needs one"
    )

    @model_validator(mode="after")
    def _is_an_address(self) -> Self:
        if self.address and not re.match(r"https?://[^/\s]+", self.address):
            raise ValueError(f"address {self.address!r} does not begin with http:// or https:// and a host")
        return self


class _Busy(Exception):
    """The request may succeed later. `seconds`: the server's Retry-After, 0 if it sent none."""

    def __init__(self, reason: str, seconds: float = 0.0) -> None:
        super().__init__(reason)
        self.seconds = seconds


class Asker:
    """Posts requests to `path` below the configured address. `who` names the server in the reasons of undecided
    completions ("the judge")."""

    def __init__(self, config: AddressConfig, path: str, who: str) -> None:
        self._config, self._url = config, config.address.rstrip("/") + path
        self._who = f"{who} at {config.address}"

    def ask(self, question: bytes, read: Callable[[bytes], Read]) -> Read:
        """Post `question`, a JSON body; returns ``read(body of the reply)``. Retries while the server is busy or cannot
        be reached. Blocks for at most `config.seconds`, all tries together.

        Raises:
            Undecided: no reply in that time or within `config.tries`, or the server refuses the request.
        """
        config, until, reason = self._config, time.monotonic() + self._config.seconds, ""
        for attempt in range(config.tries):
            try:
                return read(self._reply(question, until))
            except _Busy as busy:
                reason, wait = str(busy), max(busy.seconds, config.wait * 2**attempt)
            if attempt + 1 == config.tries or time.monotonic() + wait >= until:
                break
            time.sleep(wait)
        raise Undecided(f"{self._who}: {reason}")

    def _reply(self, body: bytes, until: float) -> bytes:
        """Send one request; returns the body of the reply. `until`: deadline, in seconds of `time.monotonic`.

        Raises:
            _Busy: the request failed for a reason that may pass.
            Undecided: the server refuses the request.
        """
        headers = {"Content-Type": "application/json"}
        if key := os.environ.get(self._config.key_variable):
            headers["Authorization"] = f"Bearer {key}"
        try:
            with _opened(Request(self._url, body, headers), until) as reply:
                read = b""
                while len(read) <= _LARGEST_REPLY and (piece := reply.read1(_PIECE)):
                    read += piece
                _left(until)  # raises if the timer may have cut the reply off
                return read
        except HTTPError as refusal:
            said = f"{refusal.code} {refusal.reason}"
            if refusal.code in _AGAIN or refusal.code >= 500:
                asked_for = refusal.headers.get("Retry-After", "")
                raise _Busy(said, float(asked_for) if asked_for.isdecimal() else 0.0) from None
            if place := refusal.headers.get("Location"):  # it is not followed: the key is for the configured address
                raise Undecided(
                    f"{self._who} redirects to {place[:300]}, which is not the configured address"
                ) from None
            words = refusal.read(300).decode(errors="replace")
            raise Undecided(f"{self._who} refuses: {said}: {words}") from None
        except (OSError, HTTPException) as error:
            late = time.monotonic() >= until
            raise _Busy("TimeoutError: no reply in time" if late else f"{type(error).__name__}: {error}") from error


class _Refused(HTTPRedirectHandler):
    def redirect_request(
        self, req: Request, fp: IO[bytes], code: int, msg: str, headers: HTTPMessage, newurl: str
    ) -> None:
        """Follow nothing; urllib then raises HTTPError, with the status and headers of the redirect."""


def opener(*handlers: BaseHandler) -> OpenerDirector:
    """Make an opener of URLs with these handlers, for which a redirect is an HTTPError. urllib would send the headers,
    a key among them, to whatever host the redirect names, and take that host's reply."""
    return build_opener(*handlers, _Refused())


@contextmanager
def _opened(request: Request, until: float) -> Iterator[HTTPResponse]:
    """Context manager: the open reply to a request. A timer shuts the connection down at the time `until`, because a
    socket timeout applies to each read and never expires with a server that sends one byte at a time."""
    used: list[socket.socket] = []

    def end() -> None:
        for one in used:
            with suppress(OSError):  # it is closed
                one.shutdown(socket.SHUT_RDWR)

    timer = threading.Timer(_left(until), end)
    timer.daemon = True
    timer.start()
    try:
        with opener(_Plain(used), _Secured(used)).open(request, timeout=_left(until)) as reply:
            yield reply
    finally:
        timer.cancel()
        timer.join()


class _Noted(HTTPConnection):
    """HTTP connection that appends its socket to `used`, for `_opened` to shut down."""

    def __init__(self, used: list[socket.socket], *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self._used = used

    def connect(self) -> None:
        super().connect()
        self._used.append(self.sock)


class _NotedSecure(_Noted, HTTPSConnection):
    """HTTPS connection that appends its socket to `used`."""


class _Plain(HTTPHandler):
    def __init__(self, used: list[socket.socket]) -> None:
        super().__init__()
        self._used = used

    def http_open(self, req: Request) -> HTTPResponse:
        return self.do_open(partial(_Noted, self._used), req)


class _Secured(HTTPSHandler):
    def __init__(self, used: list[socket.socket]) -> None:
        super().__init__()
        self._used = used

    def https_open(self, req: Request) -> HTTPResponse:
        return self.do_open(partial(_NotedSecure, self._used), req)


def _left(until: float) -> float:
    if (seconds := until - time.monotonic()) <= 0:
        raise TimeoutError("no reply in time")
    return seconds
