"""The agent of a machine, over real sockets and with real processes.

- It mirrors model and weights, starts roles by order and tells how they end; their logs arrive in the run's folder;
  when it is over, no process, no file and no shared memory is left, however it ended.
- The newest version is pulled, whatever is published while another one travels.
- A conductor or an agent that was stopped for less than the lease loses nothing; for more, the roles end, and the agent
  joins again. A run that comes back at its address gets its machines back; another run there does not."""

import asyncio
import errno
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import pytest

from stretto.core.errors import HandshakeRefused, MachineLost, RecipeError, TornPublication
from stretto.core.records import Record
from stretto.engine.http.client import HttpEngine
from stretto.processes.tree import open_descriptors
from stretto_cluster.agent import Offer, run_agent
from stretto_cluster.machine import JoinedMachine, RemoteProcess
from stretto_cluster.scratch import own_folder
from stretto_cluster.weights.mirror import Mirror, Pulled
from tests.cluster.hosting import RUN, TOKEN, hosted, until
from tests.cluster.weights.serving import Road
from tests.launch.warm import children_of

ROLE = "tests.loop.toy_engine"


class ToySpec(Record, frozen=True):
    address: str
    model: str


class TextSpec(Record, frozen=True):
    text: str


JOINED = f"joined {RUN} with 1 engine(s), which work as soon as they have its weights"


@asynccontextmanager
async def agent(address: str, said: list[str] | None = None, **changes: Any) -> AsyncIterator[asyncio.Event]:
    """An agent in this process; gives the event with which it leaves."""
    leave = asyncio.Event()
    offer = Offer(address, TOKEN, patience=30.0, **changes)
    task = asyncio.create_task(run_agent(offer, (said if said is not None else []).append, leave))
    try:
        yield leave
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def toy(machine: JoinedMachine, home: Path, place: int = 0) -> tuple[RemoteProcess, HttpEngine]:
    """A toy engine in a place of a machine, which answers."""
    process = machine.role(place, f"toy-{place}", ROLE, {})
    address = machine.places[place].address
    await process.start(ToySpec(address, str(home / "newest")), 1)
    client = HttpEngine(f"toy-{place}", address)
    await answering(client)
    return process, client


async def answering(client: HttpEngine) -> None:
    async with asyncio.timeout(20):
        while True:
            try:
                assert (await client.health()).version == 7
                return
            except Exception:  # it starts
                await asyncio.sleep(0.05)


async def test_a_machine_joins_serves_and_leaves_without_a_trace(home: Path) -> None:
    async with hosted(home, published=3) as host, agent(host.address, count=2) as leave:
        machine = await host.machine()
        assert (Path(machine.model) / "config.json").read_text() == "{}"
        host.publish(4)
        assert await machine.until_mirrored(4, 10) == 4
        assert len(list(Path(machine.mailbox_folder).glob("*.weights"))) == 2
        process, client = await toy(machine, home)
        other, other_client = await toy(machine, home, place=1)
        log = home / "logs" / "toy-0.txt"
        await until(lambda: log.exists() and "listens at 127.0.0.1" in log.read_text())
        process.kill()
        assert await process.ended() == "was killed by SIGKILL"
        assert process.killed
        await process.start(ToySpec(machine.places[0].address, str(home / "newest")), 1)  # in its place again
        await answering(client)
        await other.stop(1.0)
        assert not other.running
        leave.set()
        assert await machine.leaving == "its agent was asked to end"
        assert process.running  # it waits until its engines are drained
        machine.dismiss("drained")
        assert "closed its connection" in await machine.lost
        await client.close()
        await other_client.close()


async def test_a_letter_that_lies_in_two_pieces_of_a_log_arrives_whole(home: Path) -> None:
    async with hosted(home) as host, agent(host.address):
        machine = await host.machine()
        for pad in ("", "x"):  # a piece has 64 KiB, an even number: with one of the two a letter lies across its end
            process, text = machine.role(0, f"teller{pad}", "tests.cluster.telling_role", {}), pad + "é" * 40_000
            await process.start(TextSpec(text), 1)
            await process.ended()
            await until(lambda log=process.log: log.read_text(errors="replace").endswith("\n"))
            assert text in process.log.read_text()


