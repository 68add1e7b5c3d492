"""The gate of a run, over real sockets.

- Who has another token, another run's, another release, or nothing to offer is refused, and told why; a refusal is one
  sentence for the run, however often it is asked for.
- Strangers (a browser, a port scanner, half a handshake, a thousand callers that say nothing) cost a bounded number of
  connections for a bounded time, and machines join beside them.
- A machine that says what no agent says is lost, with what it said; nothing else is.
- A machine that falls silent is lost when its lease is over, one whose words are late is not.
- What a machine sends of its roles' logs fills no disk: each is kept up to a bound, and says so.
- What comes late of an earlier start of a role is not taken for the present one."""

import asyncio
import math
import socket
from pathlib import Path
from typing import Any

import msgspec
import pytest

from stretto import __version__
from stretto.core.errors import DeadlineExceeded, HandshakeRefused, MachineLost, RoleDied
from stretto.core.frames import frame
from stretto.core.records import Record
from stretto_cluster import machine as machine_module
from stretto_cluster import wire as wire_module
from stretto_cluster.machine import JoinedMachine
from stretto_cluster.messages import (
    Beat,
    Dismissed,
    Echo,
    Leaving,
    LogText,
    MachineReady,
    Mirrored,
    RoleEnded,
    RoleStarted,
    RunTerms,
    Scale,
    StartRole,
)
from stretto_cluster.wire import Wire
from tests.cluster.hosting import TOKEN, hosted, introduction, joined, joined_by_hand, ready_at, until
from tests.cluster.weights.serving import Road

READY = ready_at("127.0.0.1:1")


class Spec(Record, frozen=True):
    name: str = "toy"


@pytest.mark.parametrize(
    ("said", "token", "why"),
    [
        (introduction(), "another token", "the token is wrong"),
        (introduction(), "T" * 64, "the token is wrong"),
        (introduction(run="other-99"), TOKEN, "you have joined run other-99 before, and this is run first-0a1b2c3d"),
        (introduction(release="0.0.1"), TOKEN, f"you have stretto 0.0.1, and the run has {__version__}"),
        (introduction(kind="oracle"), TOKEN, "the run takes engines, and no oracle"),
        (introduction(count=0), TOKEN, "a machine has 1 to 1024 places, not 0"),
        (introduction(count=10**9), TOKEN, "a machine has 1 to 1024 places"),
        (Spec(), TOKEN, "the introduction cannot be read"),
    ],
)
async def test_who_is_not_of_the_run_is_told_why(tmp_path: Path, said: msgspec.Struct, token: str, why: str) -> None:
    async with hosted(tmp_path) as host:
        with pytest.raises(HandshakeRefused, match="refused: ") as refused:
            await joined_by_hand(host.address, said, token)
        assert why in str(refused.value)
        await until(lambda: host.said)
        assert host.said[0].startswith("turned away at the gate: 127.0.0.1:")
        assert host.gate.machines == {}


async def test_refusals_without_end_are_a_few_sentences_for_the_run(tmp_path: Path) -> None:
    async with hosted(tmp_path) as host:
        for _ in range(50):
            with pytest.raises(HandshakeRefused):
                await joined_by_hand(host.address, introduction(), "another")
        assert len(host.said) == 1


@pytest.mark.parametrize(
    "said",
    [
        b"",
        b"\x05\x00",
        b"GET / HTTP/1.1\r\nhost: a\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00",
        frame(Spec()),
        b"\xff" * 99_999,
    ],
    ids=["nothing", "half a length", "a browser", "TLS", "another message", "garbage"],
)
async def test_a_stranger_costs_nothing_but_its_connection(tmp_path: Path, said: bytes) -> None:
    async with hosted(tmp_path) as host:
        wire = await joined_by_hand(host.address, introduction())
        reader, writer = await asyncio.open_connection(*host.address.split(":"))
        writer.write(said)
        writer.write_eof()
        assert len(await reader.read()) < 200  # and then the gate has closed
        wire.send(Beat(sent=1.0, clock_offset=0.0))
        assert isinstance(await wire.receive(), RunTerms)
        assert isinstance(await wire.receive(), Echo)
        wire.cut()
        writer.close()


