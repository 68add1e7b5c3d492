"""Whom a run believes, and what it makes of another machine's clock, over real sockets.

- With TLS, who has no certificate of the run's authority gets no word out of it.
- The clock of a machine is known to the run, however far it is ahead."""

import asyncio
import shutil
import ssl
import subprocess
from pathlib import Path

import msgspec
import pytest

from stretto.core.errors import HandshakeRefused
from stretto.core.records import Record
from stretto_cluster.agent import Offer, run_agent
from stretto_cluster.handshake import call
from stretto_cluster.messages import AGENTS_TLS
from tests.certificates import authority
from tests.cluster.hosting import TOKEN, hosted, introduction, joined_by_hand, until
from tests.cluster.test_agent import agent, lone, toy
from tests.cluster.weights.serving import Road

# ── TLS ──────────────────────────────────────────────────────────────────────────────────────────────


async def test_with_tls_only_a_certificate_of_the_runs_authority_lets_a_machine_in(home: Path) -> None:
    ours, theirs = str(authority(home / "ours")), str(authority(home / "theirs"))
    async with hosted(home, tls=ours, published=3) as host:
        with pytest.raises(HandshakeRefused, match="does not accept our TLS"):
            await run_agent(Offer(host.address, TOKEN, tls=theirs, patience=0.0), print, asyncio.Event())
        with pytest.raises(HandshakeRefused, match="speaks TLS, and this machine shows no certificate"):
            await run_agent(Offer(host.address, TOKEN, patience=60.0), print, asyncio.Event())  # at once
        with pytest.raises(HandshakeRefused, match="the token is wrong"):
            await joined_by_hand(host.address, introduction(), "another", tls=ours)
        assert host.gate.machines == {}
        async with agent(host.address, tls=ours):
            machine = await host.machine()
            assert await machine.until_mirrored(3, 10) == 3


class SecretSpec(Record, frozen=True):
    tls: str
    address: str = "a:1"


async def test_a_role_gets_the_folder_of_certificates_of_its_own_machine(home: Path) -> None:
    """The run's is at another path there."""
    ours = authority(home / "ours")
    elsewhere = str(shutil.copytree(ours, home / "elsewhere"))
    async with hosted(home, tls=str(ours)) as host, agent(host.address, tls=elsewhere):
        machine = await host.machine()
        process = machine.role(0, "teller", "tests.cluster.telling_role", {})
        await process.start(SecretSpec(AGENTS_TLS), 1)
        await process.ended()
        assert msgspec.json.encode(SecretSpec(elsewhere)).decode() in (home / "logs" / "teller.txt").read_text()


async def test_a_client_without_a_certificate_gets_no_word_out_of_a_gate_with_tls(home: Path) -> None:
    ours = str(authority(home / "ours"))
    bare = ssl.create_default_context(cafile=f"{ours}/ca.pem")
    bare.check_hostname = False
    async with hosted(home, tls=ours) as host:
        name, port = host.address.split(":")
        reader, writer = await asyncio.open_connection(name, int(port), ssl=bare)
        said = msgspec.msgpack.encode(introduction())
        with pytest.raises(HandshakeRefused):  # it has the token, and sends it to nobody
            await call(reader, writer, TOKEN, said, peer="the run", seconds=5)
        writer.transport.abort()
        assert host.gate.machines == {}


# ── clocks ───────────────────────────────────────────────────────────────────────────────────────────


async def test_the_clock_of_a_machine_is_known_to_the_run_by_the_shortest_round_trip(home: Path) -> None:
    """The road takes 50 ms each way; the clock is the same, so the offset is that of the road's two halves."""
    async with hosted(home) as host, Road(host.address, delay=0.05).opened() as road, agent(road.address):
        role, client = await toy(await host.machine(), home)
        await asyncio.sleep(1.2)
        assert abs(role.clock_offset) < 0.05
        await client.close()


def has_time_namespaces() -> bool:
    command = ["unshare", "--time", "--monotonic", "5000", "true"]
    try:
        return subprocess.run(command, capture_output=True).returncode == 0
    except OSError:
        return False


@pytest.mark.skipif(not has_time_namespaces(), reason="this kernel, or this user, has no time namespaces")
async def test_a_machine_whose_clock_is_far_ahead_is_understood(home: Path) -> None:
    async with hosted(home) as host:
        with lone(host.address, before=("unshare", "--time", "--monotonic", "5000")):
            machine = await host.machine()
            await until(lambda: abs(machine.clock_offset + 5000) < 0.5)
        await machine.lost
