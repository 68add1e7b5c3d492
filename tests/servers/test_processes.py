"""Promises about a server's process: when its starter is gone, however that ended, nothing of the server is left; its
exit code is told; a server that ends, or never answers, or falls silent, has a name and a deadline; a port
that is reserved for it is given to nobody else."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest

from stretto.core.errors import DeadlineExceeded, RoleDied
from stretto_servers import server as servers
from stretto_servers.make import Launch
from stretto_servers.server import GivenServer, ServerProcess, lost, port_of, reserve_port, until_ready
from tests.servers.toy import ToyServer

#: A server with a child of its own, as vLLM has; it writes both ids into a file.
SERVER = "sleep 600 & echo $$ $! > {file}.new; mv {file}.new {file}; {then}"
GUARD = [sys.executable, "-m", "stretto_servers.guard"]


def command(file: Path, then: str = "wait") -> tuple[str, ...]:
    return "/bin/sh", "-c", SERVER.format(file=file, then=then)


def pids_in(file: Path) -> list[int]:
    until(file.exists)
    return list(map(int, file.read_text().split()))


def until(condition: Callable[[], bool], seconds: float = 30.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def gone(pid: int) -> bool:
    """Whether it runs no more; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return True


@pytest.mark.parametrize(("then", "code"), [("exit 7", 7), ("exit 0", 0), ("kill -KILL $$", 128 + signal.SIGKILL)])
def test_the_end_of_a_server_ends_its_children_and_its_code_is_passed_on(tmp_path: Path, then: str, code: int) -> None:
    with subprocess.Popen([*GUARD, *command(tmp_path / "pids", then)], stdin=subprocess.PIPE) as guard:
        assert guard.wait(30) == code
    until(lambda: all(map(gone, pids_in(tmp_path / "pids"))))


@pytest.mark.parametrize("deaf", [False, True])
def test_nothing_is_left_of_a_server_whose_starter_was_killed(tmp_path: Path, deaf: bool) -> None:
    then = "trap '' TERM; while :; do wait; sleep 0.05; done" if deaf else "wait"
    start = "import subprocess, sys; subprocess.Popen(sys.argv[1:], stdin=subprocess.PIPE).wait()"
    with subprocess.Popen([sys.executable, "-c", start, *GUARD, *command(tmp_path / "pids", then)]) as starter:
        pids = pids_in(tmp_path / "pids")
        assert not any(map(gone, pids))
        starter.kill()
    until(lambda: all(map(gone, pids)))


def test_signals_of_a_terminal_do_not_end_the_guard_before_its_server(tmp_path: Path) -> None:
    with subprocess.Popen([*GUARD, *command(tmp_path / "pids")], stdin=subprocess.PIPE) as guard:
        pids = pids_in(tmp_path / "pids")
        for stop in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            guard.send_signal(stop)
        assert guard.poll() is None
        assert guard.stdin is not None
        guard.stdin.close()
        guard.wait(30)
    until(lambda: all(map(gone, pids)))


async def test_stop_ends_a_server_and_its_environment_is_its_own(tmp_path: Path) -> None:
    then = f'echo "$GIVEN-$PYTHONPATH" > {tmp_path}/environment; mv {tmp_path}/pids {tmp_path}/ready; wait'
    started = await ServerProcess.start("engine-0", Launch(command(tmp_path / "pids", then), {"GIVEN": "yes"}))
    pids = await asyncio.to_thread(pids_in, tmp_path / "ready")
    await started.stop()
    await asyncio.to_thread(until, lambda: all(map(gone, pids)))
    assert (tmp_path / "environment").read_text() == "yes-\n"
    await started.stop()  # twice is no error


async def test_the_path_of_a_server_s_interpreter_may_look_like_a_variable(tmp_path: Path) -> None:
    (tmp_path / "a=b").mkdir()
    (tmp_path / "a=b" / "python").symlink_to("/bin/sh")
    words = (str(tmp_path / "a=b" / "python"), "-c", 'echo "$GIVEN $1" > "$0"', str(tmp_path / "told"), "two words")
    started = await ServerProcess.start("engine-0", Launch(words, {"GIVEN": "yes"}))
    assert "exit code 0" in str(await asyncio.wait_for(started.ended(), 30))
    assert (tmp_path / "told").read_text() == "yes two words\n"


