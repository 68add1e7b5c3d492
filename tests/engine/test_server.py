"""Promises, over real sockets: answers arrive as they end and as the engine made them; weights change between steps,
and streams live on; who leaves is not served on; an error reaches the client as the same error; an engine that fails
breaks its streams and ends; signals end the process.
"""

import asyncio
import copy
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest
import torch
from transformers import PreTrainedModel

from stretto.core.errors import (
    BoundViolated,
    DeadlineExceeded,
    EngineLied,
    EngineLost,
    RecipeError,
    RefusedRequest,
    TornPublication,
    WireError,
)
from stretto.core.records import Completion, GenerateRequest, Sampling, Segment
from stretto.engine.config import EngineConfig
from stretto.engine.http.client import HttpEngine, refusal
from stretto.engine.http.connections import Connection, Connections
from stretto.engine.http.server import _refusal, run_server, serve
from stretto.engine.native.engine import NativeEngine
from stretto.engine.native.generation import Feed, Generation
from stretto.engine.wire import Refusal
from stretto.processes.http.asgi import LARGEST_BODY
from tests.engine.answering import engine_of
from tests.engine.byte_policy import generated
from tests.engine.serving import Mailbox, served, until_up


def request(name: str, answers: int = 3, max_tokens: int = 20) -> GenerateRequest:
    sampling = Sampling(max_tokens=max_tokens, stop_token_ids=(1,))
    return GenerateRequest(id=name, prompt_token_ids=(5, 12, 8), seeds=tuple(range(answers)), sampling=sampling)


def endless(name: str, answers: int = 2) -> GenerateRequest:
    sampling = Sampling(max_tokens=180)
    return GenerateRequest(id=name, prompt_token_ids=(5, 12), seeds=tuple(range(answers)), sampling=sampling)


async def collect(client: HttpEngine, wanted: GenerateRequest) -> list[Completion]:
    return sorted([c async for c in client.generate(wanted)], key=lambda completion: completion.member)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


@pytest.mark.parametrize("transport", ["unix", "tcp", "tcp of IPv6"])
async def test_answers_arrive_as_the_engine_made_them(folder: Path, tmp_path: Path, transport: str) -> None:
    if transport == "tcp of IPv6" and not has_ipv6():
        pytest.skip("this machine has no IPv6")
    host = "[::1]" if transport == "tcp of IPv6" else "127.0.0.1"
    address = tmp_path / "e.sock" if transport == "unix" else f"{host}:{free_port()}"

    async with served(engine_of(folder), address) as client:
        wanted = [request(f"r{i}", answers=1 + i % 4) for i in range(12)]
        received = await asyncio.gather(*(collect(client, each) for each in wanted))
        engine = engine_of(folder)
        for each, completions in zip(wanted, received, strict=True):
            assert [c.token_ids for c in completions] == [c.token_ids for c in generated(engine, each)]
        health = await client.health()
        assert health.generated == sum(len(c.token_ids) for completions in received for c in completions)
        assert {span.name for span in await client.spans()} == {"generate"}
        assert await client.spans() == []


async def test_a_server_loads_the_newest_before_it_serves(folder: Path, tmp_path: Path, plain: PreTrainedModel) -> None:
    mailbox = Mailbox({version: dict(plain.named_parameters()) for version in (3, 7)})
    async with served(engine_of(folder), tmp_path / "e.sock", mailbox) as client:
        assert (await client.health()).version == 7
        assert {v for c in await collect(client, request("a")) for v in c.versions} == {7}


async def test_an_update_interrupts_a_stream_that_goes_on(folder: Path, tmp_path: Path, plain: PreTrainedModel) -> None:
    other = copy.deepcopy(plain)
    with torch.no_grad():
        next(other.parameters()).mul_(1.01)

    engine, mailbox = engine_of(folder), Mailbox()
    async with served(engine, tmp_path / "e.sock", mailbox) as client:
        stream = asyncio.create_task(collect(client, endless("a")))
        while (await client.health()).generated < 10:
            pass
        mailbox.publications[1] = dict(other.named_parameters())
        assert (await client.update(1)).version == 1
        completions = await stream
        assert all(set(c.versions) == {0, 1} and c.interrupted == 1 for c in completions)
        assert (await client.health()).updates == 1


