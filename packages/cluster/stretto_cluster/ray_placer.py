"""Process that places agents on a Ray cluster: ``python -m stretto_cluster.ray_placer SPEC``. With the JSON of a
`PlaceAgents` after SPEC, it only checks whether the cluster has resources for them (`placing.look`, before a run).

Ray finds a node for each agent, and restarts an agent whose node or process dies. Everything else (requests, weights,
heartbeats) goes directly between agents and conductor. The agents end with this process, which owns them.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

import msgspec

from stretto.core.errors import Problem, RecipeError, RoleFailed
from stretto.processes.channel import RoleEnd, run_role
from stretto.processes.heartbeat import PARENT, begin_role
from stretto.processes.spawn import TOKEN
from stretto_cluster.placing import NO_RAY, START_RAY, TO_PLACER, AgentsPlaced, NotPlaced, PlaceAgents, RayPlacerSpec

try:
    import ray
    from ray.util.placement_group import placement_group, remove_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    _HAS_RAY = True
    _RAYS_ERRORS: tuple[type[Exception], ...] = (ray.exceptions.RayError,)
except ImportError:  # `RayPlacer` then raises with the remedy
    _HAS_RAY = False
    _RAYS_ERRORS = ()

_KNOCK_SECONDS = 10.0
_MISTAKE_SECONDS, _LONGEST_PAUSE = 5.0, 60.0
_ANSWER_SECONDS = 5.0
_DISMISSAL_SECONDS = 10.0
_LOOK_SECONDS = 0.25
_COMMAND = "stretto_app.cli.main"  # `stretto engine --join` or `stretto rank --join`


class AgentHost:
    """Ray actor with an agent as its child process, started by `command` with `environment` in addition to the actor's
    own. If the agent dies, the actor exits and Ray restarts both.

    If the agent ends through a user's mistake (certificates of the node, the token), the actor itself restarts it after
    `pause` seconds, doubled each time up to a minute. Ray would restart it without a pause.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], pause: float = _MISTAKE_SECONDS) -> None:
        self._command, self._environment = command, environment
        self._agent = self._start()
        threading.Thread(target=self._look_after, args=(pause,), daemon=True).start()

    def _start(self) -> subprocess.Popen[bytes]:
        ours = os.environ | dict(self._environment) | {PARENT: str(os.getpid())}
        return subprocess.Popen(self._command, env=ours, stdin=subprocess.DEVNULL)

    def _look_after(self, pause: float) -> None:
        while (code := self._agent.wait()) == RecipeError.exit_code:
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)
            try:
                self._agent = self._start()
            except OSError:  # no resources for a process: let Ray restart the actor
                break
        if code != 0:
            os._exit(1)

    def node(self) -> str:
        """Id of the actor's Ray node, its first eight characters."""
        return str(ray.get_runtime_context().get_node_id())[:8]

    def is_dismissed(self) -> bool:
        """Whether the agent has ended with exit code 0, as it does when the conductor dismisses it."""
        return self._agent.poll() == 0


@dataclass(eq=False)
class Room:
    """A placement group of Ray, and the number of agents left in it. Removing the group ends everything in it."""

    group: Any
    agents: int


@dataclass(frozen=True, eq=False)
class Placed:
    """An agent on the cluster: its actor, and its placement group."""

    actor: Any
    room: Room


class _Ground(Protocol):
    """Ray operations that a `Fleet` uses (Protocol)."""

    def start(self, kind: str, count: int) -> list[Placed]:
        """Start `count` agents of a kind ("engine" or "rank") and return them.

        Raises:
            RecipeError: the cluster lacks resources for all of them; none was started.
        """

    def gone(self, agents: Sequence[Placed]) -> list[Placed]:
        """Agents that were dismissed or have died for good; agents that Ray restarts are not included."""

    def end(self, actor: Any) -> None: ...

    def remove(self, group: Any) -> None: ...


