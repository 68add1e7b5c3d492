"""The engine of another machine, as the run sees it, over real sockets.

- One that cannot be reached, or never answers, is lost to the run and does not end it.
- When its machine is what is lost, or has fallen silent, its requests are not the cause.
- It answers to the run's key alone; with TLS, to certificates of the run's authority alone.
- It may say nothing that it was not asked for, and no version that is not published. A lie is the loss of that engine;
  it reaches neither the ledger nor the live version."""

import asyncio
import contextlib
import math
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.core.canary import Loaded
from stretto.core.columns import pack, stamps_of
from stretto.core.errors import DeadlineExceeded, EngineLeft, EngineLied, EngineLost, RefusedRequest, WireError
from stretto.core.frames import frame
from stretto.core.records import Completion, GenerateRequest, Sampling, Segment, StopReason
from stretto.engine.http import client as client_module
from stretto.engine.http.client import HttpEngine
from stretto.engine.http.server import run_server
from stretto.engine.wire import EngineSpec, Refusal
from stretto.loop.config import DeadlinesConfig
from stretto.model.hf.build import build_policy
from stretto.processes.http.tls import client_context
from stretto_cluster import guest as guest_module
from stretto_cluster.guest import GuestEngine
from stretto_cluster.messages import Beat, Mirrored, RunTerms, ToAgent
from stretto_cluster.wire import Wire
from tests.certificates import authority
from tests.cluster.hosting import joined
from tests.engine.answering import engine_of
from tests.engine.serving import Mailbox, until_up
from tests.tiny_policy import TINY

REQUEST = GenerateRequest(id="0.0.0", prompt_token_ids=(3, 4), seeds=(1,), sampling=Sampling(max_tokens=4))


@asynccontextmanager
async def guest_at(address: str, folder: Path, answer: float = 0.3) -> AsyncIterator[tuple[GuestEngine, Wire[ToAgent]]]:
    """The client of an engine at an address, and the agent of its machine."""
    async with joined(folder, address=address) as (_, machine, wire):
        spec = EngineSpec("engine-3", address, "", "", "", "{}", 1, 0.0)
        guest = GuestEngine(spec, machine, DeadlinesConfig(answer=answer, load=0.3), "key", None, lambda: 7, 50)
        try:
            yield guest, wire
        finally:
            await guest.close()


async def one(guest: HttpEngine) -> None:
    async for _ in guest.generate(REQUEST):
        pass


@contextlib.contextmanager
def listening_only() -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield f"127.0.0.1:{listening.getsockname()[1]}"


async def test_an_engine_that_never_answers_is_lost_and_does_not_end_the_run(tmp_path: Path) -> None:
    with listening_only() as address:
        async with guest_at(address, tmp_path) as (guest, wire):
            with pytest.raises(EngineLost, match=r"waited 0\.3 s for the next completion") as lost:
                await one(guest)
            assert not isinstance(lost.value, EngineLeft)  # its machine is there: the requests may be the cause
            wire.send(Mirrored(version=4, size=1, seconds=0.1))
            with pytest.raises(DeadlineExceeded, match="to load version 4"):  # killed and replaced
                await guest.update(4)