async def test_an_engines_errors_reach_the_client_as_such(folder: Path, tmp_path: Path, plain: PreTrainedModel) -> None:
    torn = {name: tensor for name, tensor in plain.named_parameters() if "norm" not in name}

    mailbox = Mailbox()
    async with served(engine_of(folder), tmp_path / "e.sock", mailbox) as client:
        with pytest.raises(RefusedRequest, match=r"sampling\.max_tokens: 0; at least 1"):
            await collect(client, request("a", max_tokens=0))
        with pytest.raises(WireError, match="version 2 is not there"):
            await client.update(2)
        mailbox.publications[1] = torn
        with pytest.raises(TornPublication, match="lacks"):
            await client.update(1)
        assert (await client.health()).version == 0
        assert len(await collect(client, request("b"))) == 3


async def test_a_message_that_is_none_is_refused(folder: Path, tmp_path: Path) -> None:
    async def exchange(connections: Connections, method: str, path: str, body: bytes) -> tuple[int, bytes]:
        async with connections.one() as connection:
            connection.send(method, path, body)
            parts = []
            while part := await connection.read():
                parts.append(part)
            return connection.status, b"".join(parts)

    async with served(engine_of(folder), tmp_path / "e.sock"):
        connections = Connections("engine-0", f"unix:{tmp_path / 'e.sock'}")
        for path, body in (("/generate", b"\x00"), ("/generate", b"\x81"), ("/update_weights", b"junk")):
            status, reply = await exchange(connections, "POST", path, body)
            assert status == 400
            assert msgspec.msgpack.decode(reply, type=Refusal).field == "body"
        assert (await exchange(connections, "GET", "/nowhere", b""))[0] == 404
        assert (await exchange(connections, "GET", "/generate", b""))[0] == 405
        connections.close()


async def test_connections_of_a_burst_are_closed_once_they_idle_beside_one_in_use(folder: Path, tmp_path: Path) -> None:
    async with served(engine_of(folder), tmp_path / "e.sock"):
        connections, opened = Connections("engine-0", f"unix:{tmp_path / 'e.sock'}", idle=0.2), set[Connection]()

        async def ask(seconds: float = 0.0) -> None:
            async with connections.one() as connection:
                opened.add(connection)
                connection.send("GET", "/health", b"")
                await connection.rest()
                await asyncio.sleep(seconds)

        await asyncio.gather(*(ask() for _ in range(20)))
        for _ in range(6):
            await ask(0.05)
        assert (len(opened), sum(one.is_reusable(60.0) for one in opened)) == (20, 1)
        connections.close()


async def test_a_client_that_leaves_has_its_request_aborted(folder: Path, tmp_path: Path) -> None:
    engine = engine_of(folder, slots=2)
    async with served(engine, tmp_path / "e.sock") as client:
        leaver = asyncio.create_task(collect(client, endless("a", answers=6)))
        while (await client.health()).running < 2:
            pass
        leaver.cancel()
        await asyncio.gather(leaver, return_exceptions=True)
        async with asyncio.timeout(20):
            while (await client.health()).running or (await client.health()).waiting:
                pass
        engine.check_integrity()
        assert len(await collect(client, request("b"))) == 3


async def test_leaving_after_the_first_answer_aborts_the_rest(folder: Path, tmp_path: Path) -> None:
    async def first(client: HttpEngine) -> Completion:
        async for completion in client.generate(endless("a", answers=6)):
            return completion
        raise AssertionError("no answer")

    async with served(engine_of(folder, slots=1), tmp_path / "e.sock") as client:
        await first(client)
        async with asyncio.timeout(20):
            while (await client.health()).running:
                await asyncio.sleep(0)


async def test_an_abort_ends_the_stream_of_that_request(folder: Path, tmp_path: Path) -> None:
    async with served(engine_of(folder, slots=1), tmp_path / "e.sock") as client:
        stream = asyncio.create_task(collect(client, endless("a", answers=3)))
        while not (await client.health()).running:
            pass
        await client.abort("a")
        with pytest.raises(EngineLost, match="engine-0 broke off"):
            await stream
        await client.abort("unknown")


