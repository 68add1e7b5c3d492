"""Agents on a Ray cluster, without Ray.

- An order that fails costs no agent that is there: the placer says why, and takes the next one.
- A placer that dies is replaced, and places the agents of the last order that was carried out; the run ends, by
  `RoleDied`, only after as many failures as a role is allowed.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from stretto.cluster.placing import AgentsPlaced, PlaceAgents, RayPlacerSpec, Refused
from stretto.cluster.ray_placer import reply
from stretto.core.errors import Problem, RecipeError, RoleDied, RoleFailed
from stretto.launch.assemble.ray_agents import RayAgents
from stretto.loop.config import DeadlinesConfig


def in_a_loop(test: Callable[[Path], Awaitable[None]]) -> Callable[[Path], None]:
    """A test that awaits."""

    @functools.wraps(test)
    def run(tmp_path: Path) -> None:
        async def bounded() -> None:
            await asyncio.wait_for(test(tmp_path), 60)

        asyncio.run(bounded())

    return run


class Placer:
    """A conductor's agents with `fake_placer` as their placer."""

    def __init__(self, folder: Path, *script: str) -> None:
        self._script = folder / "script"
        self._script.write_text("\n".join(script))
        spec = RayPlacerSpec(run="run", address=str(self._script), join=(), cpus=1, gpus=0, seconds=20.0)
        limits = DeadlinesConfig(engine_restarts=2)
        self.said: list[str] = []
        module = "tests.cluster.fake_placer"
        log = folder / "ray.txt"
        self.agents = RayAgents(limits, log, spec, "token", self.said.append, module=module, pause=0.01)

    @property
    def orders(self) -> list[int]:
        """The engines of each order so far."""
        done = Path(f"{self._script}.orders")
        return [int(word) for word in done.read_text().split()] if done.exists() else []

    async def supervised(self, orders: int) -> None:
        """Supervise until so many orders have been given."""
        watch = asyncio.ensure_future(self.agents.supervise())
        try:
            async with asyncio.timeout(60):
                while not watch.done() and not (len(self.orders) >= orders and "placed" in self.said[-1]):
                    await asyncio.sleep(0.02)
            if watch.done():
                watch.result()
        finally:
            watch.cancel()


@in_a_loop
async def test_an_order_that_the_cluster_cannot_carry_out_is_refused_and_the_placer_goes_on(tmp_path: Path) -> None:
    placer = Placer(tmp_path, "placed", "refused", "broken", "placed")
    try:
        await placer.agents.place(2, 0)
        pid = placer.agents._process.pid
        with pytest.raises(RecipeError, match="no room"):
            await placer.agents.place(100, 0)
        with pytest.raises(RoleFailed, match="RayActorError: it is dead"):
            await placer.agents.place(3, 0)
        await placer.agents.place(4, 0)
        assert placer.agents._process.pid == pid
    finally:
        await placer.agents.close()
    assert placer.orders == [2, 100, 3, 4]


@in_a_loop
async def test_a_new_placer_gets_the_last_order_that_was_carried_out(tmp_path: Path) -> None:
    placer = Placer(tmp_path, "placed", "refused", "dies", "placed")
    try:
        await placer.agents.place(2, 0)
        with pytest.raises(RecipeError):
            await placer.agents.place(100, 0)
        with pytest.raises(RoleDied):
            await placer.agents.place(3, 0)
        await placer.supervised(orders=4)
    finally:
        await placer.agents.close()
    assert placer.orders == [2, 100, 3, 2]


@in_a_loop
async def test_a_cluster_that_has_no_room_any_more_is_asked_again(tmp_path: Path) -> None:
    placer = Placer(tmp_path, "placed-and-dies", "refused", "placed")
    try:
        await placer.agents.place(2, 0)
        await placer.supervised(orders=3)
    finally:
        await placer.agents.close()
    assert placer.orders == [2, 2, 2]
    assert sum("no room" in sentence for sentence in placer.said) == 1


@in_a_loop
async def test_too_many_failures_end_the_run_as_a_death_and_not_as_a_users_mistake(tmp_path: Path) -> None:
    placer = Placer(tmp_path, "placed-and-dies", "refused", "fails")
    try:
        await placer.agents.place(2, 0)
        with pytest.raises(RoleDied, match=r"Ray does not answer.*3 times"):
            await placer.supervised(orders=9)
    finally:
        await placer.agents.close()
    assert placer.orders == [2, 2, 2]


def test_a_reply_says_why_an_order_failed() -> None:
    def place(order: PlaceAgents) -> AgentsPlaced:
        if order.engines > 4:
            raise RecipeError([Problem("the Ray cluster", "needs 5 CPU", "add nodes")])
        return AgentsPlaced(nodes=("here",))

    assert reply(place, PlaceAgents(engines=4)) == AgentsPlaced(nodes=("here",))
    refused = reply(place, PlaceAgents(engines=5))
    assert isinstance(refused, Refused) and refused.exit_code == 2 and "needs 5 CPU" in refused.problem


def test_an_error_of_ray_fails_the_order_alone() -> None:
    class Unavailable(Exception):
        """As Ray's own, while it starts an actor anew."""

    def place(order: PlaceAgents) -> AgentsPlaced:
        raise Unavailable("the actor is restarting\nand more")

    assert reply(place, PlaceAgents(engines=1), (Unavailable,)) == Refused(
        problem="Unavailable: the actor is restarting", exit_code=1
    )
