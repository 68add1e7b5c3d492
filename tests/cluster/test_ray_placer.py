"""Agents on a Ray cluster, without Ray.

- An order that fails costs no agent that is there: the placer says why, and takes the next one. A reply that comes
  after the deadline of its order is not taken for that to the next.
- A placer that dies is replaced, and places the agents of the last order that was carried out; the run ends, by
  `RoleDied`, only after as many failures as a role is allowed.
- Fewer engines are wanted: only dismissed agents go, and a placement group goes with its last agent, never before. More
  are wanted, or as many: dismissed agents are replaced first.
- An agent that ends by a mistake of the user is started again after a pause, by its actor.
- The token of a run is in the environment of none of the roles.
- Where Ray is not installed, that is said with the command that installs it, before a role starts.
- A cluster that is not there, or could never have all engines and ranks, is named before there is a run folder."""

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from stretto.core.errors import DeadlineExceeded, Problem, RecipeError, RoleDied, RoleFailed
from stretto.loop.config import DeadlinesConfig
from stretto.processes.spawn import environment
from stretto.store.run_folder import RunFolder
from stretto_app.extensions.commands.join import offer
from stretto_app.extensions.machines import identity_of
from stretto_app.extensions.ray_agents import RayAgents
from stretto_cluster.placing import AgentsPlaced, NotPlaced, PlaceAgents, RayPlacerSpec, look
from stretto_cluster.ray_placer import AgentHost, Fleet, Placed, Room, reply
from tests.launch.running import TINY, Laboratory


class Placer:
    """A conductor's agents with `fake_placer` as their placer."""

    def __init__(self, folder: Path, *script: str, seconds: float = 20.0) -> None:
        self._script = folder / "script"
        self._script.write_text("\n".join(script))
        spec = RayPlacerSpec(run="run", address=str(self._script), join=(), cpus=1, gpus=0, seconds=seconds)
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

    async def __aenter__(self) -> RayAgents:
        return self.agents

    async def __aexit__(self, *_: object) -> None:
        await self.agents.close()

    async def supervised(self, orders: int) -> None:
        """Supervise until a number of orders has been given."""
        watch = asyncio.ensure_future(self.agents.supervise())
        try:
            async with asyncio.timeout(60):
                while not watch.done() and not (len(self.orders) >= orders and "placed" in self.said[-1]):
                    await asyncio.sleep(0.02)
            if watch.done():
                watch.result()
        finally:
            watch.cancel()


async def test_an_order_that_the_cluster_cannot_carry_out_is_refused_and_the_placer_goes_on(tmp_path: Path) -> None:
    placer = Placer(tmp_path, "placed", "refused", "broken", "placed")
    async with placer as agents:
        await agents.place(2, 0)
        pid = agents._process.pid
        with pytest.raises(RecipeError, match="no room"):
            await agents.place(100, 0)
        with pytest.raises(RoleFailed, match="RayActorError: it is dead"):
            await agents.place(3, 0)
        await agents.place(4, 0)
        assert agents._process.pid == pid
    assert placer.orders == [2, 100, 3, 4]


async def test_a_reply_after_the_deadline_is_not_taken_for_that_to_the_next_order(tmp_path: Path) -> None:
    placer = Placer(tmp_path, "placed", "late", "placed", seconds=1.0)
    async with placer as agents:
        await agents.place(1, 0)
        with pytest.raises(DeadlineExceeded, match="to place agents"):
            await agents.place(2, 0)
        await agents.place(3, 0)
    assert placer.orders == [1, 2, 3]
    assert [sentence.rpartition(" ")[2] for sentence in placer.said] == ["order-1", "order-3"]


async def test_a_new_placer_gets_the_last_order_that_was_carried_out(tmp_path: Path) -> None:
    placer = Placer(tmp_path, "placed", "refused", "dies", "placed")
    async with placer as agents:
        await agents.place(2, 0)
        with pytest.raises(RecipeError):
            await agents.place(100, 0)
        with pytest.raises(RoleDied):
            await agents.place(3, 0)
        await placer.supervised(orders=4)
    assert placer.orders == [2, 100, 3, 2]


async def test_a_cluster_that_has_no_room_any_more_is_asked_again(tmp_path: Path) -> None:
    placer = Placer(tmp_path, "placed-and-dies", "refused", "placed")
    async with placer as agents:
        await agents.place(2, 0)
        await placer.supervised(orders=3)
    assert placer.orders == [2, 2, 2]
    assert sum("no room" in sentence for sentence in placer.said) == 1