async def test_a_crowd_that_says_nothing_keeps_no_machine_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The places of strangers are few here, so that the crowd need not be large."""
    monkeypatch.setattr(wire_module, "_STRANGERS", 8)

    async def closed(reader: asyncio.StreamReader) -> bool:
        try:
            async with asyncio.timeout(0.05):
                return await reader.read(1) == b""
        except ConnectionError:
            return True
        except TimeoutError:
            return False

    async with hosted(tmp_path) as host:
        crowd = [await asyncio.open_connection(*host.address.split(":")) for _ in range(200)]
        wire = await joined_by_hand(host.address, introduction())
        assert isinstance(await wire.receive(), RunTerms)
        assert len([reader for reader, _ in crowd if not await closed(reader)]) <= 8
        for _, writer in crowd:
            writer.transport.abort()
        wire.cut()


async def test_callers_that_come_in_one_turn_of_the_loop_take_no_more_places_than_there_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No task of those who are pushed out has run by then."""
    monkeypatch.setattr(wire_module, "_STRANGERS", 8)
    async with hosted(tmp_path) as host:
        ends = [socket.socketpair() for _ in range(40)]
        streams = [await asyncio.open_unix_connection(sock=ours) for ours, _ in ends]
        greet = host.gate._greeting(None)
        for reader, writer in streams:
            greet(reader, writer)
        left = [writer for _, writer in streams if not writer.transport.is_closing()]
        assert left == [writer for _, writer in streams[-8:]]
        for _, theirs in ends:
            theirs.close()
        await until(lambda: not host.gate._callers)


async def test_half_a_handshake_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire_module, "_HANDSHAKE_SECONDS", 0.2)
    async with hosted(tmp_path) as host:
        with socket.create_connection(("127.0.0.1", int(host.address.split(":")[1]))) as caller:
            caller.settimeout(10)
            caller.sendall(b"\x40\x00\x00\x00half")
            assert await asyncio.to_thread(caller.recv, 1) == b""
        assert host.said == []


@pytest.mark.parametrize(
    ("said", "how"),
    [
        ([RoleEnded(place=7, turn=1, how="gone", killed=False)], "place 7, in which nothing was started"),
        ([RoleStarted(place=-1, turn=1)], "place -1, in which nothing was started"),
        ([LogText(name="trainer", text="boo")], "the log of 'trainer', which it does not run"),
        ([LogText(name="../../etc/passwd", text="boo")], "which it does not run"),
        ([READY, READY], "it has offered 1, once"),
        ([MachineReady(places=READY.places * 3, model="", mailbox_folder="")], "3 places; it has offered 1, once"),
        ([LogText(name="toy", text="x" * (2 << 20))], "a frame of 2,097,"),
        ([Spec()], "sent what no agent sends"),
        ([Mirrored(version=3, size=1, seconds=math.nan)], "sent what no agent sends (Expected `float`"),
        ([Mirrored(version=3, size=1, seconds=math.inf)], "sent what no agent sends (Expected `float`"),
        ([Mirrored(version=3, size=2**63, seconds=0.1)], "sent what no agent sends (Expected `int`"),
        ([Mirrored(version=2**63, size=1, seconds=0.1)], "sent what no agent sends (Expected `int`"),
        ([Beat(sent=1.0, clock_offset=math.nan)], "sent what no agent sends (Expected `float`"),
        ([Beat(sent=1.0, clock_offset=-math.inf)], "sent what no agent sends (Expected `float`"),
    ],
)
async def test_a_machine_that_says_what_no_agent_says_is_lost_with_what_it_said(
    tmp_path: Path, said: list[msgspec.Struct], how: str
) -> None:
    async with hosted(tmp_path) as host:
        other = await joined_by_hand(host.address, introduction())
        wire = await joined_by_hand(host.address, introduction(host="liar"))
        await until(lambda: len(host.gate.machines) == 2)
        (lost,) = [machine.lost for machine in host.gate.machines.values() if machine.host == "liar"]
        for message in said:
            wire.send(message)
        assert how in await lost
        assert await wire.receive() is None or await wire.receive() is None
        await until(lambda: [machine.host for machine in host.gate.machines.values()] == ["node-7"])
        assert list((tmp_path / "logs").iterdir()) == []
        other.cut()
        wire.cut()


async def test_a_machine_that_falls_silent_is_lost_when_its_lease_is_over_and_not_before(tmp_path: Path) -> None:
    async with hosted(tmp_path, lease=1.0) as host, Road(host.address).opened() as road:
        wire = await joined_by_hand(road.address, introduction())
        wire.send(READY)
        machine = await host.machine()
        road.freeze()  # half-open: both ends stand
        began = asyncio.get_running_loop().time()
        await asyncio.sleep(0.4)
        road.thaw()
        wire.send(Beat(sent=1.0, clock_offset=0.0))
        await asyncio.sleep(0.4)
        assert not machine.lost.done()
        road.freeze()
        assert await machine.lost == "sent no heartbeat for 1 s"
        assert asyncio.get_running_loop().time() - began > 1.4
        wire.cut()


async def ordered(process: Any, wire: Wire[Any]) -> tuple[asyncio.Task[None], StartRole]:
    """The start of a role, and the order that its agent gets."""
    starting = asyncio.create_task(process.start(Spec(), 1))
    while not isinstance(order := await wire.receive(), StartRole):
        pass
    return starting, order


async def started(machine: JoinedMachine, wire: Wire[Any]) -> tuple[Any, StartRole]:
    """A role that its agent has started; and the order."""
    starting, order = await ordered(process := machine.role(0, "toy", "module", {}), wire)
    wire.send(RoleStarted(place=0, turn=order.turn))
    await starting
    return process, order


