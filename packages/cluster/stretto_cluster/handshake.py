"""Mutual authentication of two processes: by a shared token, which is never sent, and between the machines of a run by
TLS (`stretto.processes.http.tls`).

    caller                                    listener
      │ Hello: a random number, who it is ───────► │
      │ ◄─────────────── Challenge: another number │
      │ Proof: HMAC over all of this ────────────► │   a wrong one, or a caller that is not wanted: Refusal, and the end
      │ ◄────── Welcome: who it is, HMAC over that │

The caller proves first, so a stranger receives nothing that was computed with the token. A proof is valid for one side
of one connection only. The handshake does not protect later messages: on a network that others can read, use it inside
TLS.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import secrets
import ssl
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import TypeVar

import msgspec

from stretto.core.deadlines import deadline
from stretto.core.errors import UNREADABLE, HandshakeBroken, HandshakeRefused, WireError
from stretto.core.frames import LENGTH, frame
from stretto.core.records import Record
from stretto.processes.event_loop import send

_NONCE_BYTES = 32
_LARGEST = 1 << 16  # bytes of a message: a stranger cannot fill the memory


class _Hello(Record, frozen=True, tag=True):
    nonce: bytes
    introduction: bytes


class _Challenge(Record, frozen=True, tag=True):
    nonce: bytes


class _Proof(Record, frozen=True, tag=True):
    mac: bytes


class _Welcome(Record, frozen=True, tag=True):
    introduction: bytes
    mac: bytes


class _Refusal(Record, frozen=True, tag=True):
    why: str


_Message = _Hello | _Challenge | _Proof | _Welcome | _Refusal
_MESSAGE: msgspec.msgpack.Decoder[_Message] = msgspec.msgpack.Decoder(_Message)
_Kind = TypeVar("_Kind", _Hello, _Challenge, _Proof, _Welcome)

#: Function of a caller's introduction: returns why the caller is refused, "" to accept it.
Judge = Callable[[bytes], str]


def new_key() -> str:
    """Generate a random secret token."""
    return secrets.token_hex(_NONCE_BYTES)


async def call(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, token: str, ours: bytes, *, peer: str, seconds: float
) -> bytes:
    """Perform the handshake with a listener; returns its introduction. `ours`: our introduction, bytes of any format.
    `peer` names the listener in errors.

    Raises:
        HandshakeRefused: the listener refused, or did not prove the token; the connection is unusable.
        HandshakeBroken: it closed the connection meanwhile.
        DeadlineExceeded: the handshake took longer than `seconds`.
    """
    async with _line(reader, writer, peer, seconds) as line:
        nonce = secrets.token_bytes(_NONCE_BYTES)
        await line.send(_Hello(nonce, ours))
        theirs = (await line.receive(_Challenge)).nonce
        await line.send(_Proof(_mac(token, "caller", nonce, theirs, ours)))
        welcome = await line.receive(_Welcome)
        if not hmac.compare_digest(welcome.mac, _mac(token, "listener", nonce, theirs, ours, welcome.introduction)):
            raise HandshakeRefused(peer, "does not have the token")
        return welcome.introduction


async def admit(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    token: str,
    ours: bytes,
    judge: Judge,
    *,
    peer: str,
    seconds: float,
) -> bytes:
    """Perform the handshake with a caller; returns its introduction. `judge`, called with that after the proof, returns
    why the caller is refused, else "". The caller gets `ours`. `peer` names the caller in errors.

    Raises:
        HandshakeRefused: the caller did not prove the token, or `judge` refused it; the connection is unusable.
        HandshakeBroken: the caller closed the connection meanwhile.
        DeadlineExceeded: the handshake took longer than `seconds`.
    """
    async with _line(reader, writer, peer, seconds) as line:
        hello = await line.receive(_Hello)
        nonce = secrets.token_bytes(_NONCE_BYTES)
        await line.send(_Challenge(nonce))
        proof = await line.receive(_Proof)
        said = (hello.nonce, nonce, hello.introduction)
        if not hmac.compare_digest(proof.mac, _mac(token, "caller", *said)):
            await line.send(_Refusal("the token is wrong"))
            raise HandshakeRefused(peer, "does not have the token")
        if why := judge(hello.introduction):
            await line.send(_Refusal(why))
            raise HandshakeRefused(peer, f"is not wanted: {why}")
        await line.send(_Welcome(ours, _mac(token, "listener", *said, ours)))
        return hello.introduction


def _mac(token: str, side: str, *said: bytes) -> bytes:
    assert token, "an empty token proves nothing"
    return hmac.digest(token.encode(), msgspec.msgpack.encode((side, *said)), "sha256")


@dataclass(frozen=True)
class _Line:
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    peer: str

    async def send(self, message: _Message) -> None:
        await send(self.writer, frame(message))

    async def receive(self, kind: type[_Kind]) -> _Kind:
        """Receive the next message, of class `kind`. `_line` converts the errors to those of `call` and `admit`.

        Raises:
            HandshakeRefused: the message is a refusal, or of another class.
            WireError: the message is longer than 64 KiB.
            EOFError: the peer has closed the connection.
            msgspec.DecodeError: it is no message of the handshake.
        """
        (length,) = LENGTH.unpack(await self.reader.readexactly(LENGTH.size))
        if length > _LARGEST:
            raise WireError(f"a message of {length:,} bytes; at most {_LARGEST:,} are allowed")
        message = _MESSAGE.decode(await self.reader.readexactly(length))
        if isinstance(message, _Refusal):
            raise HandshakeRefused(self.peer, f"refused: {message.why}")
        if not isinstance(message, kind):
            raise HandshakeRefused(self.peer, "sent a message out of order")
        return message


@contextlib.asynccontextmanager
async def _line(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, peer: str, seconds: float
) -> AsyncIterator[_Line]:
    """Context manager: turns errors of the block into errors that name the peer. HandshakeBroken: the peer closed the
    connection. HandshakeRefused: the peer does not accept our certificate, or speaks another protocol, as a web browser
    or another version of stretto does. DeadlineExceeded: the block took longer than `seconds`."""
    async with deadline("handshake", f"{peer} to prove the token", seconds):
        try:
            yield _Line(reader, writer, peer)
        except (TimeoutError, HandshakeRefused):
            raise
        except ssl.SSLError as error:  # a certificate is refused after the caller's side of TLS is done
            raise HandshakeRefused(peer, f"does not accept our TLS ({error.reason or error})") from error
        except (EOFError, OSError) as error:
            raise HandshakeBroken(peer, "closed the connection during the handshake") from error
        except (WireError, *UNREADABLE) as error:
            raise HandshakeRefused(peer, f"speaks another language: {error}") from error
