"""Trainer ranks on machines that have joined for this purpose (implements `loop.trainer_link.StartRanks`)."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Sequence

from stretto.core.deadlines import deadline
from stretto.core.errors import DeadlineExceeded, MachineLost, RoleDied, several
from stretto.core.tasks import gather_or_cancel, gather_to_the_end
from stretto.trainer.messages import RanksAwaited, TrainerSpec
from stretto_cluster.machine import JoinedMachine, RemoteProcess
from stretto_cluster.messages import AGENTS_TLS
from stretto_cluster.ranks.messages import RANK_ROLE, RankSpec, environment_of


def neighbours(hosts: Sequence[str], together: int) -> list[int]:
    """Order in which ranks take places, as indices. `hosts`: host of each place. Places of one host follow each other;
    those left over from groups of `together` on one host are left out.

    >>> neighbours(["a", "b", "a", "b", "a"], 2)
    [0, 2, 1, 3]
    """
    found = defaultdict[str, list[int]](list)
    for place, host in enumerate(hosts):
        found[host].append(place)
    return [place for own in found.values() for place in own[: len(own) // together * together]]


class RemoteRanks:
    """Places for trainer ranks (one process each) on joined machines, and the ranks in them. Places are taken machine
    by machine, in the order of joining."""

    def __init__(self, seconds: float, together: int = 1) -> None:
        """Start without any place; `joined` adds those of a machine. `seconds`: longest wait for places. `together`:
        number of consecutive ranks that must be on one machine."""
        self._seconds, self._together = seconds, together
        self._machines: list[JoinedMachine] = []
        self._ranks: list[RemoteProcess] = []
        self._came = asyncio.Event()

    def joined(self, machine: JoinedMachine) -> None:
        """Add a machine that offers places for ranks. Waiting calls see them."""
        self._machines.append(machine)
        self._came.set()

    async def __call__(self, awaited: RanksAwaited, spec: TrainerSpec) -> None:
        """Stop the earlier ranks, and start the `awaited` ones on joined machines, for which it waits. `spec`: that of
        the trainer.

        Raises:
            RoleDied: too few machines joined in time, one was lost, or a rank did not start in time.
        """
        await gather_to_the_end(*(rank.stop(0.0) for rank in self._ranks))
        self._ranks = []
        places = await self._places(len(awaited.ranks))
        starts = []
        for number, (machine, place) in zip(awaited.ranks, places, strict=False):
            rank = machine.role(place, f"trainer-rank-{number}", RANK_ROLE, environment_of(awaited))
            self._ranks.append(rank)
            tls = AGENTS_TLS if spec.tls else ""
            told = RankSpec.of(awaited, number, spec, model=machine.model, reference=machine.reference, tls=tls)
            starts.append(rank.start(told, spec.threads))
        try:
            await gather_or_cancel(*starts)
        except (MachineLost, DeadlineExceeded) as loss:
            raise RoleDied("trainer", f"lost a machine of its ranks: {loss}", spec.log) from None

    async def _places(self, count: int) -> list[tuple[JoinedMachine, int]]:
        """Wait until there are `count` places on machines, and return them (at least as many) with their machines.
        Raises RoleDied if too few machines have joined in time."""
        try:
            async with deadline("conductor", f"places for {several(count, 'rank')} on other machines", self._seconds):
                while len(places := self._free()) < count:
                    self._came.clear()
                    await self._came.wait()
        except DeadlineExceeded as late:
            found = f"has {len(self._free())} of {count} places for its ranks on other machines ({late})"
            if self._together > 1:
                found += f", in groups of {self._together} on one machine each (tensor_parallel * context_parallel)"
            raise RoleDied("trainer", f"{found}; start them: stretto rank --join") from None
        return places

    def _free(self) -> list[tuple[JoinedMachine, int]]:
        self._machines = [machine for machine in self._machines if machine.stays]
        places = [(machine, place) for machine in self._machines for place in range(len(machine.places))]
        return [places[at] for at in neighbours([machine.host for machine, _ in places], self._together)]
