"""Promises of `stretto serve`, whose engine is a process of its own: an engine that dies is replaced, and what was open
is told so; a client that goes ends its own requests alone; nothing is left when the server is killed.
"""

import asyncio
import os
import resource
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import httpx
import msgspec
import pytest
from starlette.types import Message

from stretto.core.deadlines import open_waits
from stretto.core.errors import DeadlineExceeded, EngineLost, RefusedRequest
from stretto.core.frames import Unframer, frame
from stretto.core.records import GenerateRequest, Sampling
from stretto.core.tasks import cancel_and_wait
from stretto.engine.http.client import HttpEngine
from stretto.engine.wire import Sampled
from stretto.model.hf.tokenizer import load_tokenizer
from stretto.processes.supervisor import RestartBudget
from stretto.processes.tree import descendants
from stretto_gateway.serve.app import ServeApp
from stretto_gateway.serve.remote import RemoteEngine, Take
from tests.asynchronous import until
from tests.engine.byte_policy import NAME
from tests.engine.serving import until_up
from tests.gateway.serve.serving import (
    COMPLETIONS,
    Serving,
    asked,
    engine_of,
    remote_engine,
    running_engine,
    serve_cold,
    serve_process,
    served_model,
)
from tests.launch.running import wait_until


def engine_process(running: Serving) -> int:
    """The process of the server's engine."""
    lines = {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in descendants(running.process.pid)}
    [pid] = [pid for pid, line in lines.items() if b"stretto.engine.role" in line]
    return pid


def test_an_engine_that_is_killed_is_replaced_and_open_streams_end_with_an_error(byte_folder: Path) -> None:
    with serve_process(byte_folder, "--name", NAME, "engine.slots=1") as running:
        before, url = running.post(COMPLETIONS, asked()).json()["choices"], running.url + COMPLETIONS
        body = asked(n=8, stream=True)
        with httpx.stream("POST", url, json=body, timeout=60, trust_env=False) as response:
            lines = response.iter_lines()
            next(lines)
            os.kill(engine_process(running), signal.SIGKILL)
            assert "engine-0 ended before the completion did" in [line for line in lines if line][-1]
        assert running.post(COMPLETIONS, asked()).json()["choices"] == before  # it waits for the next engine
        running.process.terminate()
        out, err = running.process.communicate(timeout=30)
        assert (running.process.returncode, err) == (0, "")
        assert "engine-0 was killed by SIGKILL" in out


@pytest.mark.parametrize(
    ("how", "said"), [(signal.SIGSTOP, "sent no heartbeat for"), (signal.SIGUSR1, "engine-0 was killed by SIGKILL")]
)
def test_an_engine_that_hangs_is_killed_and_replaced_while_its_server_answers(
    byte_folder: Path, how: signal.Signals, said: str
) -> None:
    words = ("--name", NAME, "engine.slots=1", "deadlines.hung=2", "deadlines.load=2")
    with serve_process(byte_folder, *words, poor=("asleep", "3600")) as running:
        whole, url = running.post(COMPLETIONS, asked()).json()["choices"], running.url + COMPLETIONS
        with httpx.stream("POST", url, json=asked(n=128, stream=True), timeout=30, trust_env=False) as response:
            lines = response.iter_lines()
            next(lines)
            os.kill(engine_process(running), how)
            began = time.monotonic()
            assert httpx.get(running.url + "/v1/models", timeout=1, trust_env=False).status_code == 200
            assert "engine-0 ended before the completion did" in [line for line in lines if line][-1]
            assert time.monotonic() - began < 10
        assert running.post(COMPLETIONS, asked()).json()["choices"] == whole
        running.process.terminate()
        assert said in running.process.communicate(timeout=30)[0]


def test_a_server_that_is_killed_leaves_no_engine(byte_folder: Path) -> None:
    with serve_process(byte_folder) as running:
        engine = engine_process(running)
        running.process.send_signal(signal.SIGKILL)
        wait_until(lambda: not Path(f"/proc/{engine}/cmdline").exists(), "the engine has ended")


def endless(id: str) -> GenerateRequest:
    return GenerateRequest(id, (97, 98), (1, 2), Sampling(max_tokens=200))


