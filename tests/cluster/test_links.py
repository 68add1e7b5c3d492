"""A machine behind a link that loses packets, lets them overtake each other and brings some twice, over the TCP of the
kernel (`tests.cluster.link`): it joins, has every version whole, and its engine's completions come whole and once.
A connection to one that is out of reach is given up, whether or not the request had come there."""

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from stretto.core.errors import EngineLost
from stretto.core.records import GenerateRequest, Sampling
from stretto.engine.http.client import HttpEngine
from stretto.engine.http.connections import Connections
from stretto.weights.folder import path_of
from tests.cluster.hosting import MAILBOX, hosted
from tests.cluster.link import Conditions, Link, available, link
from tests.cluster.test_agent import lone, toy
from tests.loop.toy_engine import ANSWER

pytestmark = pytest.mark.skipif(not available(), reason="this machine, or this user, has no TUN devices")

CONDITIONS = Conditions(delay=0.01, jitter=0.005, loss=0.05, repeats=0.02)

#: Takes one request, says so, and never answers.
SILENT = """
import socket, sys, time
server = socket.create_server((sys.argv[1], 0))
print(server.getsockname()[1], flush=True)
connection, _ = server.accept()
print(len(connection.recv(1 << 16)), flush=True)
time.sleep(600)
"""


async def test_over_a_link_that_loses_packets_and_is_cut_for_a_moment_all_comes_whole_and_once(home: Path) -> None:
    with link(seed=1, conditions=CONDITIONS) as ours:
        async with hosted(home, lease=20.0, listen=f"{ours.address}:0") as host:
            with lone(host.address, before=ours.there):
                machine = await host.machine()
                mirrored = Path(machine.mailbox_folder)
                for version in (4, 5):
                    host.publish(version, size=100_000)
                    assert await machine.until_mirrored(version, 30) == version
                    came, published = (path_of(MAILBOX, at, version) for at in (mirrored, home / "mailbox"))
                    assert came.read_bytes() == published.read_bytes()
                _, client = await toy(machine, home)
                answered = [await asked(client, number) for number in range(8)]
                lost = ours.become(Conditions(cut=True)).lost
                waiting = asyncio.create_task(asked(client, 8))
                await asyncio.sleep(0.5)
                assert not waiting.done()
                ours.become(CONDITIONS)
                assert [*answered, await waiting] == [1] * 9
                assert lost > 10  # of 600 packets and more: the weights alone
                assert host.gate.machines
                await client.close()
            await machine.lost


async def asked(client: HttpEngine, number: int) -> int:
    """How many completions come of one request for one."""
    request = GenerateRequest(f"0.{number}.0", (ANSWER,), (1,), Sampling(max_tokens=4))
    return len([completion async for completion in client.generate(request)])


@pytest.mark.parametrize("came", [True, False], ids=["the request came", "the request is lost"])
async def test_a_connection_is_given_up_when_the_other_machine_is_out_of_reach(came: bool) -> None:
    with link(seed=1) as ours, silent(ours) as server:
        assert server.stdout is not None
        connections = Connections("engine-0", f"{ours.theirs}:{server.stdout.readline().strip()}", silent=2)
        async with connections.one() as connection:
            if came:
                connection.send("POST", "/generate", b"")
                assert await asyncio.to_thread(server.stdout.readline)
            ours.become(Conditions(cut=True))
            if not came:
                connection.send("POST", "/generate", b"")
            with pytest.raises(EngineLost, match="broke off"):
                await connection.read()


@contextmanager
def silent(ours: Link) -> Iterator[subprocess.Popen[str]]:
    words = [*ours.there, sys.executable, "-c", SILENT, ours.theirs]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as server:
        try:
            yield server
        finally:
            server.kill()
