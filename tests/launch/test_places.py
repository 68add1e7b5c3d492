"""Places for ranks on other machines: only a machine that stays has some, and ranks that divide matrices or tokens are
of one machine."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from stretto.trainer.config import TrainerConfig
from stretto_app.extensions.remote_ranks import RemoteRanks, neighbours
from stretto_cluster.messages import Leaving, MachineReady, RolePlace
from tests.cluster.hosting import hosted, introduction, joined_by_hand, until


async def test_a_machine_that_leaves_or_is_dismissed_is_given_no_ranks(tmp_path: Path) -> None:
    """Its connection still stands."""
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


@given(st.lists(st.sampled_from("abc"), max_size=30), st.integers(1, 5))
def test_a_group_of_ranks_is_of_one_machine(hosts: list[str], together: int) -> None:
    """And no place that could be in one is left out."""
    taken = neighbours(hosts, together)
    groups = [taken[first : first + together] for first in range(0, len(taken), together)]
    assert all(len({hosts[place] for place in group}) == 1 for group in groups)
    assert all(len(group) == together for group in groups)
    assert len(set(taken)) == len(taken) == sum(hosts.count(host) // together * together for host in "abc")


def test_a_group_over_two_machines_is_refused() -> None:
    TrainerConfig(ranks=16, remote_ranks=8, tensor_parallel=4, context_parallel=2)
    with pytest.raises(ValidationError, match=r"remote_ranks = 10 is no multiple of .* = 8: .* remote_ranks = 8"):
        TrainerConfig(ranks=16, remote_ranks=10, tensor_parallel=4, context_parallel=2)
