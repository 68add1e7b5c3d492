"""The process that places agents on a Ray cluster: ``python -m stretto.cluster.ray_placer SPEC``.

Ray finds a node for each agent, and starts one anew when its node or its process dies. All else, requests, weights,
heartbeats, goes between the agents and the conductor. The agents end with this process, which owns them.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from stretto.cluster.placing import TO_PLACER, AgentsPlaced, PlaceAgents, RayPlacerSpec, Refused
from stretto.core.errors import Problem, RecipeError, RoleFailed
from stretto.processes.channel import RoleEnd
from stretto.processes.heartbeat import PARENT, begin_role
from stretto.processes.run_role import run_role

try:
    import ray
    from ray.util.placement_group import placement_group, remove_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    _HAS_RAY = True
    _RAYS_ERRORS: tuple[type[Exception], ...] = (ray.exceptions.RayError,)
except ImportError:  # the message says how to have it
    _HAS_RAY = False
    _RAYS_ERRORS = ()

_TOKEN = "STRETTO_TOKEN"
_KNOCK_SECONDS = 10.0
_COMMAND = "stretto.cli.main"  # `stretto engine --join` or `stretto rank --join`


class AgentHost:
    """A Ray actor with an agent as its child; when the agent dies, so does the actor, and Ray starts both anew."""

    def __init__(self, words: Sequence[str], environment: Mapping[str, str]) -> None:
        command = [sys.executable, "-m", _COMMAND, *words]
        ours = os.environ | dict(environment) | {PARENT: str(os.getpid())}
        self._agent = subprocess.Popen(command, env=ours, stdin=subprocess.DEVNULL)
        threading.Thread(target=self._end_with_it, daemon=True).start()

    def _end_with_it(self) -> None:
        if self._agent.wait() != 0:
            os._exit(1)

    def node(self) -> str:
        """Where it is."""
        return str(ray.get_runtime_context().get_node_id())[:8]

    def is_dismissed(self) -> bool:
        """Whether the conductor has let the agent go."""
        return self._agent.poll() == 0


@dataclass(frozen=True)
class _Placed:
    actor: Any
    group: Any


class RayPlacer:
    """The agents of a run on a Ray cluster.

    Raises:
        RecipeError: Ray is not installed, does not answer, or has too few resources.
    """

    def __init__(self, spec: RayPlacerSpec) -> None:
        self._spec = spec
        self._kinds: dict[str, list[_Placed]] = {"engine": [], "rank": []}
        if not _HAS_RAY:
            remedy = "pip install 'ray>=2.50' in this environment, and on every node of the cluster"
            raise RecipeError([Problem("cluster.placer = 'ray'", "Ray is not installed", remedy)])
        address = None if spec.address == "local" else spec.address
        try:
            if ":" in spec.address and "://" not in spec.address:
                _knock(spec.address)
            ray.init(address, namespace=spec.run, log_to_driver=False, configure_logging=False)
        except (OSError, RuntimeError, ValueError) as error:
            remedy = "ray start --head on one machine, ray start --address=HOST:PORT on the others; or --ray local"
            raise RecipeError(
                [Problem(f"cluster.ray = {spec.address!r}", str(error).splitlines()[0], remedy)]
            ) from None

    def place(self, order: PlaceAgents) -> AgentsPlaced:
        """Have as many agents as ordered: dismissed ones are let go, new ones started."""
        self._bring("engine", order.engines, "SPREAD")
        self._bring("rank", order.ranks, "PACK")
        placed = [agent.actor for agents in self._kinds.values() for agent in agents]
        return AgentsPlaced(nodes=tuple(ray.get([actor.node.remote() for actor in placed], timeout=self._spec.seconds)))

    def _bring(self, kind: str, wanted: int, strategy: str) -> None:
        agents = self._kinds[kind]
        for agent in [agent for agent in agents if len(agents) > wanted and _dismissed(agent)]:
            ray.kill(agent.actor)
            remove_placement_group(agent.group)
            agents.remove(agent)
        more = wanted - len(agents)
        if more <= 0:
            return
        bundle = {"CPU": self._spec.cpus} | ({"GPU": self._spec.gpus} if self._spec.gpus else {})
        self._check(bundle, kind, more)
        group = placement_group([bundle] * more, strategy=strategy)
        try:
            ray.get(group.ready(), timeout=self._spec.seconds)
        except ray.exceptions.GetTimeoutError:
            remove_placement_group(group)
            free = _described(_untyped(ray).available_resources(), bundle)
            found = f"found no room for {more} more {kind}(s) of {_described(bundle, bundle)}; free: {free}"
            raise RecipeError([Problem("the Ray cluster", found, "ask for fewer, or add nodes")]) from None
        environment = {_TOKEN: os.environ[_TOKEN]}
        for number in range(more):
            at = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=number)
            host = ray.remote(AgentHost).options(
                max_restarts=-1, num_cpus=self._spec.cpus, num_gpus=self._spec.gpus, scheduling_strategy=at
            )
            agents.append(_Placed(host.remote([kind, *self._spec.join], environment), group))

    def _check(self, bundle: Mapping[str, float], kind: str, more: int) -> None:
        """Refuse at once what the cluster could never give."""
        has: Mapping[str, float] = _untyped(ray).cluster_resources()
        missing = [
            f"{amount * more:g} {name} for {more} {kind}(s), and has {has.get(name, 0):g} in all"
            for name, amount in bundle.items()
            if has.get(name, 0) < amount * more
        ]
        if missing:
            raise RecipeError([Problem("the Ray cluster", f"needs {what}", "add nodes") for what in missing])


def _knock(address: str) -> None:
    """Raise OSError where nobody listens; Ray itself tries for minutes."""
    host, _, port = address.rpartition(":")
    socket.create_connection((host, int(port)), timeout=_KNOCK_SECONDS).close()


def _untyped(module: Any) -> Any:
    """Ray declares types, and leaves them out of some functions."""
    return module


def _dismissed(agent: _Placed) -> bool:
    return bool(ray.get(agent.actor.is_dismissed.remote(), timeout=30.0))


def _described(resources: Mapping[str, float], names: Mapping[str, float]) -> str:
    return ", ".join(f"{resources.get(name, 0):g} {name}" for name in names)


def reply(
    place: Callable[[PlaceAgents], AgentsPlaced],
    order: PlaceAgents,
    rays_errors: tuple[type[Exception], ...] = _RAYS_ERRORS,
) -> AgentsPlaced | Refused:
    """What comes of an order; one that fails costs no agent that is there."""
    try:
        return place(order)
    except RecipeError as error:
        return Refused(problem=str(error), exit_code=error.exit_code)
    except rays_errors as error:
        problem = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
        return Refused(problem=problem, exit_code=RoleFailed.exit_code)


def _serve(spec: RayPlacerSpec, orders: RoleEnd[PlaceAgents]) -> None:
    placer = RayPlacer(spec)
    while (order := orders.receive()) is not None:
        orders.send(reply(placer.place, order))


def main(arguments: list[str]) -> int:
    """Play the role until the conductor closes the connection; see `processes.run_role`."""
    spec = msgspec.json.decode(arguments[0], type=RayPlacerSpec)
    begin_role()
    orders: RoleEnd[PlaceAgents] = RoleEnd(spec.descriptor, TO_PLACER)
    return run_role(lambda: _serve(spec, orders), orders.send)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