async def test_too_many_failures_end_the_run_as_a_death_and_not_as_a_users_mistake(tmp_path: Path) -> None:
    placer = Placer(tmp_path, "placed-and-dies", "refused", "fails")
    async with placer as agents:
        await agents.place(2, 0)
        with pytest.raises(RoleDied, match=r"Ray does not answer.*3 times"):
            await placer.supervised(orders=9)
    assert placer.orders == [2, 2, 2]


def test_a_reply_says_why_an_order_failed() -> None:
    def place(order: PlaceAgents) -> AgentsPlaced:
        if order.engines > 4:
            raise RecipeError([Problem("the Ray cluster", "needs 5 CPU", "add nodes")])
        return AgentsPlaced(nodes=("here",))

    assert reply(place, PlaceAgents(engines=4)) == AgentsPlaced(nodes=("here",))
    refused = reply(place, PlaceAgents(engines=5))
    assert isinstance(refused, NotPlaced)
    assert refused.exit_code == 2
    assert "needs 5 CPU" in refused.problem


def test_an_error_of_ray_fails_the_order_alone() -> None:
    class Unavailable(Exception):
        """As Ray's own, while it starts an actor anew."""

    def place(order: PlaceAgents) -> AgentsPlaced:
        raise Unavailable("the actor is restarting\nand more")

    assert reply(place, PlaceAgents(engines=1), (Unavailable,)) == NotPlaced(
        problem="Unavailable: the actor is restarting", exit_code=1
    )


class Cluster:
    """Ray as a fleet sees it. Agents are their numbers; a group that is removed takes its agents with it."""

    def __init__(self, in_one_group: bool) -> None:
        self.in_one_group = in_one_group
        self.alive: dict[int, str] = {}  # groups, by agent
        self.dismissed: dict[int, int] = {}  # how often one is asked before it says that it is dismissed, by agent
        self.removed: list[str] = []
        self._next = 0

    def start(self, kind: str, count: int) -> list[Placed]:
        numbers = range(self._next, self._next + count)
        self._next += count
        rooms = [Room(f"group-{number}", 1) for number in numbers]
        if self.in_one_group:
            rooms = [Room(f"group-{numbers[0]}", count)] * count
        self.alive |= {number: room.group for number, room in zip(numbers, rooms, strict=True)}
        return [Placed(number, room) for number, room in zip(numbers, rooms, strict=True)]

    def gone(self, agents: Sequence[Placed]) -> list[Placed]:
        found = [agent for agent in agents if self.dismissed.get(agent.actor) == 0]
        self.dismissed = {number: max(0, left - 1) for number, left in self.dismissed.items()}
        return found

    def end(self, actor: int) -> None:
        del self.alive[actor]

    def remove(self, group: str) -> None:
        self.removed.append(group)
        self.alive = {number: of for number, of in self.alive.items() if of != group}


@pytest.mark.parametrize("in_one_group", [False, True])
def test_scaling_down_and_up_again_ends_the_dismissed_agent_alone_and_starts_one(in_one_group: bool) -> None:
    cluster = Cluster(in_one_group)
    fleet = Fleet("engine", cluster, patience=10.0)
    assert len(fleet.bring(4)) == 4
    cluster.dismissed = {3: 2}  # under way: it is asked twice before it has ended
    assert fleet.bring(3) == []
    assert sorted(cluster.alive) == [0, 1, 2]
    assert [agent.actor for agent in fleet.bring(4)] == [4]
    assert sorted(cluster.alive) == [0, 1, 2, 4] == sorted(agent.actor for agent in fleet.agents)


def test_a_group_is_removed_with_its_last_agent() -> None:
    cluster = Cluster(in_one_group=True)
    fleet = Fleet("rank", cluster, patience=0.0)
    fleet.bring(2)
    cluster.dismissed = {0: 0}
    fleet.bring(1)
    assert cluster.removed == []
    cluster.dismissed = {1: 0}
    fleet.bring(0)
    assert cluster.removed == ["group-0"]


def test_an_agent_that_was_dismissed_since_its_engines_failed_is_replaced() -> None:
    cluster = Cluster(in_one_group=False)
    fleet = Fleet("engine", cluster, patience=0.0)
    fleet.bring(2)
    cluster.dismissed = {0: 0}
    assert [agent.actor for agent in fleet.bring(2)] == [2]
    assert cluster.removed == ["group-0"]


def test_an_agent_that_nobody_dismisses_stays() -> None:
    cluster = Cluster(in_one_group=False)
    fleet = Fleet("engine", cluster, patience=0.0)
    fleet.bring(2)
    assert fleet.bring(1) == []
    assert sorted(cluster.alive) == [0, 1]