class Fleet:
    """All agents of one kind ("engine" or "rank")."""

    def __init__(self, kind: str, ground: _Ground, patience: float = _DISMISSAL_SECONDS) -> None:
        """Start with no agent. `kind`: "engine" or "rank". `ground`: starts and ends agents on Ray. `patience`: seconds
        to wait for dismissals in progress."""
        self._kind, self._ground, self._patience = kind, ground, patience
        self.agents: list[Placed] = []

    def bring(self, wanted: int) -> list[Placed]:
        """Release dismissed agents, and start missing ones up to `wanted`; return those started. Working agents are
        never ended: a surplus stays until the conductor dismisses it. With a surplus, the call waits up to `patience`
        seconds for dismissals.

        Raises:
            RecipeError: the cluster lacks resources.
        """
        until = time.monotonic() + self._patience
        self._let_go()
        while len(self.agents) > wanted and time.monotonic() < until:
            time.sleep(_LOOK_SECONDS)
            self._let_go()
        if len(self.agents) >= wanted:
            return []
        started = self._ground.start(self._kind, wanted - len(self.agents))
        self.agents += started
        return started

    def _let_go(self) -> None:
        for agent in self._ground.gone(self.agents):
            self.agents.remove(agent)
            self._ground.end(agent.actor)
            agent.room.agents -= 1
            if not agent.room.agents:
                self._ground.remove(agent.room.group)


class RayPlacer:
    """Agents of a run on a Ray cluster (satisfies `_Ground`).

    Raises:
        RecipeError: Ray is not installed, does not answer, or has too few resources.
    """

    def __init__(self, spec: RayPlacerSpec) -> None:
        self._spec = spec
        self._token = os.environ.pop(TOKEN, "")  # removed before a local cluster is started, which would inherit it
        self._engines, self._ranks = Fleet("engine", self), Fleet("rank", self)
        if not _HAS_RAY:
            raise RecipeError([NO_RAY])
        address = None if spec.address == "local" else spec.address
        try:
            if ":" in spec.address and "://" not in spec.address:
                _knock(spec.address)
            ray.init(address, namespace=spec.run, log_to_driver=False, configure_logging=False)
        except (OSError, RuntimeError, ValueError) as error:
            found = str(error).splitlines()[0].partition(". ")[0].rstrip(".")  # the rest is about Ray's own options
            raise RecipeError([Problem(f"cluster.ray: {spec.address!r}", found, START_RAY)]) from None

    def place(self, order: PlaceAgents) -> AgentsPlaced:
        """Bring the numbers of agents to those of the order: release dismissed ones, start missing ones. Returns the
        nodes of all that reply.

        Raises:
            RecipeError: the cluster lacks resources for more.
            ray.exceptions.RayError: an agent did not start.
        """
        new = self._engines.bring(order.engines) + self._ranks.bring(order.ranks)
        old = [agent for agent in self._engines.agents + self._ranks.agents if agent not in new]
        nodes = ray.get([agent.actor.node.remote() for agent in new], timeout=self._spec.seconds)
        return AgentsPlaced(nodes=(*nodes, *(node for node in _answers(old, "node") if isinstance(node, str))))

    def start(self, kind: str, count: int) -> list[Placed]:
        self.check({kind: count})
        bundle = self._bundle
        # All ranks share one group. Each engine has a group of its own, so that its resources are free again when it
        # goes. Ray puts a group of one on the node with the most free resources, so engines spread over the nodes
        # (LeastResourceScorer in Ray's scorer.cc).
        sizes = [count] if kind == "rank" else [1] * count
        rooms = [Room(placement_group([bundle] * size, strategy="PACK"), size) for size in sizes]
        try:
            ray.get([room.group.ready() for room in rooms], timeout=self._spec.seconds)
        except ray.exceptions.RayError as error:
            for room in rooms:
                remove_placement_group(room.group)
            if not isinstance(error, ray.exceptions.GetTimeoutError):
                raise
            free = _described(cast(Any, ray).available_resources(), bundle)  # Ray declares types, and not these
            found = f"found no room for {count} more {kind}(s) of {_described(bundle, bundle)}; free: {free}"
            raise RecipeError([Problem("the Ray cluster", found, "ask for fewer, or add nodes")]) from None
        return [self._agent(kind, room, number) for room in rooms for number in range(room.agents)]

    def _agent(self, kind: str, room: Room, number: int) -> Placed:
        at = PlacementGroupSchedulingStrategy(room.group, placement_group_bundle_index=number)
        host = ray.remote(AgentHost).options(
            max_restarts=-1, num_cpus=self._spec.cpus, num_gpus=self._spec.gpus, scheduling_strategy=at
        )
        return Placed(host.remote([sys.executable, "-m", _COMMAND, kind, *self._spec.join], {TOKEN: self._token}), room)

    def gone(self, agents: Sequence[Placed]) -> list[Placed]:
        answers = zip(agents, _answers(agents, "is_dismissed"), strict=True)
        return [
            agent for agent, answer in answers if answer is True or isinstance(answer, ray.exceptions.ActorDiedError)
        ]

    def end(self, actor: Any) -> None:
        ray.kill(actor)

    def remove(self, group: Any) -> None:
        remove_placement_group(group)

    @property
    def _bundle(self) -> Mapping[str, float]:
        return {"CPU": self._spec.cpus} | ({"GPU": self._spec.gpus} if self._spec.gpus else {})

    def check(self, wanted: Mapping[str, int]) -> None:
        """Check that the total resources of the cluster suffice for the `wanted` agents, numbers by kind.

        Raises:
            RecipeError: lists each missing resource.
        """
        has: Mapping[str, float] = cast(Any, ray).cluster_resources()
        count, whom = sum(wanted.values()), " and ".join(f"{more} {kind}(s)" for kind, more in wanted.items() if more)
        missing = [
            f"{amount * count:g} {name} for {whom}, and has {has.get(name, 0):g} in all"
            for name, amount in self._bundle.items()
            if has.get(name, 0) < amount * count
        ]
        if missing:
            raise RecipeError([Problem("the Ray cluster", f"needs {what}", "add nodes") for what in missing])