async def test_an_engine_that_fails_breaks_its_streams_and_ends_with_its_error(
    folder: Path, tmp_path: Path, plain: PreTrainedModel
) -> None:
    broken = {name: torch.full_like(tensor, torch.nan) for name, tensor in plain.named_parameters()}

    mailbox, address = Mailbox(), f"unix:{tmp_path / 'e.sock'}"
    server = asyncio.create_task(run_server(engine_of(folder, slots=1), mailbox, address))
    client = HttpEngine("engine-0", address, answer_seconds=20)
    await until_up(client)
    stream = asyncio.create_task(collect(client, endless("a", answers=3)))
    while not (await client.health()).running:
        pass
    mailbox.publications[1] = broken
    await client.update(1)
    with pytest.raises(EngineLost, match="engine-0 broke off"):
        await stream
    with pytest.raises(FloatingPointError, match="not finite"):
        await server
    with pytest.raises(EngineLost, match="engine-0 does not listen"):
        await client.health()
    await client.close()


async def test_a_silent_engine_is_a_deadline_with_a_name(tmp_path: Path) -> None:
    listeners: list[asyncio.Task[None] | None] = []

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        listeners.append(asyncio.current_task())
        await reader.read()
        writer.close()
        await writer.wait_closed()

    server = await asyncio.start_unix_server(silent, tmp_path / "e.sock")
    client = HttpEngine(
        "engine-0", f"unix:{tmp_path / 'e.sock'}", answer_seconds=0.05, load_seconds=0.05, health_seconds=0.05
    )
    with pytest.raises(DeadlineExceeded, match=r"the client of engine-0 waited 0\.05 s for the next completion to a"):
        await collect(client, request("a"))
    with pytest.raises(DeadlineExceeded, match="engine-0 to load version 3"):
        await client.update(3)
    server.close()
    await asyncio.gather(*(listener for listener in listeners if listener is not None))