@pytest.mark.parametrize(
    ("then", "how"),
    [
        ("exit 3", "ended with exit code 3"),
        ("exit 255", "ended with exit code 255"),
        ("kill -KILL $$", "was killed by SIGKILL"),
        ("exec /nowhere/python", "ended with exit code 127"),
    ],
)
async def test_a_server_that_ends_before_it_is_ready_is_told_with_its_end(tmp_path: Path, then: str, how: str) -> None:
    class Silent(ToyServer):
        async def ready(self) -> bool:
            await asyncio.sleep(600)  # a request that nobody answers
            return True

    started = await ServerProcess.start("engine-0", Launch(command(tmp_path / "pids", then), {}))
    with pytest.raises(RoleDied, match=f"the server of engine-0 {how}"):
        await until_ready(started, Silent(), 30)
    await started.stop()


class Never(ToyServer):
    """It says that it is not ready."""

    async def ready(self) -> bool:
        return False


async def test_a_server_that_never_answers_has_a_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servers, "_LOOK_SECONDS", 0.01)
    with pytest.raises(DeadlineExceeded, match=r"engine-0 waited 0\.05 s for its server to be ready"):
        await until_ready(GivenServer("engine-0", "node:8000", Never()), Never(), 0.05)


async def test_a_given_server_that_falls_silent_is_named_with_its_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servers, "_WATCH_SECONDS", 0.005)
    monkeypatch.setattr(servers, "_SILENT_SECONDS", 0.03)
    given = GivenServer("engine-0", "node:8000", Never())
    assert str(await given.ended()) == "the server node:8000 does not answer for 0.03 s"
    await given.stop()
    answering = asyncio.create_task(GivenServer("engine-0", "node:8000", ToyServer()).ended())
    await asyncio.sleep(0.1)
    assert not answering.done()
    answering.cancel()


async def test_time_in_which_the_adapter_was_stopped_is_no_silence_of_a_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that sleeps, or a container that is paused: the answer that was under way is missed."""

    class Awaking(ToyServer):
        looks = 0

        async def ready(self) -> bool:
            self.looks += 1
            if self.looks == 1:
                time.sleep(0.3)  # the whole process is stopped
            return self.looks > 1

    for name, seconds in (("_WATCH_SECONDS", 0.005), ("LOOK_SECONDS", 0.005), ("_SILENT_SECONDS", 0.1)):
        monkeypatch.setattr(servers, name, seconds)
    server = Awaking()
    watching = asyncio.create_task(GivenServer("engine-0", "node:8000", server).ended())
    while server.looks < 5 and not watching.done():
        await asyncio.sleep(0.005)
    assert not watching.done()
    watching.cancel()


async def test_a_server_that_lives_and_does_not_answer_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its workers have died, and it waits for the requests that it has."""
    monkeypatch.setattr(servers, "_WATCH_SECONDS", 0.005)
    monkeypatch.setattr(servers, "_SILENT_SECONDS", 0.03)
    server = await ServerProcess.start("engine-0", Launch(("sleep", "600"), {}))
    assert str(await lost(server, Never())) == "the server of engine-0 does not answer for 0.03 s"
    await server.stop()
    assert (await lost(server, ToyServer())).role == "the server of engine-0"


def test_the_guard_needs_no_more_than_the_standard_library() -> None:
    script = "import sys, stretto_servers.guard as guard; print('torch' in sys.modules, 'msgspec' in sys.modules)"
    told = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, env=dict(os.environ)
    )
    assert told.stdout.split() == ["False", "False"]


def test_a_reserved_port_is_given_to_nobody_else() -> None:
    """Of 300 that are reserved, none is among 3,000 that others ask the system for, with SO_REUSEADDR and without."""
    with ExitStack() as stack:
        reserved = [port_of(stack.enter_context(reserve_port())) for _ in range(300)]
        assert len(set(reserved)) == 300
        for number in range(3_000):
            with socket.socket() as other:
                other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, number % 2)
                other.bind(("127.0.0.1", 0))
                assert port_of(other) not in reserved


async def test_a_server_listens_on_its_reserved_port_and_nobody_answers_there_before() -> None:
    with reserve_port() as reserved:
        port = port_of(reserved)
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection("127.0.0.1", port)
        async with await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", port):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            assert await reader.read() == b""
            writer.close()
    with socket.socket() as other:  # it is given back
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.bind(("127.0.0.1", port))
