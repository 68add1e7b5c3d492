"""Two processes prove to each other that they have the same key, which neither sends.

    caller                                    listener
      │ Hello: a random number, who it is ───────► │
      │ ◄─────────────── Challenge: another number │
      │ Proof: HMAC over all of this ────────────► │   a wrong one, or a caller that is not wanted: Refusal, and the end
      │ ◄────── Welcome: who it is, HMAC over that │

The caller proves first, so a stranger who knocks learns nothing that the key was part of. A proof holds for its side of
one connection only. The handshake encrypts nothing and guards nothing that comes after it: on a network that others can
read, it goes inside TLS.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import secrets
import socket
import ssl
import time
from collections.abc import Callable, Generator, Iterator
from typing import TypeVar

import msgspec

from stretto.core.deadlines import deadline
from stretto.core.errors import DeadlineExceeded, HandshakeBroken, HandshakeRefused, WireError
from stretto.core.frames import LENGTH, frame
from stretto.core.records import Record

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

#: One side of the handshake: it yields what is to be sent, or None to be sent the next message; it returns the other
#: side's introduction.
_Side = Generator[_Message | None, _Message | None, bytes]

#: Why a caller with this introduction is not wanted; "" if it is.
Judge = Callable[[bytes], str]


def new_key() -> str:
    """A key that nobody can guess."""
    return secrets.token_hex(_NONCE_BYTES)


async def call(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, key: str, ours: bytes, *, peer: str, seconds: float
) -> bytes:
    """Greet the listener `peer`; returns its introduction, as `ours` is ours (MessagePack, say).

    Raises:
        HandshakeRefused: it refused, or did not prove the key; the connection is of no use any more.
        HandshakeBroken: it went away meanwhile.
        DeadlineExceeded: it took longer than `seconds`.
    """
    return await _carry(_caller(key, ours, peer), reader, writer, peer, seconds)


async def admit(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    key: str,
    ours: bytes,
    judge: Judge,
    *,
    peer: str,
    seconds: float,
) -> bytes:
    """Greet a caller; returns its introduction, which `judge` has admitted. Raises as `call`."""
    return await _carry(_listener(key, ours, judge, peer), reader, writer, peer, seconds)


def call_blocking(connection: socket.socket, key: str, ours: bytes, *, peer: str, seconds: float) -> bytes:
    """`call`, over a connected socket."""
    return _carry_blocking(_caller(key, ours, peer), connection, peer, seconds)


def admit_blocking(
    connection: socket.socket, key: str, ours: bytes, judge: Judge, *, peer: str, seconds: float
) -> bytes:
    """`admit`, over a connected socket."""
    return _carry_blocking(_listener(key, ours, judge, peer), connection, peer, seconds)


def _caller(key: str, ours: bytes, peer: str) -> _Side:
    nonce = secrets.token_bytes(_NONCE_BYTES)
    yield _Hello(nonce, ours)
    theirs = _expected((yield None), _Challenge, peer).nonce
    yield _Proof(_mac(key, "caller", nonce, theirs, ours))
    welcome = _expected((yield None), _Welcome, peer)
    if not hmac.compare_digest(welcome.mac, _mac(key, "listener", nonce, theirs, ours, welcome.introduction)):
        raise HandshakeRefused(peer, "does not have the key")
    return welcome.introduction


def _listener(key: str, ours: bytes, judge: Judge, peer: str) -> _Side:
    hello = _expected((yield None), _Hello, peer)
    nonce = secrets.token_bytes(_NONCE_BYTES)
    yield _Challenge(nonce)
    proof = _expected((yield None), _Proof, peer)
    said = (hello.nonce, nonce, hello.introduction)
    if not hmac.compare_digest(proof.mac, _mac(key, "caller", *said)):
        yield _Refusal("the key is wrong")
        raise HandshakeRefused(peer, "does not have the key")
    if why := judge(hello.introduction):
        yield _Refusal(why)
        raise HandshakeRefused(peer, f"is not wanted: {why}")
    yield _Welcome(ours, _mac(key, "listener", *said, ours))
    return hello.introduction


def _mac(key: str, side: str, *said: bytes) -> bytes:
    assert key, "an empty key proves nothing"
    return hmac.digest(key.encode(), msgspec.msgpack.encode((side, *said)), "sha256")


def _expected(message: _Message | None, kind: type[_Kind], peer: str) -> _Kind:
    if isinstance(message, _Refusal):
        raise HandshakeRefused(peer, f"refused: {message.why}")
    if not isinstance(message, kind):
        raise HandshakeRefused(peer, "speaks out of turn")
    return message


async def _carry(
    side: _Side, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, peer: str, seconds: float
) -> bytes:
    """Play a side over asyncio's streams."""
    message: _Message | None = None
    async with deadline("handshake", f"{peer} to prove the key", seconds):
        with _torn(peer):
            while True:
                try:
                    wanted = side.send(message)
                except StopIteration as end:
                    introduction: bytes = end.value
                    return introduction
                message = None
                if wanted is not None:
                    writer.write(frame(wanted))
                    await writer.drain()
                else:
                    (length,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
                    message = _MESSAGE.decode(await reader.readexactly(_allowed(length)))


def _carry_blocking(side: _Side, connection: socket.socket, peer: str, seconds: float) -> bytes:
    """Play a side over a socket, whose timeout is restored."""
    end, patience = time.monotonic() + seconds, connection.gettimeout()
    message: _Message | None = None
    try:
        with _torn(peer):
            while True:
                try:
                    wanted = side.send(message)
                except StopIteration as done:
                    introduction: bytes = done.value
                    return introduction
                message = None
                if wanted is not None:
                    connection.settimeout(_left(end))
                    connection.sendall(frame(wanted))
                else:
                    (length,) = LENGTH.unpack(_exactly(connection, LENGTH.size, end))
                    message = _MESSAGE.decode(_exactly(connection, _allowed(length), end))
    except TimeoutError:
        raise DeadlineExceeded("handshake", f"{peer} to prove the key", seconds) from None
    finally:
        connection.settimeout(patience)


def _exactly(connection: socket.socket, count: int, end: float) -> bytes:
    """`count` bytes; none that come after them."""
    data = bytearray()
    while len(data) < count:
        connection.settimeout(_left(end))
        part = connection.recv(count - len(data))
        if not part:
            raise EOFError
        data += part
    return bytes(data)


def _left(end: float) -> float:
    if (left := end - time.monotonic()) <= 0:
        raise TimeoutError
    return left


def _allowed(length: int) -> int:
    if length > _LARGEST:
        raise WireError(f"a message of {length:,} bytes; at most {_LARGEST:,} are allowed")
    return length


@contextlib.contextmanager
def _torn(peer: str) -> Iterator[None]:
    """Name a peer that went away, or that speaks something else (a web browser, another version of stretto)."""
    try:
        yield
    except (TimeoutError, HandshakeRefused):
        raise
    except ssl.SSLError as error:  # a certificate is refused after the caller's side of TLS is done
        raise HandshakeRefused(peer, f"does not accept our TLS ({error.reason or error})") from error
    except (EOFError, OSError) as error:
        raise HandshakeBroken(peer, "closed the connection during the handshake") from error
    except (msgspec.MsgspecError, WireError) as error:
        raise HandshakeRefused(peer, f"speaks another language: {error}") from error
