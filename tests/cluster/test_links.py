"""A machine behind a link that loses packets, lets them overtake each other and brings some twice, over the TCP of the
kernel (`tests.cluster.link`): it joins, has every version whole, and its engine's completions come whole and once.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from stretto.core.records import GenerateRequest, Sampling
from stretto.engine.http.client import HttpEngine
from stretto.weights.folder import path_of
from tests.cluster.hosting import MAILBOX, hosted
from tests.cluster.link import Conditions, available, link
from tests.cluster.test_agent import lone, now, toy
from tests.loop.toy_engine import ANSWER

pytestmark = pytest.mark.skipif(not available(), reason="this machine, or this user, has no TUN devices")

CONDITIONS = Conditions(delay=0.01, jitter=0.005, loss=0.05, repeats=0.02)


def test_over_a_link_that_loses_packets_and_is_cut_for_a_moment_all_comes_whole_and_once(home: Path) -> None:
    async def work() -> None:
        with link(seed=1, conditions=CONDITIONS) as ours:
            async with hosted(home, lease=20.0, listen=f"{ours.address}:0") as host:
                process = lone(host.address, home, before=ours.there)
                try:
                    machine = await host.machine()
                    mirrored = Path(machine.mailbox_folder)
                    for version in (4, 5, 6):
                        host.publish(version, size=100_000)
                        assert await machine.until_mirrored(version, 30) == version
                        came, published = (path_of(MAILBOX, at, version) for at in (mirrored, home / "mailbox"))
                        assert came.read_bytes() == published.read_bytes()
                    _, client = await toy(machine, home)
                    answered = [await asked(client, number) for number in range(20)]
                    lost = ours.become(Conditions(cut=True)).lost
                    waiting = asyncio.create_task(asked(client, 20))
                    await asyncio.sleep(0.5)
                    assert not waiting.done()
                    ours.become(CONDITIONS)
                    assert [*answered, await waiting] == [1] * 21
                    assert lost > 20  # of 900 packets and more: the weights alone
                    assert host.gate.machines
                    await client.close()
                finally:
                    process.kill()
                    process.communicate()
                await machine.lost

    now(work())


async def asked(client: HttpEngine, number: int) -> int:
    """How many completions come of one request for one."""
    request = GenerateRequest(f"0.{number}.0", (ANSWER,), (1,), Sampling(max_tokens=4))
    return len([completion async for completion in client.generate(request)])