def test_an_agent_that_ends_by_a_mistake_is_started_again_by_its_actor(tmp_path: Path) -> None:
    tries = tmp_path / "tries"
    script = f'echo "$STRETTO_TOKEN" >> {tries}; [ $(wc -l < {tries}) -ge 3 ] || exit 2'
    host = AgentHost(["/bin/sh", "-c", script], {"STRETTO_TOKEN": "token"}, pause=0.05)
    until = time.monotonic() + 30
    while not host.is_dismissed() and time.monotonic() < until:
        time.sleep(0.02)
    assert host.is_dismissed()
    assert tries.read_text() == "token\n" * 3


def test_the_token_is_taken_out_of_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STRETTO_TOKEN", "token")
    assert "STRETTO_TOKEN" not in environment(1)  # of the fork server, which is older than what reads the token
    brought = offer("here:7420", None, count=1, host=None, tls=None, patience=1.0)
    assert (brought.token, os.environ.get("STRETTO_TOKEN")) == ("token", None)
    monkeypatch.setenv("STRETTO_TOKEN", "token")
    assert identity_of(RunFolder(tmp_path / "run")).token == "token"
    assert "STRETTO_TOKEN" not in os.environ


@pytest.mark.parametrize("more", [("--dry-run",), ()])
def test_a_run_without_ray_is_refused_with_what_installs_it_before_a_role_starts(
    laboratory: Laboratory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: tuple[str, ...]
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)  # `import ray` is an ImportError
    refused = laboratory.run("train", TINY, "--ray", "auto", "--run-dir", tmp_path / "run", *more)
    refused.refused("cluster.placer = 'ray': Ray is not installed; pip install 'stretto[ray]'", "every node")
    assert not (tmp_path / "run").exists()


#: A cluster with two CPUs at ray://here, and none elsewhere.
_RAY = """
from ray import exceptions

def init(address, **more):
    if address != "ray://here":
        raise ConnectionError("Could not find any running Ray instance. Give --address.\\nMore words.")

def cluster_resources():
    return {"CPU": 2.0}
"""


@pytest.fixture
def small_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module `ray` for the processes that a command starts."""
    place = tmp_path / "modules" / "ray"
    (place / "util").mkdir(parents=True)
    (place / "__init__.py").write_text(_RAY)
    (place / "exceptions.py").write_text("class RayError(Exception): ...")
    (place / "util" / "__init__.py").touch()
    (place / "util" / "placement_group.py").write_text("placement_group = remove_placement_group = None")
    (place / "util" / "scheduling_strategies.py").write_text("PlacementGroupSchedulingStrategy = None")
    monkeypatch.setenv("PYTHONPATH", f"{place.parent}:{os.getcwd()}")


def looked(address: str, engines: int, ranks: int = 0, cpus: int = 1) -> None:
    look(RayPlacerSpec("run", address, (), cpus=cpus, gpus=0, seconds=1.0), PlaceAgents(engines, ranks), 60.0)


@pytest.mark.usefixtures("small_cluster")
def test_a_cluster_that_is_there_is_asked_for_all_that_will_be_placed() -> None:
    looked("ray://here", engines=1, ranks=1)
    with pytest.raises(RecipeError) as refused:
        looked("ray://here", engines=1, ranks=2, cpus=4)
    assert str(refused.value) == (
        "the Ray cluster: needs 12 CPU for 1 engine(s) and 2 rank(s), and has 2 in all; add nodes"
    )


@pytest.mark.usefixtures("small_cluster")
@pytest.mark.parametrize("more", [("--dry-run",), ()])
def test_without_a_cluster_there_is_no_run_folder(
    laboratory: Laboratory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: tuple[str, ...]
) -> None:
    refused = laboratory.run("train", TINY, "--ray", "auto", "--run-dir", tmp_path / "run", *more)
    refused.refused("cluster.ray: 'auto': Could not find any running Ray instance; ray start --head", "--ray local")
    assert not (tmp_path / "run").exists()


def test_the_placer_says_it_too_where_the_installation_is_broken(tmp_path: Path) -> None:
    """As on a machine on which `import ray` fails, though a folder of that name is there."""
    (tmp_path / "ray.py").write_text("raise ImportError('libray.so')")
    program = (
        "from stretto_cluster.placing import RayPlacerSpec\n"
        "from stretto_cluster.ray_placer import RayPlacer\n"
        "RayPlacer(RayPlacerSpec(run='run', address='auto', join=(), cpus=1, gpus=0, seconds=1.0))\n"
    )
    surroundings = os.environ | {"PYTHONPATH": f"{tmp_path}:{os.getcwd()}", "STRETTO_TOKEN": "t"}
    ended = subprocess.run([sys.executable, "-c", program], env=surroundings, capture_output=True, text=True)
    assert ended.returncode == 1
    assert "cluster.placer = 'ray': Ray is not installed; pip install 'stretto[ray]'" in ended.stderr