async def test_a_client_that_goes_ends_its_own_requests_alone(byte_folder: Path) -> None:
    engine = engine_of(byte_folder)
    async with remote_engine(engine) as (_, address):
        client, seen = HttpEngine("engine-0", address), dict[str, int]()

        async def listen(feed: str) -> None:
            async for sampled in client.tokens(feed):
                seen[feed] = seen.get(feed, 0) + len(sampled.tokens)

        await until_up(client)
        first, second = (asyncio.create_task(listen(name)) for name in ("first", "second"))
        async with asyncio.timeout(30):
            await until(lambda: len(seen) == 2, 0)
            with pytest.raises(RefusedRequest, match="a name that no open feed has"):
                await listen("first")
            for feed in seen:
                await client.submit(feed, [endless(feed)], every_token=True)
            with pytest.raises(RefusedRequest, match="an open one"):
                await client.submit("third", [endless("third")], every_token=True)
            await until(lambda: min(seen.values()) > 0, 0)
            await cancel_and_wait([first])
            await until(lambda: engine.health().running == 2, 0)
            before = seen["second"]
            await until(lambda: seen["second"] > before, 0)
            await cancel_and_wait([second])
            await until(lambda: engine.idle, 0)
        await client.close()
    engine.check_integrity()


async def test_what_ends_together_comes_in_messages_for_which_a_frame_has_room(
    byte_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    many = GenerateRequest("a", (97, 98), tuple(range(8)), Sampling(max_tokens=100), top_logprobs=5)

    async def sampled(take: Take | None) -> dict[int, list[int]]:
        found = dict[int, list[int]]()
        async with asyncio.timeout(30), remote.streaming([many], take) as stream:
            async for new in stream:
                for progress in new:
                    found.setdefault(progress.member, []).extend(progress.segment.token_ids)
        return found

    async with running_engine(engine_of(byte_folder)) as remote:
        whole = await sampled(None)
    monkeypatch.setattr("stretto.engine.http.client.Unframer", partial(Unframer, 20_000))
    monkeypatch.setattr("stretto.engine.wire.MOST_TOKENS", 150)  # of at most 100 bytes each
    async with running_engine(engine_of(byte_folder)) as remote:
        assert await sampled(None) == whole
        assert await sampled(lambda new: False) == whole, "token by token"


async def test_who_waits_for_an_engine_is_told_that_the_server_stops(byte_folder: Path) -> None:
    async with remote_engine(engine_of(byte_folder)) as (remote, _):
        waiting = asyncio.create_task(remote.streaming([endless("a")]).__aenter__())
        await asyncio.sleep(0.01)
        assert not waiting.done(), "nothing receives tokens yet"
        remote.break_off()
        with pytest.raises(EngineLost, match="is stopping"):
            await waiting


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_goes_while_it_waits_for_an_engine_is_let_go(byte_folder: Path, stream: bool) -> None:
    told = [{"type": "http.request", "body": msgspec.json.encode(asked(stream=stream))}]

    async def receive() -> Message:
        return told.pop() if told else {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        raise AssertionError(message)

    async with remote_engine(engine_of(byte_folder)) as (remote, _):  # nothing receives tokens
        app = ServeApp(remote, served_model(load_tokenizer(byte_folder)), remote.pass_on)
        scope = {"type": "http", "method": "POST", "path": COMPLETIONS, "headers": []}
        async with asyncio.timeout(5):
            await app(scope, receive, send)


async def test_who_goes_before_its_requests_are_accepted_leaves_none_of_them_behind(byte_folder: Path) -> None:
    engine, texts = engine_of(byte_folder), " | ".join(f'"{number}{"x" * 40}"' for number in range(500))
    slow = Sampling(max_tokens=200, grammar=f"start: {texts}", stop_token_ids=(2,))

    def compiles() -> bool:
        return any("grammar" in wait.awaited for wait in open_waits())

    async with running_engine(engine) as remote:
        going = asyncio.create_task(remote.streaming([GenerateRequest("a", (97,), (1,), slow)]).__aenter__())
        await until(compiles, 0)
        await cancel_and_wait([going])
        await until(lambda: not compiles(), 0)
        await asyncio.sleep(0.05)
        await until(lambda: engine.idle, 0.01)
        assert engine.health().generated < 20


async def test_who_goes_with_many_prompts_costs_the_server_few_descriptors(byte_folder: Path) -> None:
    engine, many = engine_of(byte_folder), [endless(f"a/{number}") for number in range(500)]
    async with running_engine(engine) as remote:
        async with remote.streaming(many):
            before = len(os.listdir("/proc/self/fd"))
        assert len(os.listdir("/proc/self/fd")) < before + 10
        await until(lambda: engine.idle, 0)


async def test_an_engine_that_completes_requests_meanwhile_may_die_again_and_again(byte_folder: Path) -> None:
    restarts, short = RestartBudget(1), Sampling(max_tokens=2)
    async with remote_engine(engine_of(byte_folder)) as (_, address):
        remote = RemoteEngine("engine-0", address, progressed=restarts.progressed)
        receiving = asyncio.create_task(remote.run())
        for death in range(3):
            assert not restarts.exceeded_by_one_more(), "more often in a row than allowed"
            async with remote.streaming([GenerateRequest(f"{death}", (97,), (1,), short)]) as stream:
                assert [progress.segment.length async for new in stream for progress in new] == [2]
        await cancel_and_wait([receiving])


@contextmanager
def no_free_descriptor() -> Iterator[None]:
    most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, most[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, most)


async def test_what_a_client_leaves_is_aborted_as_soon_as_a_descriptor_is_free(
    byte_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stretto.engine.http.client._IDLE_SECONDS", 0.0)  # none is kept
    engine, long = engine_of(byte_folder), GenerateRequest("a", (97, 98), tuple(range(500)), Sampling(max_tokens=200))
    async with running_engine(engine) as remote:
        with ExitStack() as full:
            async with remote.streaming([long]):
                full.enter_context(no_free_descriptor())
            await asyncio.sleep(0.2)
        async with asyncio.timeout(30):
            await until(lambda: engine.idle, 0)
        assert engine.health().generated < 50_000, "of 100,000"


async def test_without_a_free_descriptor_a_client_of_the_engines_interface_is_told_to_try_again(
    byte_folder: Path,
) -> None:
    sent, told = list[Message](), [{"type": "http.request", "body": msgspec.msgpack.encode([endless("a")])}]

    async def receive() -> Message:
        return told.pop() if told else await asyncio.Event().wait()  # type: ignore[return-value]

    async def send(message: Message) -> None:
        sent.append(message)

    async with remote_engine(engine_of(byte_folder)) as (remote, _):
        with no_free_descriptor():
            with pytest.raises(EngineLost, match=r"cannot be asked: .*Too many open files"):
                await remote.health()
            await remote.pass_on({"type": "http", "method": "POST", "path": "/generate", "headers": []}, receive, send)
    assert (sent[0]["status"], b"Too many open files" in sent[1]["body"]) == (503, True)


def test_neither_a_reader_that_ends_nor_idle_clients_keep_a_server_from_replacing_its_engine(byte_folder: Path) -> None:
    """A name that the terminal cannot show is shown with escapes."""
    poor = ("sh", "-c", 'ulimit -n 128; PYTHONIOENCODING=ascii exec "$@"', "sh")
    with serve_cold(byte_folder, "--name", "bär", before=poor) as running, ExitStack() as idle:
        assert running.said[0].startswith("b\\u00e4r: ")
        assert isinstance(running.process, subprocess.Popen)
        assert running.process.stdout is not None
        running.process.stdout.close()  # as in `stretto serve ... | head -2`
        host, port = running.url.removeprefix("http://").rsplit(":", 1)
        for _ in range(160):
            idle.enter_context(socket.create_connection((host, int(port))))
        time.sleep(1)  # accepted as far as there is room
        os.kill(engine_process(running), signal.SIGKILL)
        wait_until(lambda: httpx.get(running.url + "/health", trust_env=False).status_code == 200, "the next engine")
        assert running.post(COMPLETIONS, asked(model="bär")).status_code == 200
        running.process.terminate()
        assert running.process.wait(30) == 0


async def test_an_engine_that_does_not_reply_in_time_is_suspected(tmp_path: Path) -> None:
    head = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
    opened = bytes(frame(Sampled([], [], [])))

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if b"/tokens" in await reader.readline():
            writer.write(head + b"%x\r\n%b\r\n" % (len(opened), opened))
        await reader.read()
        writer.close()

    suspected = list[bool]()
    async with await asyncio.start_unix_server(silent, tmp_path / "e.sock"):
        remote = RemoteEngine("engine-0", f"unix:{tmp_path}/e.sock", 0.05, lambda: suspected.append(True))
        receiving = asyncio.create_task(remote.run())
        with pytest.raises(DeadlineExceeded, match="the acceptance of requests"):
            async with remote.streaming([endless("a")]):
                raise AssertionError("nothing was accepted")
        assert suspected
        with pytest.raises(DeadlineExceeded):
            await remote.health()
        await until(lambda: len(suspected) > 3, 0.01)  # the abort is tried again
        await cancel_and_wait([receiving])


def test_a_second_signal_ends_a_server_at_once_whatever_is_open(byte_folder: Path) -> None:
    many = GenerateRequest("a", (97, 98), tuple(range(4_000)), Sampling(max_tokens=200))
    with serve_process(byte_folder, "engine.slots=1") as running, ThreadPoolExecutor(1) as beside:
        asking = beside.submit(running.post, "/generate", msgspec.msgpack.encode([many]))
        health = f"{running.url}/health"
        wait_until(lambda: httpx.get(health, trust_env=False).json()["engine"]["running"] > 0, "the request is open")
        for _ in range(2):
            running.process.send_signal(signal.SIGTERM)
            time.sleep(0.5)  # the same signal within 50 ms counts as one
        assert running.process.wait(15) == 130
        assert asking.exception(10) is not None, "its reply is broken off"
