"""A role that is forked from the fork server is like one with an interpreter of its own: log, session, descriptors,
environment and command line. Roles and fork server end with the command. Whatever happens to the fork server, the next
role can be started, and the end of every role is noticed."""

import asyncio
import errno
import fcntl
import itertools
import os
import random
import resource
import signal
import socket
import threading
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from stretto.core.errors import RoleDied
from stretto.processes.channel import ConductorEnd
from stretto.processes.role import RoleProcess
from stretto.processes.spawn import FRESH, Spawn
from stretto_app.forking import role as fork_server_role
from stretto_app.forking import server as module
from stretto_app.forking.role import fork_server
from stretto_app.forking.server import ForkServer, accelerated
from tests.asynchronous import run_by, until
from tests.processes.conftest import ROLE
from tests.processes.stubborn_role import StubbornSpec

ROOT = Path(__file__).parents[2]


def timely(work: Awaitable[None]) -> None:
    async def main() -> None:
        async with asyncio.timeout(30):
            await work

    asyncio.run(main())


def in_its_own(work: Callable[[ForkServer], Awaitable[None]]) -> None:
    """With a fork server of its own; nothing is left."""
    before = children_of(os.getpid())
    server = ForkServer([ROLE])
    try:
        timely(work(server))
    finally:
        server.close()
        assert children_of(os.getpid()) == before


def spawn(folder: Path, spec: StubbornSpec, **further: object) -> Spawn:
    text = msgspec.json.encode(spec).decode()
    return msgspec.structs.replace(Spawn(module=ROLE, spec=text, log=str(folder / "log.txt")), **further)


async def up(folder: Path, times: int = 1) -> None:
    log = folder / "log.txt"
    await until(lambda: log.exists() and log.read_text().count("up") >= times)


def children_of(pid: int) -> list[int]:
    return sorted(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))


def in_shared(work: Callable[[ForkServer], Awaitable[None]], shared: ForkServer) -> None:
    """With the fork server of the room; its children are ended."""
    try:
        timely(work(shared))
    finally:
        for pid in children_of(shared.pid):
            os.kill(pid, signal.SIGKILL)
        while children_of(shared.pid):
            time.sleep(0.01)


with_shared, with_its_own = run_by(in_shared), run_by(in_its_own)