async def test_all_that_a_role_has_written_arrives_though_it_is_started_again_at_once(home: Path) -> None:
    async with hosted(home) as host, agent(host.address):
        machine = await host.machine()
        process, text = machine.role(0, "teller", "tests.cluster.telling_role", {"TIMES": "3"}), "a" * 100_000
        for _ in range(2):  # 300,000 bytes each, of which a heartbeat takes 65,536
            await process.start(TextSpec(text), 1)
            await process.ended()
        await until(lambda: process.log.read_text().count(text) == 6)


async def test_all_that_a_role_has_written_arrives_though_another_one_follows_in_its_place(home: Path) -> None:
    """As ranks change their places when one of their machines is lost."""
    async with hosted(home) as host, agent(host.address, count=2):
        machine = await host.machine()
        processes = list[RemoteProcess]()
        for place, number in ((0, 1), (1, 2), (0, 2), (1, 1)):
            name, text = f"teller-{number}", str(number) * 100_000
            process = machine.role(place, name, "tests.cluster.telling_role", {"TIMES": "3"})
            await process.start(TextSpec(text), 1)
            await process.ended()
            processes.append(process)
        for process, text in zip(processes, ("1" * 100_000, "2" * 100_000), strict=False):
            await until(lambda log=process.log, text=text: log.read_text().count(text) == 6)
        await asyncio.sleep(1.5)  # a heartbeat later nothing was sent twice
        assert [process.log.read_text().count(text[:1]) for process, text in zip(processes, "12", strict=False)] == [
            600_000,
            600_000,
        ]
        assert machine.stays


async def test_a_version_that_a_killed_role_held_for_its_server_is_freed(home: Path) -> None:
    async with hosted(home, published=3) as host, agent(host.address, count=2):
        machine = await host.machine()
        process, client = await toy(machine, home)
        memory, names = Path(machine.mailbox_folder), (Path(place.scratch).name for place in machine.places)
        mine, others = (memory / f"stretto-run-v{name}-000003.held" for name in names)
        for held in (mine, others):
            held.touch()
        process.kill()
        await process.ended()
        assert (mine.exists(), others.exists()) == (False, True)
        await client.close()


