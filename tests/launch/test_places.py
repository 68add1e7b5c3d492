"""Places for ranks on other machines: only a machine that stays has some."""

from __future__ import annotations

import asyncio
from pathlib import Path

from stretto_app.extensions.remote_ranks import RemoteRanks
from stretto_cluster.messages import Leaving, MachineReady, RolePlace
from tests.cluster.hosting import hosted, introduction, joined_by_hand, until


def test_a_machine_that_leaves_or_is_dismissed_is_given_no_ranks(tmp_path: Path) -> None:
    """Its connection still stands."""

    async def work() -> None:
        ranks = RemoteRanks(5.0)
        async with hosted(tmp_path) as host:
            wires = []
            for number in range(3):
                wires.append(await joined_by_hand(host.address, introduction()))
                wires[-1].send(MachineReady(places=(RolePlace("a:1", "/t"),), model="/m", mailbox_folder="/w"))
                ranks.joined(await host.machine(number))
            stays, leaves, dismissed = host.joined
            assert [machine for machine, _ in ranks._free()] == [stays, leaves, dismissed]
            wires[1].send(Leaving(why="SIGTERM"))
            await until(leaves.leaving.done)
            dismissed.dismiss("stretto scale")
            assert [machine for machine, _ in ranks._free()] == [stays]
            assert [machine.lost.done() for machine in host.joined] == [False, False, False]
            for wire in wires:
                wire.cut()

    asyncio.run(asyncio.wait_for(work(), 30))