async def test_the_late_end_of_an_earlier_role_is_not_taken_for_that_of_the_present_one(tmp_path: Path) -> None:
    async with joined(tmp_path) as (_, machine, wire):
        process, first = await started(machine, wire)
        starting, second = await ordered(process, wire)
        end = RoleEnded(place=0, turn=first.turn, how="was killed by SIGKILL", killed=True)
        for message in (end, RoleStarted(place=0, turn=first.turn), end):  # late, reordered, twice
            wire.send(message)
        wire.send(RoleStarted(place=0, turn=second.turn))
        await starting
        wire.send(LogText(name="toy", text="still here\n"))
        await until(lambda: "still here" in (tmp_path / "logs" / "toy.txt").read_text())
        assert process.running
        wire.send(RoleEnded(place=0, turn=second.turn, how="ended with exit code 3", killed=False))
        assert await process.ended() == "ended with exit code 3"


async def test_the_late_end_of_a_role_is_not_taken_for_that_of_another_in_its_place(tmp_path: Path) -> None:
    async with joined(tmp_path) as (_, machine, wire):
        _, first = await started(machine, wire)
        process, second = await started(machine, wire)
        wire.send(RoleEnded(place=0, turn=first.turn, how="was killed by SIGKILL", killed=True))
        wire.send(RoleEnded(place=0, turn=second.turn, how="ended with exit code 3", killed=False))
        assert await process.ended() == "ended with exit code 3"


async def test_a_role_that_cannot_start_is_named_and_one_whose_machine_goes_is_lost_with_it(tmp_path: Path) -> None:
    async with joined(tmp_path) as (_, machine, wire):
        process = machine.role(0, "toy", "module", {})
        starting, order = await ordered(process, wire)
        wire.send(RoleEnded(place=0, turn=order.turn, how="no room for a process", killed=False))
        with pytest.raises(RoleDied, match="toy cannot be started: no room for a process"):
            await starting
        starting = asyncio.create_task(process.start(Spec(), 1))
        await asyncio.sleep(0.05)
        wire.cut()
        with pytest.raises(MachineLost, match="node-7-1 closed its connection"):
            await starting


async def test_a_log_that_the_disk_does_not_take_costs_its_lines_alone(tmp_path: Path) -> None:
    async with joined(tmp_path) as (_, machine, wire):
        (tmp_path / "logs" / "toy.txt").symlink_to("/dev/full")
        process, _ = await started(machine, wire)
        wire.send(LogText(name="toy", text="x" * 100_000))
        wire.send(Mirrored(version=3, size=1, seconds=0.1))
        assert await machine.until_mirrored(3, 10) == 3
        assert process.running


async def test_a_log_is_kept_up_to_a_bound_and_says_so_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_module, "_MOST_LOG", 1000)
    async with joined(tmp_path) as (_, machine, wire):
        await started(machine, wire)
        for letter in "abcdef":
            wire.send(LogText(name="toy", text=letter * 400))
        wire.send(Mirrored(version=3, size=1, seconds=0.1))
        await machine.until_mirrored(3, 10)
        kept = (tmp_path / "logs" / "toy.txt").read_text()
        said = "\n(its machine has more of this log: 1,000 bytes are kept here)\n"
        assert kept == "a" * 400 + "b" * 400 + "c" * 400 + said


async def test_a_version_that_never_comes_is_waited_for_by_name_a_lost_machine_ends_the_wait(tmp_path: Path) -> None:
    async with joined(tmp_path) as (_, machine, wire):
        with pytest.raises(DeadlineExceeded, match=r"waited 0\.1 s for node-7-1 to pull version 5"):
            await machine.until_mirrored(5, 0.1)
        wire.cut()
        with pytest.raises(MachineLost):
            await machine.until_mirrored(5, 10)


async def test_a_machine_that_wants_to_leave_before_it_is_ready_is_let_go(tmp_path: Path) -> None:
    async with hosted(tmp_path) as host:
        wire = await joined_by_hand(host.address, introduction())
        wire.send(Leaving(why="SIGTERM"))
        assert isinstance(await wire.receive(), RunTerms)
        assert await wire.receive() == Dismissed(why="SIGTERM")
        assert host.joined == []
        wire.cut()


async def test_a_command_gets_its_answer_and_one_of_another_release_is_refused(tmp_path: Path) -> None:
    async with hosted(tmp_path) as host:
        wire = await joined_by_hand(host.address, Scale(engines=3, release=__version__))
        assert b"3 engines" in await wire._reader.read()
        wire.cut()
        assert host.scaled == [3]
        with pytest.raises(HandshakeRefused, match="install the same on every machine"):
            await joined_by_hand(host.address, Scale(engines=3, release="0.0.1"))