def test_a_completion_may_take_longer_than_the_deadline_while_the_engine_samples(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes nearly twice as long, and comes whole; where steps stop in its middle, the deadline ends the wait."""

    async def main(steps: int) -> list[Completion]:
        engine, left = engine_of(folder, slots=1), iter(range(steps))
        quick = engine.step

        def slow() -> list[Completion]:
            time.sleep(0.01)
            return quick() if next(left, None) is not None else []

        monkeypatch.setattr(engine, "step", slow)
        async with served(engine, tmp_path / f"{steps}.sock", answer_seconds=1.0) as client:
            return await collect(client, endless("a", answers=1))

    (whole,) = asyncio.run(main(1000))
    assert len(whole.token_ids) == 180
    with pytest.raises(DeadlineExceeded, match=r"waited 1 s for the next completion to a"):
        asyncio.run(main(30))


def test_nobody_at_the_address_is_a_lost_engine(tmp_path: Path) -> None:
    for address in (f"unix:{tmp_path / 'none.sock'}", f"127.0.0.1:{free_port()}"):
        with pytest.raises(EngineLost, match="engine-0 does not listen"):
            asyncio.run(HttpEngine("engine-0", address).health())


def test_a_port_in_use_is_a_problem_of_the_recipe(folder: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(RecipeError, match=r"engine.base_port: 127\.0\.0\.1:\d+: Address already in use"):
            serve(engine_of(folder), Mailbox(), address)


PROCESS = """
import sys
from pathlib import Path
from stretto.engine.config import EngineConfig
from stretto.engine.native.engine import NativeEngine
from stretto.engine.http.server import serve
from tests.engine.serving import Mailbox
serve(NativeEngine.load(sys.argv[1], EngineConfig(slots=1)), Mailbox(), sys.argv[2])
"""


@pytest.mark.long
def test_sigterm_ends_the_process_and_its_clients_hear_of_it(folder: Path, tmp_path: Path) -> None:
    address = f"unix:{tmp_path / 'e.sock'}"
    process = subprocess.Popen([sys.executable, "-c", PROCESS, folder, address])

    async def lose() -> None:
        client = HttpEngine("engine-0", address, answer_seconds=30)
        await until_up(client)
        stream = asyncio.create_task(collect(client, endless("a", answers=64)))
        while not (await client.health()).running:
            pass
        process.terminate()
        with pytest.raises(EngineLost, match="engine-0 broke off"):
            await stream
        await client.close()

    try:
        asyncio.run(lose())
        assert process.wait(10) == -signal.SIGTERM
    finally:
        process.kill()
        process.wait()


async def test_a_client_that_knows_more_tokens_than_there_are_is_told_of_none(folder: Path, tmp_path: Path) -> None:
    engine = engine_of(folder)
    engine.add(endless("a"))
    for _ in range(5):
        engine.step()
    async with served(engine, tmp_path / "e.sock") as client:
        assert (await client.partials({"a": [1 << 40, 0]}))["a"].keys() == {1}
        with pytest.raises(RefusedRequest, match=">= 0"):
            await client.partials({"a": [-2, 0]})  # the last tokens of the prompt were told as sampled
        engine.abort("a")


async def test_texts_of_a_client_that_has_left_are_not_scored_on(byte_folder: Path, tmp_path: Path) -> None:
    engine = NativeEngine.load(byte_folder, EngineConfig(slots=2, max_prefill_tokens=32))
    async with served(engine, tmp_path / "e.sock") as client:
        asked = asyncio.create_task(client.score([[5] * 250] * 10_000))  # hours
        while not engine.health().busy_seconds:
            await asyncio.sleep(0.01)
        asked.cancel()
        async with asyncio.timeout(20):  # texts are scored one after another
            assert await client.score([[5]]) == [()]


@pytest.mark.parametrize(
    "error", [RefusedRequest("a", "b", "c"), EngineLost("e", "a"), EngineLied("e", "a"), TornPublication("a")]
)
def test_an_error_of_a_handler_reaches_the_client_as_the_same_error(error: WireError | EngineLost) -> None:
    status, told = _refusal(error)
    raised = refusal("another", status, msgspec.msgpack.encode(told))
    assert (type(raised), str(raised)) == (type(error), str(error))


async def test_a_refused_submission_ends_its_own_requests_alone(folder: Path) -> None:
    generation = Generation(engine_of(folder))
    ours, theirs = Feed("engine-0"), Feed("engine-0")
    generation.submit_to(ours, [endless("a")], every_token=True)
    for feed in (ours, theirs):
        with pytest.raises(RefusedRequest, match="id that no open request uses"):
            generation.submit_to(feed, [endless("b"), endless("a")], every_token=True)
    assert generation.open_requests == 1, "the other caller's"
    assert (theirs.refused, theirs.open) == ([], set())
    with pytest.raises(AttributeError):  # also if a bug is the cause
        generation.submit_to(theirs, [endless("b"), None], every_token=True)  # type: ignore[list-item]
    assert (generation.open_requests, theirs.open) == (1, set())
    generation.end(ours)
    assert generation.open_requests == 0


def test_an_idle_engine_that_still_holds_a_slot_ends_with_the_violated_bound(folder: Path) -> None:
    engine = engine_of(folder)
    engine._policy._buckets.place(1, 10)  # a slot that belongs to no answer
    with pytest.raises(BoundViolated, match=r"rows \{1\} are cached, set\(\) run"):
        asyncio.run(Generation(engine).run())


async def test_the_tokens_of_groups_that_another_engine_has_lost_may_be_many(byte_folder: Path, tmp_path: Path) -> None:
    """A body of an engine's role is refused for its tokens, if at all, and not for its bytes."""
    tokens = tuple(range(40)) * 100_000
    prefix = Segment.of(token_ids=tokens, behavior_logprobs=(-1.0,) * len(tokens), versions=(0,) * len(tokens))
    asked = GenerateRequest("a", (5,), (1,), Sampling(max_tokens=9), prefixes=(prefix,))
    assert len(msgspec.msgpack.encode([asked])) > LARGEST_BODY

    engine = NativeEngine.load(byte_folder, EngineConfig(slots=2))
    async with served(engine, tmp_path / "s.sock") as client:
        with pytest.raises(RefusedRequest, match="at most 9"):
            [completion async for completion in client.generate(asked)]