async def test_what_is_published_while_the_model_travels_is_pulled_and_nothing_older(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Version 3 is gone by the time at which the model is here."""

    class Slow(Mirror):
        async def fetch_model(self, folder: Path, *told: Any) -> None:
            await until(lambda: gone)
            await super().fetch_model(folder, *told)

    gone: list[bool] = []
    monkeypatch.setattr("stretto_cluster.agent.Mirror", Slow)
    said: list[str] = []
    async with hosted(home, published=3) as host, agent(host.address, said):
        await until(lambda: host.gate.machines)
        for version in (4, 5, 6):
            host.publish(version)
        await asyncio.sleep(0.1)  # the orders are there
        gone.append(True)
        machine = await host.machine()
        assert await machine.until_mirrored(6, 10) == 6
        assert [path.name for path in Path(machine.mailbox_folder).glob("*.weights")] == ["stretto-run-v000006.weights"]
        assert said == [JOINED]


async def test_a_version_that_is_gone_before_the_order_for_the_next_one_arrives_costs_nothing(home: Path) -> None:
    said: list[str] = []
    async with hosted(home, published=3) as host, agent(host.address, said):
        machine = await host.machine()
        await machine.until_mirrored(3, 10)
        for version in (5, 6):  # the mailbox has them, and 4 no more; the word of it is late
            host.publisher.publish(version, [])
        machine.publish(4)
        await asyncio.sleep(0.5)
        machine.publish(6)
        assert await machine.until_mirrored(6, 10) == 6
        assert not machine.lost.done()
        assert said == [JOINED]


async def test_a_version_that_does_not_arrive_whole_is_said_once_and_asked_for_again(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Torn(Mirror):
        async def pull(self, version: int) -> Pulled:
            pulls.append(version)
            if len(pulls) < 3:
                raise TornPublication("the checksum of the header does not fit")
            return await super().pull(version)

    pulls: list[int] = []
    monkeypatch.setattr("stretto_cluster.agent.Mirror", Torn)
    said: list[str] = []
    async with hosted(home, published=3) as host, agent(host.address, said):
        machine = await host.machine()
        assert await machine.until_mirrored(3, 10) == 3
    assert said == [JOINED, "version 3 is not here yet: the checksum of the header does not fit"]
    assert pulls == [3, 3, 3]


async def test_a_conductor_that_is_silent_for_longer_than_the_lease_is_left_and_joined_again(home: Path) -> None:
    said: list[str] = []
    async with (
        hosted(home, lease=1.0) as host,
        Road(host.address).opened() as road,
        agent(f"127.0.0.1:{road.address.split(':')[1]}", said),
    ):
        # The weights come from the host of the gate, which is that of the road.
        machine = await host.machine()
        process, client = await toy(machine, home)
        road.freeze()
        await asyncio.sleep(0.5)
        road.thaw()
        await asyncio.sleep(0.5)
        await answering(client)
        assert process.running  # silence within the lease costs nothing
        road.freeze()
        assert await machine.lost == "sent no heartbeat for 1 s"
        await until(lambda: len(said) == 2)
        assert said == [JOINED, "the run was lost: sent no heartbeat for 1 s; its roles were ended here"]
        assert not process.running
        road.thaw()
        road.cut()
        await toy(await host.machine(1), home)
        await client.close()


@contextmanager
def lone(address: str, before: tuple[str, ...] = ()) -> Iterator[subprocess.Popen[str]]:
    """An agent in a process of its own, killed at the end of the block."""
    command = [*before, sys.executable, "-m", "tests.cluster.lone_agent", address, TOKEN, ""]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def engines_of(pid: int) -> list[int]:
    return [child for child in children_of(pid) if ROLE.encode() in Path(f"/proc/{child}/cmdline").read_bytes()]


async def test_a_killed_agent_takes_its_roles_its_files_and_its_shared_memory_along(home: Path) -> None:
    async with hosted(home, published=3) as host:
        with lone(host.address) as process:
            machine = await host.machine()
            await machine.until_mirrored(3, 10)
            role, client = await toy(machine, home)
            (engine,) = engines_of(process.pid)
            assert Path(machine.model).is_dir()
        assert await machine.lost == "closed its connection"
        with pytest.raises(MachineLost):
            await role.ended()
        await until(lambda: not Path(f"/proc/{engine}").exists())
        await client.close()


def test_what_an_agent_left_that_was_killed_with_its_sweeper_is_removed_by_a_later_one(home: Path) -> None:
    """The folder of an agent that lives stays."""
    program = "from stretto_cluster.scratch import own_folder; print(own_folder()[0], flush=True); input()"
    command = [sys.executable, "-c", program]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as killed:
        assert killed.stdout is not None
        left = Path(killed.stdout.readline().strip())
        (left / "model").mkdir()
        living, lock = own_folder()
        assert left.exists()
        killed.kill()
    later, other = own_folder()
    assert not left.exists()
    assert living.exists()
    for folder, descriptor in ((living, lock), (later, other)):
        folder.rmdir()
        os.close(descriptor)


async def test_an_agent_that_is_stopped_goes_on_or_comes_back(home: Path) -> None:
    async with hosted(home, lease=1.0) as host:
        with lone(host.address) as process:
            machine = await host.machine()
            role, client = await toy(machine, home)
            os.kill(process.pid, signal.SIGSTOP)
            await asyncio.sleep(0.5)
            os.kill(process.pid, signal.SIGCONT)
            await asyncio.sleep(0.2)
            await answering(client)
            assert role.running
            os.kill(process.pid, signal.SIGSTOP)
            assert await machine.lost == "sent no heartbeat for 1 s"
            os.kill(process.pid, signal.SIGCONT)
            again = await host.machine(1)
            assert not engines_of(process.pid)
            await client.close()
            process.terminate()
            await again.leaving
            again.dismiss("drained")
            out, _ = await asyncio.to_thread(process.communicate)
        assert "over: drained" in out


async def test_a_run_that_comes_back_at_its_address_gets_its_machines_back_and_another_run_does_not(
    home: Path, tmp_path: Path
) -> None:
    said: list[str] = []
    async with hosted(home) as host:
        address = host.address
        task = asyncio.create_task(run_agent(Offer(address, TOKEN, patience=30.0), said.append, asyncio.Event()))
        await host.machine()
        for machine in host.gate.machines.values():
            machine._wire.cut()  # the conductor is killed
        await host.gate.close("")
    await asyncio.sleep(0.1)
    async with hosted(home, listen=address) as host:
        await host.machine()
        for machine in host.gate.machines.values():
            machine._wire.cut()
        await host.gate.close("")
    async with hosted(home, listen=address, run="second-99") as host:
        with pytest.raises(HandshakeRefused, match=f"you have joined run {RUN} before, and this is run second-99"):
            await task


async def test_a_second_gate_at_the_address_of_a_run_is_refused(home: Path) -> None:
    async with hosted(home) as host:
        with pytest.raises(RecipeError, match="Address already in use"):
            await host.gate.open(host.address)


@pytest.mark.parametrize("address", ["127.0.0.1:1", "nobody.invalid:80"])
async def test_an_address_at_which_nobody_answers_is_named_after_the_patience(home: Path, address: str) -> None:
    said: list[str] = []
    with pytest.raises(MachineLost, match=rf"{address} was not joined in 0 s: {address} does not answer \("):
        await run_agent(Offer(address, TOKEN, patience=0.0), said.append, asyncio.Event())


async def test_a_listener_that_says_nothing_is_named_in_time(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stretto_cluster.agent._HANDSHAKE_SECONDS", 0.2)
    silent: list[asyncio.StreamWriter] = []
    server = await asyncio.start_server(lambda reader, writer: silent.append(writer), "127.0.0.1", 0)
    address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    with pytest.raises(MachineLost, match=r"waited 0\.2 s for the run at .* to prove the token"):
        await run_agent(Offer(address, TOKEN, patience=0.0), print, asyncio.Event())
    server.close()
    for writer in silent:
        writer.transport.abort()


async def test_an_address_that_is_not_of_this_machine_is_refused(home: Path) -> None:
    async with hosted(home) as host:
        with pytest.raises(RecipeError, match=r"--host 192\.0\.2\.1: Cannot assign requested address"):
            await run_agent(Offer(host.address, TOKEN, patience=5.0, advertised="192.0.2.1"), print, asyncio.Event())


async def test_a_machine_that_cannot_start_its_sweeper_leaves_no_memory_and_no_lock(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It asks again every second, so that what one attempt leaves would add up."""
    made: list[Path] = []

    def without_room(folder: Path, memory: Path) -> subprocess.Popen[bytes]:
        made.extend((folder, memory))
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    monkeypatch.setattr("stretto_cluster.agent.sweeper", without_room)
    async with hosted(home) as host:
        with pytest.raises(MachineLost, match="temporarily unavailable"):
            await run_agent(Offer(host.address, TOKEN, patience=0.0), print, asyncio.Event())
    held = {str(Path(f"/proc/self/fd/{number}").resolve()) for number in open_descriptors()}
    assert len(made) == 2
    assert not [one for one in made if one.exists() or any(name.startswith(str(one)) for name in held)]