def tries(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Each try to send an order from now on: whether the wire has taken it."""
    found, send = list[bool](), socket.send_fds

    def noted(*given: Any) -> int:
        try:
            sent = send(*given)
        except BlockingIOError:
            found.append(False)
            raise
        found.append(True)
        return sent

    monkeypatch.setattr(socket, "send_fds", noted)
    return found


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


@with_shared
async def test_more_roles_start_at_once_than_the_wire_holds_orders(
    server: ForkServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The orders have 30 kB each: the kernel holds 208 kB of them by default while the server forks."""
    large = spawn(tmp_path, StubbornSpec(seconds=0.0, code=7), environment={"LARGE": "x" * 30_000})
    os.kill(server.pid, signal.SIGSTOP)
    orders = tries(monkeypatch)
    starts = [asyncio.ensure_future(server.start(large)) for _ in range(16)]
    while len(orders) < len(starts):  # each has tried to send its order
        await asyncio.sleep(0)
    assert {*orders} == {True, False}
    os.kill(server.pid, signal.SIGCONT)
    roles = await asyncio.gather(*starts)
    assert [(isinstance(role, module.ForkedProcess), await role.wait()) for role in roles] == [(True, 7)] * 16


@with_shared
async def test_a_role_is_a_child_of_the_fork_server_with_a_session_and_log(server: ForkServer, tmp_path: Path) -> None:
    role = await server.start(spawn(tmp_path, StubbornSpec(seconds=0.3, code=7)))
    await up(tmp_path)
    assert parent_of(role.pid) == server.pid
    assert os.getsid(role.pid) == role.pid
    assert role.returncode is None
    words = Path(f"/proc/{role.pid}/cmdline").read_text().rstrip("\0").split("\0")
    assert words[1:] == ["-m", ROLE, msgspec.json.encode(StubbornSpec(seconds=0.3, code=7)).decode()]
    assert await role.wait() == 7
    assert (tmp_path / "log.txt").read_text() == "up\n"


@with_shared
async def test_the_end_of_a_role_waits_for_its_threads_then_for_its_handlers_and_writes_what_they_printed(
    server: ForkServer, tmp_path: Path
) -> None:
    assert await (await server.start(spawn(tmp_path, StubbornSpec(seconds=0.0, code=7, late=True)))).wait() == 7
    assert (tmp_path / "log.txt").read_text() == "up\nthread\nhandler\n"


@pytest.mark.parametrize("forked", [True, False], ids=["forked", "fresh"])
@with_shared
async def test_a_role_starts_in_the_folder_of_the_process_that_asks_for_it(
    server: ForkServer, forked: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its paths may be relative, and the server may have been started elsewhere."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    role = await (server if forked else FRESH).start(spawn(Path(), StubbornSpec()))
    await up(tmp_path)
    folder = Path(f"/proc/{role.pid}/cwd").readlink()
    role.terminate()
    await role.wait()
    assert folder == tmp_path


@with_its_own
async def test_a_role_whose_start_was_cancelled_does_nothing(server: ForkServer, tmp_path: Path) -> None:
    """What it was to read may be gone by the time at which the server has imported its modules."""
    cancelled, wanted = tmp_path / "cancelled", tmp_path / "wanted"
    cancelled.mkdir()
    wanted.mkdir()
    (cancelled / "log.txt").touch()  # most are killed before they open it
    for _ in range(20):
        start = asyncio.create_task(server.start(spawn(cancelled, StubbornSpec(seconds=0.0))))
        await asyncio.sleep(0)
        start.cancel()
        await asyncio.gather(start, return_exceptions=True)
    role = await server.start(spawn(wanted, StubbornSpec(seconds=0.0)))  # forked after them
    await role.wait()
    await up(wanted)
    assert (cancelled / "log.txt").read_text() == ""


@with_its_own
async def test_a_start_that_is_cancelled_when_its_role_has_just_begun_costs_no_other_role(
    server: ForkServer, tmp_path: Path
) -> None:
    other = await server.start(spawn(tmp_path, StubbornSpec()))
    await up(tmp_path)
    start = asyncio.create_task(server.start(spawn(tmp_path, StubbornSpec())))
    for _ in range(2):  # until it waits for the word of its start
        await asyncio.sleep(0)
    end = time.monotonic() + 30
    while (tmp_path / "log.txt").read_text().count("up") < 2:  # the event loop does not hear that it has begun
        assert time.monotonic() < end, "it has not begun"
        time.sleep(0.005)
    start.cancel()
    await asyncio.wait([start])
    await until(lambda: children_of(server.pid) in ([other.pid], []))
    await asyncio.sleep(0.1)
    assert (other.returncode, parent_of(other.pid)) == (None, server.pid)


@with_shared
async def test_a_role_has_its_environment_and_the_descriptors_that_it_inherits_under_their_numbers(
    server: ForkServer, tmp_path: Path
) -> None:
    """Whatever their numbers are."""
    readable, writable = os.pipe()
    numbers = [fcntl.fcntl(writable, fcntl.F_DUPFD_CLOEXEC, least) for least in range(126, 132)]
    further = {"environment": {"STRETTO_HEARTBEAT": str(writable)}, "inherited": (writable, *numbers), "threads": 3}
    role = await server.start(spawn(tmp_path, StubbornSpec(beats=True), **further))
    for number in (writable, *numbers):
        os.close(number)
    await up(tmp_path)
    assert sorted(map(int, os.listdir(f"/proc/{role.pid}/fd"))) == [0, 1, 2, writable, *numbers]
    assert len({os.readlink(f"/proc/{role.pid}/fd/{number}") for number in (writable, *numbers)}) == 1
    beaten = await asyncio.to_thread(os.read, readable, 1)
    os.close(readable)
    lines = Path(f"/proc/{server.pid}/environ").read_bytes().decode().split("\0")
    inherited = dict(line.split("=", 1) for line in lines if line)
    assert beaten == b"."
    assert (inherited["OMP_NUM_THREADS"], inherited["OMP_WAIT_POLICY"]) == ("1", "PASSIVE")


@with_shared
async def test_a_signal_that_ends_a_role_is_its_exit_code(server: ForkServer, tmp_path: Path) -> None:
    one, other = [await server.start(spawn(tmp_path, StubbornSpec())) for _ in range(2)]
    one.terminate()
    os.kill(other.pid, signal.SIGKILL)
    assert (await one.wait(), await other.wait()) == (-signal.SIGTERM, -signal.SIGKILL)


@with_shared
async def test_a_role_whose_log_cannot_be_written_is_not_started(server: ForkServer, tmp_path: Path) -> None:
    role = RoleProcess("stubborn", ROLE, tmp_path / "nowhere" / "log.txt", spawner=server)
    with pytest.raises(RoleDied, match=r"stubborn cannot be started: .*nowhere/log.txt: No such file"):
        await role.start(StubbornSpec(), 1)
    assert await (await server.start(spawn(tmp_path, StubbornSpec(seconds=0.0)))).wait() == 0


@pytest.mark.parametrize("inherited", [(), (1,)])
@with_its_own
async def test_a_fork_server_without_descriptors_starts_no_role_and_goes_on(
    server: ForkServer, tmp_path: Path, inherited: tuple[int, ...]
) -> None:
    """It has room for one more: the connection of the role that it is asked to start."""
    first = await server.start(spawn(tmp_path, StubbornSpec()))
    await up(tmp_path)
    taken = {*map(int, os.listdir(f"/proc/{server.pid}/fd"))}
    free = next(number for number in itertools.count() if number not in taken)
    before = resource.prlimit(server.pid, resource.RLIMIT_NOFILE)
    resource.prlimit(server.pid, resource.RLIMIT_NOFILE, (free + 1, before[1]))
    with pytest.raises(OSError, match="Too many open files"):
        await server.start(spawn(tmp_path, StubbornSpec(), inherited=inherited))
    resource.prlimit(server.pid, resource.RLIMIT_NOFILE, before)
    second = await server.start(spawn(tmp_path, StubbornSpec(seconds=0.0, code=3)))
    assert await second.wait() == 3
    assert first.returncode is None
    assert (os_parent(first.pid), os_parent(server.pid)) == (server.pid, os.getpid())
    first.terminate()
    assert await first.wait() == -signal.SIGTERM


def os_parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


@with_shared
async def test_a_role_that_nobody_waits_for_any_more_is_ended(
    server: ForkServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.kill(server.pid, signal.SIGSTOP)
    orders = tries(monkeypatch)
    starting = asyncio.create_task(server.start(spawn(tmp_path, StubbornSpec())))
    await until(lambda: orders, 0)
    starting.cancel()
    os.kill(server.pid, signal.SIGCONT)
    await (await server.start(spawn(tmp_path, StubbornSpec(seconds=0.0)))).wait()
    await until(lambda: not children_of(server.pid))


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server has a fifth of a second to answer, and to tell an exit code."""
    monkeypatch.setattr(module, "_STALL_SECONDS", 0.2)
    monkeypatch.setattr(module, "_EXIT_CODE_SECONDS", 0.2)


@with_its_own
async def test_roles_end_with_a_fork_server_that_is_killed_and_the_next_one_starts_afresh(
    server: ForkServer, tmp_path: Path, impatient: None
) -> None:
    role = await server.start(spawn(tmp_path, StubbornSpec()))
    await up(tmp_path)
    os.kill(server.pid, signal.SIGKILL)
    assert await role.wait() == -signal.SIGKILL
    assert server.describe_end(role).startswith("ended with the process that it was forked from")
    while Path(f"/proc/{role.pid}").exists():  # the kernel's doing, a moment later
        await asyncio.sleep(0.01)
    afresh = await server.start(spawn(tmp_path, StubbornSpec(seconds=0.0, code=3)))
    assert await afresh.wait() == 3


@with_shared
async def test_the_end_of_a_role_is_noticed_under_a_fork_server_that_hangs_and_the_others_go_on(
    server: ForkServer, tmp_path: Path, impatient: None
) -> None:
    role, other = [await server.start(spawn(tmp_path, StubbornSpec())) for _ in range(2)]
    os.kill(server.pid, signal.SIGSTOP)
    os.kill(role.pid, signal.SIGTERM)
    start = time.monotonic()
    assert await role.wait() == -signal.SIGKILL
    assert other.returncode is None
    os.kill(server.pid, signal.SIGCONT)
    other.terminate()
    assert await other.wait() == -signal.SIGTERM
    assert time.monotonic() - start >= 0.2


@pytest.mark.parametrize("limit", ["_START_SECONDS", "_STALL_SECONDS"])
@with_its_own
async def test_a_fork_server_that_does_not_answer_is_given_up(
    server: ForkServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str
) -> None:
    monkeypatch.setattr(module, limit, 0.2)
    os.kill(server.pid, signal.SIGSTOP)
    role = await server.start(spawn(tmp_path, StubbornSpec(seconds=0.0, code=5)))
    assert await role.wait() == 5
    assert not Path(f"/proc/{server.pid}").exists()


@with_its_own
async def test_a_fork_server_that_hangs_is_killed_behind_the_last_of_its_children(
    server: ForkServer, tmp_path: Path, impatient: None
) -> None:
    child = await server.start(spawn(tmp_path, StubbornSpec()))
    os.kill(server.pid, signal.SIGSTOP)
    await (await server.start(spawn(tmp_path, StubbornSpec(seconds=0.0)))).wait()
    assert child.returncode is None
    child.terminate()
    await child.wait()
    await asyncio.sleep(0)
    assert not Path(f"/proc/{server.pid}").exists()


@pytest.mark.parametrize("seed", range(2))
@with_its_own
async def test_the_end_of_each_role_is_seen_whenever_the_fork_server_hangs(
    server: ForkServer, tmp_path: Path, impatient: None, seed: int
) -> None:
    """What a server that hangs was sent lies in its queue, the far ends of wires too: they never close."""
    chance = random.Random(seed)
    roles = [RoleProcess(f"role-{n}", ROLE, tmp_path / f"{n}.txt", spawner=server) for n in range(3)]
    wires: list[ConductorEnd[object]] = [ConductorEnd(role.name, msgspec.msgpack.Decoder(object)) for role in roles]
    await (await server.start(spawn(tmp_path, StubbornSpec(seconds=0.0)))).wait()  # it has imported its modules
    asyncio.get_running_loop().call_later(seed and chance.random() * 0.05, os.kill, server.pid, signal.SIGSTOP)
    for role, wire in zip(roles, wires, strict=True):
        await asyncio.sleep(chance.random() * 0.02)
        await role.start(StubbornSpec(), 1, (wire.far.fileno(),))
        await wire.open(role.ended)
    for role, wire in chance.sample(list(zip(roles, wires, strict=True)), 3):
        os.kill(role.pid, chance.choice([signal.SIGKILL, signal.SIGTERM]))
        with pytest.raises(RoleDied):
            await wire.receive("to end", 5)
        wire.close()
        await role.stop(0.0)


def no_room() -> int:
    raise BlockingIOError(errno.EAGAIN, "no room")


def test_where_there_is_no_room_for_a_fork_server_roles_are_started_afresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fork_server_role, "ROLES", ())
    monkeypatch.setattr("os.fork", no_room)
    monkeypatch.setattr("sys.executable", "/nowhere/python")
    before = len(os.listdir("/proc/self/fd")), signal.pthread_sigmask(signal.SIG_BLOCK, ())
    with fork_server() as spawner:
        assert spawner is FRESH
    assert (len(os.listdir("/proc/self/fd")), signal.pthread_sigmask(signal.SIG_BLOCK, ())) == before


def test_a_command_that_has_threads_is_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lock that another thread holds at that moment would stay locked in the copy."""
    monkeypatch.setattr(fork_server_role, "ROLES", ())
    monkeypatch.setattr("os.fork", no_room)
    done = threading.Event()
    thread = threading.Thread(target=done.wait)
    thread.start()
    try:
        with fork_server() as spawner:
            assert isinstance(spawner, ForkServer)
    finally:
        done.set()
        thread.join()


def test_beside_an_accelerator_roles_are_started_afresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_ACCELERATORS", (tmp_path,))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    with fork_server() as spawner:
        assert spawner is FRESH


@pytest.mark.parametrize(("told", "there"), [("", False), ("-1", False), ("0", True), ("1,0", True)])
def test_an_accelerator_that_is_hidden_counts_as_none(
    told: str, there: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_ACCELERATORS", (tmp_path,))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", told)
    assert accelerated() == there