def _knock(address: str) -> None:
    """Raise OSError if nothing listens at the address, ``host:port``. (Ray itself would retry for minutes.)"""
    host, _, port = address.rpartition(":")
    socket.create_connection((host, int(port)), timeout=_KNOCK_SECONDS).close()


def _answers(agents: Sequence[Placed], method: str) -> list[Any]:
    """Call a method of each agent's actor; returns for each agent the result, or the Ray error that was raised, or None
    if the actor does not reply within five seconds, as during a restart."""
    calls = [getattr(agent.actor, method).remote() for agent in agents]
    if not calls:
        return []
    answered, _ = ray.wait(calls, num_returns=len(calls), timeout=_ANSWER_SECONDS)
    return [_answer(call) if call in answered else None for call in calls]


def _answer(call: Any) -> Any:
    try:
        return ray.get(call)
    except ray.exceptions.RayError as error:
        return error


def _described(resources: Mapping[str, float], names: Mapping[str, float]) -> str:
    return ", ".join(f"{resources.get(name, 0):g} {name}" for name in names)


def reply(
    place: Callable[[PlaceAgents], AgentsPlaced],
    order: PlaceAgents,
    rays_errors: tuple[type[Exception], ...] = _RAYS_ERRORS,
) -> AgentsPlaced | NotPlaced:
    """Carry out an order by `place`, and return the reply. A RecipeError, or one of `rays_errors`, becomes `NotPlaced`;
    other errors are raised. A failed order does not affect present agents."""
    try:
        return place(order)
    except RecipeError as error:
        return NotPlaced(problem=str(error), exit_code=error.exit_code)
    except rays_errors as error:
        problem = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
        return NotPlaced(problem=problem, exit_code=RoleFailed.exit_code)


def _serve(spec: RayPlacerSpec, orders: RoleEnd[PlaceAgents]) -> None:
    placer = RayPlacer(spec)
    while (order := orders.receive()) is not None:
        orders.send(msgspec.structs.replace(reply(placer.place, order), number=order.number))


def _look(spec: RayPlacerSpec, wanted: PlaceAgents) -> int:
    """Check the cluster; return the exit code. A user's mistakes are printed to standard output as JSON."""
    try:
        RayPlacer(spec).check({"engine": wanted.engines, "rank": wanted.ranks})
    except RecipeError as error:
        print(msgspec.json.encode(error.problems).decode(), flush=True)
        return error.exit_code
    return 0


def main(arguments: list[str]) -> int:
    """Run the role until the conductor closes the connection, or only the check if a `PlaceAgents` is given. Return the
    exit code. `arguments`: a `RayPlacerSpec`, and maybe a `PlaceAgents`, as JSON."""
    spec = msgspec.json.decode(arguments[0], type=RayPlacerSpec)
    if arguments[1:]:
        return _look(spec, msgspec.json.decode(arguments[1], type=PlaceAgents))
    begin_role()
    orders: RoleEnd[PlaceAgents] = RoleEnd(spec.descriptor, TO_PLACER)
    return run_role(lambda: _serve(spec, orders), orders.send)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