async def test_an_engine_to_which_no_packet_comes_through_is_lost_when_its_deadline_is_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind a full backlog the kernel drops the first packet of a connection, as a partition does."""
    monkeypatch.setattr("stretto.engine.http.connections._CONNECT_SECONDS", 0.3)
    with socket.socket() as full:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        crowd = [socket.socket() for _ in range(4)]
        for caller in crowd:
            caller.setblocking(False)
            caller.connect_ex(full.getsockname())
        async with guest_at(f"127.0.0.1:{full.getsockname()[1]}", tmp_path) as (guest, _):
            with pytest.raises(EngineLost, match=r"waited 0\.3 s for a connection"):
                await one(guest)
        for caller in crowd:
            caller.close()


async def test_an_engine_at_a_name_that_nobody_has_is_lost(tmp_path: Path) -> None:
    async with guest_at("nobody.invalid:80", tmp_path) as (guest, _):
        with pytest.raises(EngineLost, match="engine-3 cannot be reached"):
            await one(guest)


async def test_a_machine_that_goes_a_moment_after_its_engine_is_what_was_lost(tmp_path: Path) -> None:
    with listening_only() as address:
        async with guest_at(address, tmp_path, answer=30.0) as (guest, wire):
            asking = asyncio.create_task(one(guest))
            await asyncio.sleep(0.1)
            guest.break_off()
            await asyncio.sleep(0.1)
            wire.cut()
            with pytest.raises(EngineLeft):
                await asking
            with pytest.raises(EngineLost, match="node-7-1 closed its connection"):
                await guest.update(4)


async def test_a_machine_that_fell_silent_is_what_was_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stretto_cluster.guest.SILENT_SECONDS", 0.6)
    with listening_only() as address:
        async with guest_at(address, tmp_path) as (guest, wire):
            wire.send(Beat(sent=0.0, clock_offset=0.0))
            await asyncio.sleep(0.7)
            with pytest.raises(EngineLeft):
                await one(guest)
            assert isinstance(await wire.receive(), RunTerms)


@asynccontextmanager
async def engine_at(folder: Path, tls: str = "") -> AsyncIterator[str]:
    """A real engine that wants a key; its address."""
    build_policy(TINY, folder / "policy", seed=1)
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    server = asyncio.create_task(run_server(engine_of(folder / "policy"), Mailbox(), address, "the key", tls))
    try:
        yield address
    finally:
        server.cancel()
        await asyncio.gather(server, return_exceptions=True)


async def test_an_engine_answers_to_the_runs_key_alone_and_over_tls_to_its_certificates_alone(tmp_path: Path) -> None:
    ours, theirs = str(authority(tmp_path / "ours")), str(authority(tmp_path / "theirs"))
    async with engine_at(tmp_path, ours) as address:

        def client(key: str, tls: str) -> HttpEngine:
            return HttpEngine("engine-3", address, health_seconds=5, key=key, context=client_context(tls))

        right = client("the key", ours)
        await until_up(right)
        await one(right)
        for key in ("", "another", "the ke"):
            wrong = client(key, ours)
            with pytest.raises(RefusedRequest, match="key: is wrong"):
                await one(wrong)
            with pytest.raises(RefusedRequest, match="key: is wrong"):
                await wrong.health()
            await wrong.close()
        for tls in (theirs, ""):
            stranger = client("the key", tls)
            with pytest.raises(EngineLost):
                await stranger.health()
            await stranger.close()
        await right.close()


NEWEST = 7  # as `guest_at` has it
PREFIX = Segment.of((3, 4), (-0.1, -0.2), (5, 5))
CONTINUED = GenerateRequest(
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


async def heard(
    folder: Path, body: bytes | bytearray, ask: Callable[[GuestEngine], Awaitable[object]], status: int = 200
) -> None:
    async with answering(body, status) as address, guest_at(address, folder) as (guest, _):
        await ask(guest)


async def generated(guest: GuestEngine) -> list[Completion]:
    return [completion async for completion in guest.generate(CONTINUED)]


async def test_honest_completions_pass(tmp_path: Path) -> None:
    await heard(tmp_path, frame(ended(0)) + frame(ended(1)), generated)


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
        (
            ended(token_ids=(3, 4, *range(8)), versions=(5,) * 10, logprobs=(-0.1,) * 10),
            "10 tokens of '0.0.0', of which 9",
        ),
        (ended(1), "twice"),
        *((ended(token_ids=(3, 4, wrong)), "that the model does not have") for wrong in (50, 2**31 - 1, -1)),
        *((ended(logprobs=(-0.1, -0.2, odd)), "with no log-probabilities") for odd in (math.nan, math.inf, 0.5, -1e30)),
    ],
)
async def test_a_completion_that_cannot_be_is_the_engines_loss(tmp_path: Path, lie: Completion, what: str) -> None:
    with pytest.raises(EngineLied, match=what):
        await heard(tmp_path, frame(lie) + frame(ended(1)), generated)


async def test_a_lie_of_the_server_behind_it_arrives_as_one(tmp_path: Path) -> None:
    lie = Refusal.of(EngineLied("engine-0", "is not trusted: a log-probability of nan"))
    with pytest.raises(EngineLied, match="a log-probability of nan"):
        await heard(tmp_path, msgspec.msgpack.encode(lie), generated, status=400)


@pytest.mark.parametrize("message", [{"hello": 1}, []])
async def test_what_is_no_message_is_the_loss_of_the_engine(tmp_path: Path, message: object) -> None:
    with pytest.raises(EngineLost, match="no stretto engine sends"):
        await heard(tmp_path, frame(message), generated)


@pytest.mark.parametrize(
    "pieces",
    [
        {"0.9.0": {0: Segment.of((1,), (-0.1,), (5,))}},
        {"0.9.0": {}},
        {"0.0.0": {2: Segment.of((1,), (-0.1,), (5,))}},
        {"0.0.0": {0: Segment.of((1,), (-0.1,), (NEWEST + 1,))}},
        {"0.0.0": {0: Segment.of((1, 50), (-0.1, -0.1), (5, 5))}},
        {"0.0.0": {1: Segment.of((1,), (math.nan,), (5,))}},
        {"0.0.0": {0: Segment.of((1,), (-0.1,), (5,), interrupted=2**31)}},
    ],
)
async def test_tokens_so_far_that_cannot_be_are_refused(tmp_path: Path, pieces: dict[str, dict[int, Segment]]) -> None:
    with pytest.raises(WireError, match=r"was not asked for|are not published|does not have|interrupt"):
        await heard(tmp_path, msgspec.msgpack.encode(pieces), lambda guest: guest.partials({"0.0.0": [2, 2]}))


@given(
    ids=st.lists(st.sampled_from([0, 1, 7, 49, 50, 51, 2**31 - 1, -1, -(2**31)]), min_size=1, max_size=4),
    data=st.data(),
)
def test_tokens_pass_where_the_model_has_them_and_each_has_a_logprob(ids: list[int], data: st.DataObject) -> None:
    """Alike whether they are packed in 32 or in 64 bits."""
    numbers = st.floats(-100, 0) | st.floats() | st.sampled_from([0.0, 5e-4, -9999.0, -20_000.0])
    logprobs = data.draw(st.lists(numbers, min_size=len(ids), max_size=len(ids)))
    passes = all(0 <= id < 50 for id in ids) and all(-1e4 <= number <= 1e-3 for number in logprobs)  # NaN is none
    segment = Segment.of(tuple(ids), tuple(logprobs), (5,) * len(ids))
    assert guest_module._are_possible([segment], 50) == passes


@pytest.mark.parametrize(("known", "length"), [(0, 9), (4, 5), (8, 1)])
async def test_no_more_tokens_so_far_than_are_left_to_sample(tmp_path: Path, known: int, length: int) -> None:
    """`known` and `length` are the nine of the request."""

    async def told(guest: GuestEngine) -> None:
        guest._asked["0.0.0"] = CONTINUED
        await guest.partials({"0.0.0": [known]})

    for more in (0, 1):
        piece = Segment.of((1,) * (length + more), (-0.1,) * (length + more), (5,) * (length + more))
        with pytest.raises(WireError, match="are left to sample") if more else contextlib.nullcontext():
            await heard(tmp_path, msgspec.msgpack.encode({"0.0.0": {0: piece}}), told)


async def test_a_reply_about_its_state_has_a_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "_LARGEST_NEWS", 1 << 16)
    for ask in (HttpEngine.health, HttpEngine.spans):
        with pytest.raises(EngineLied, match="a reply of more than 65,536 bytes"):
            await heard(tmp_path, bytes(1 << 20), ask)


async def test_a_machine_that_tells_of_pulls_without_end_is_not_remembered(tmp_path: Path) -> None:
    async with joined(tmp_path) as (_, machine, _):
        for version in [*range(200), *range(200)] * 2:
            machine._take(Mirrored(version, 1, 0.5))
        assert [span.version for span in machine.spans] == list(range(64))


async def test_a_version_that_is_not_published_is_refused(tmp_path: Path) -> None:
    async def told(guest: GuestEngine) -> None:
        guest._machine.mirrored = NEWEST
        await guest.update(NEWEST)

    await heard(tmp_path, msgspec.msgpack.encode(Loaded(version=NEWEST)), told)
    with pytest.raises(WireError, match="says that it has version 1000000000, and the newest is 7"):
        await heard(tmp_path, msgspec.msgpack.encode(Loaded(version=10**9)), told)
