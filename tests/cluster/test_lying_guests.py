"""What an engine on another machine may say: nothing that it was not asked for, and no version that is not published.
A lie is the loss of that engine; it reaches neither the ledger nor the live version.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest

from stretto.core.canary import Loaded
from stretto.core.columns import pack, stamps_of
from stretto.core.errors import EngineLied, EngineLost, WireError
from stretto.core.frames import frame
from stretto.core.records import Completion, GenerateRequest, Sampling, Segment, StopReason
from stretto.engine.wire import Refusal
from stretto_cluster.guest import GuestEngine
from tests.cluster.test_gate import now
from tests.cluster.test_guests import guest_at

NEWEST = 7  # as `guest_at` has it
PREFIX = Segment.of((3, 4), (-0.1, -0.2), (5, 5))
REQUEST = GenerateRequest(
    id="0.0.0", prompt_token_ids=(3,), seeds=(1, 2), sampling=Sampling(max_tokens=9), prefixes=(PREFIX, PREFIX)
)


def ended(
    member: int = 0,
    request: str = "0.0.0",
    token_ids: tuple[int, ...] = (3, 4, 8),
    versions: tuple[int, ...] = (5, 5, 7),
    logprobs: tuple[float, ...] = (-0.1, -0.2, -0.3),
) -> Completion:
    columns, stamps = pack(token_ids, logprobs), stamps_of(versions)
    return Completion(request, member, Segment.sealed(columns, len(token_ids), stamps, stop_reason=StopReason.STOP))


def flipped() -> Completion:
    honest = ended()
    columns = bytes([honest.segment.columns[0] ^ 1]) + honest.segment.columns[1:]
    return Completion("0.0.0", 0, msgspec.structs.replace(honest.segment, columns=columns))


@asynccontextmanager
async def answering(body: bytes | bytearray, status: int = 200) -> AsyncIterator[str]:
    """A server that gives every request this body; its address."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
        await reader.readexactly(length)
        writer.write(b"HTTP/1.1 %d Said\r\ncontent-length: %d\r\n\r\n" % (status, len(body)) + body)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"


def heard(
    folder: Path, body: bytes | bytearray, ask: Callable[[GuestEngine], Awaitable[object]], status: int = 200
) -> None:
    async def work() -> None:
        async with answering(body, status) as address, guest_at(address, folder) as (guest, _):
            await ask(guest)

    now(work())


async def generated(guest: GuestEngine) -> list[Completion]:
    return [completion async for completion in guest.generate(REQUEST)]


def test_honest_completions_pass(tmp_path: Path) -> None:
    heard(tmp_path, frame(ended(0)) + frame(ended(1)), generated)


@pytest.mark.parametrize(
    ("lie", "what"),
    [
        (ended(request="0.1.0"), "was not asked for"),
        (ended(member=2), "was not asked for"),
        (ended(token_ids=(3, 9, 8)), "does not go on with its tokens"),
        (ended(versions=(), logprobs=()), "without a log-probability and a version for each"),
        (ended(versions=(5, 5)), "whose checksum does not fit"),
        (ended(logprobs=()), "whose checksum does not fit"),
        (flipped(), "whose checksum does not fit"),
        (ended(versions=(5, 5, NEWEST + 1)), "versions that are not published"),
        (ended(versions=(5, 5, -1)), "whose versions fall"),
        (ended(versions=(5, 6, 5)), "whose versions fall"),
        (ended(versions=(-1, 5, 5)), "versions that are not published"),
    ],
)
def test_a_completion_that_cannot_be_is_the_loss_of_the_engine(tmp_path: Path, lie: Completion, what: str) -> None:
    with pytest.raises(EngineLied, match=what):
        heard(tmp_path, frame(lie) + frame(ended(1)), generated)


def test_a_lie_of_the_server_behind_it_arrives_as_one(tmp_path: Path) -> None:
    lie = Refusal.of(EngineLied("engine-0", "is not trusted: a log-probability of nan"))
    with pytest.raises(EngineLied, match="a log-probability of nan"):
        heard(tmp_path, msgspec.msgpack.encode(lie), generated, status=400)


def test_what_is_no_message_is_the_loss_of_the_engine(tmp_path: Path) -> None:
    with pytest.raises(EngineLost, match="no stretto engine sends"):
        heard(tmp_path, frame({"hello": 1}), generated)


@pytest.mark.parametrize(
    "pieces",
    [
        {"0.9.0": {0: Segment.of((1,), (-0.1,), (5,))}},
        {"0.0.0": {2: Segment.of((1,), (-0.1,), (5,))}},
        {"0.0.0": {0: Segment.of((1,), (-0.1,), (NEWEST + 1,))}},
    ],
)
def test_tokens_so_far_that_cannot_be_are_refused(tmp_path: Path, pieces: dict[str, dict[int, Segment]]) -> None:
    with pytest.raises(WireError, match=r"was not asked for|are not published"):
        heard(tmp_path, msgspec.msgpack.encode(pieces), lambda guest: guest.partials({"0.0.0": [2, 2]}))


def test_a_version_that_is_not_published_is_refused(tmp_path: Path) -> None:
    async def told(guest: GuestEngine) -> None:
        guest._machine.mirrored = NEWEST
        await guest.update(NEWEST)

    heard(tmp_path, msgspec.msgpack.encode(Loaded(version=NEWEST)), told)
    with pytest.raises(WireError, match="says that it has version 1000000000, and the newest is 7"):
        heard(tmp_path, msgspec.msgpack.encode(Loaded(version=10**9)), told)
