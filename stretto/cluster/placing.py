"""What the conductor and the placer of a Ray cluster (`cluster.ray_placer`) say to each other; without Ray."""

from __future__ import annotations

import importlib.util

import msgspec

from stretto.core.errors import Problem
from stretto.core.records import Record
from stretto.processes.run_role import Failed

RAY_PLACER = "stretto.cluster.ray_placer"
NO_RAY = Problem(
    "cluster.placer = 'ray'",
    "Ray is not installed",
    "pip install 'stretto[ray]' in this environment, and in that of every node of the cluster",
)


def has_ray() -> bool:
    """Whether Ray is installed here; it is not imported, which takes seconds."""
    try:
        return importlib.util.find_spec("ray") is not None
    except (ImportError, ValueError):  # something keeps it from being found
        return False


class RayPlacerSpec(Record, frozen=True):
    """The spec of the placer.

    `address` is that of the Ray cluster, "auto" for the one that runs, "local" for a new one on this machine. `join`
    are the words of an agent's command line; the token is in the environment. `cpus` and `gpus` are those of one engine
    or rank. `seconds`: how long the cluster may take to find room.
    """

    run: str
    address: str
    join: tuple[str, ...]
    cpus: int
    gpus: int
    seconds: float
    descriptor: int = -1


class PlaceAgents(Record, frozen=True, tag=True):
    """Place `engines` agents for engines, spread over the nodes, and agents for ranks, packed; the reply is
    `AgentsPlaced`. A reply has the `number` of its order: one that comes too late is not taken for that to the next."""

    engines: int
    ranks: int = 0
    number: int = 0


class AgentsPlaced(Record, frozen=True, tag=True):
    """The nodes of the agents, in no order."""

    nodes: tuple[str, ...]
    number: int = 0


class NotPlaced(Record, frozen=True, tag=True):
    """The order cannot be carried out; the placer goes on with the agents that it has. `exit_code` is that of the
    error: 2 where the cluster lacks what was ordered, else Ray has failed."""

    problem: str
    exit_code: int
    number: int = 0


FromPlacer = AgentsPlaced | NotPlaced | Failed
FROM_PLACER: msgspec.msgpack.Decoder[FromPlacer] = msgspec.msgpack.Decoder(FromPlacer)
TO_PLACER: msgspec.msgpack.Decoder[PlaceAgents] = msgspec.msgpack.Decoder(PlaceAgents)
