"""Messages between the conductor and the placer of a Ray cluster (`stretto_cluster.ray_placer`); imports no Ray."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

import msgspec

from stretto.core.errors import Problem, RecipeError
from stretto.core.records import Record
from stretto.processes.channel import Failed

RAY_PLACER = "stretto_cluster.ray_placer"
NO_RAY = Problem(
    "--ray, or cluster.placer = 'ray'",
    "Ray is not installed",
    "pip install 'stretto[ray]' in this environment, and in that of every node of the cluster",
)

START_RAY = "ray start --head on one machine, ray start --address=HOST:PORT on the others; or --ray local"


def has_ray() -> bool:
    """Whether Ray is installed in this environment. It is not imported, because that would take seconds."""
    try:
        return importlib.util.find_spec("ray") is not None
    except (ImportError, ValueError):  # a broken installation
        return False


class RayPlacerSpec(Record, frozen=True):
    """Spec of the placer.

    `address`: the Ray cluster, "auto" for the running one, "local" for a new one on this machine. `join`: command line
    arguments of an agent; the token is in the environment. `cpus` and `gpus`: resources of one engine or rank.
    `seconds`: time limit for the cluster to find resources. `descriptor`: the placer's end of the connection to the
    conductor.
    """

    run: str
    address: str
    join: tuple[str, ...]
    cpus: int
    gpus: int
    seconds: float
    descriptor: int = -1


class PlaceAgents(Record, frozen=True, tag=True):
    """Order that sets how many agents run in all: `engines` for engines, spread over the nodes, and `ranks` for ranks,
    packed on few nodes. Missing ones are started, and dismissed ones released; a surplus stays. A reply has the
    `number` of its order."""

    engines: int
    ranks: int = 0
    number: int = 0


class AgentsPlaced(Record, frozen=True, tag=True):
    """Reply to `PlaceAgents`: the Ray node (short id) of each agent that replied, in no order."""

    nodes: tuple[str, ...]
    number: int = 0


class NotPlaced(Record, frozen=True, tag=True):
    """Reply to an order that failed, for the reason `problem`. The placer keeps its present agents. `exit_code`: 2 if
    the cluster lacks resources, 1 after an error of Ray."""

    problem: str
    exit_code: int
    number: int = 0


FromPlacer = AgentsPlaced | NotPlaced | Failed
FROM_PLACER: msgspec.msgpack.Decoder[FromPlacer] = msgspec.msgpack.Decoder(FromPlacer)
TO_PLACER: msgspec.msgpack.Decoder[PlaceAgents] = msgspec.msgpack.Decoder(PlaceAgents)


def look(spec: RayPlacerSpec, wanted: PlaceAgents, seconds: float) -> None:
    """Check, in another process, that the Ray cluster exists and has the resources for the `wanted` agents. Nothing is
    placed.

    Raises:
        RecipeError: it does not exist or lacks resources, or the check took longer than `seconds`.
    """
    words = [sys.executable, "-m", RAY_PLACER, *(msgspec.json.encode(told).decode() for told in (spec, wanted))]
    try:
        asked = subprocess.run(
            words, capture_output=True, encoding="utf-8", errors="replace", timeout=seconds, check=False
        )
    except subprocess.TimeoutExpired:
        found = f"no Ray cluster has answered within {seconds:g} s"
    else:
        if asked.returncode == RecipeError.exit_code:
            raise RecipeError(msgspec.json.decode(asked.stdout.splitlines()[-1], type=list[Problem]))
        if not asked.returncode:
            return
        found = (asked.stderr.strip().splitlines() or [f"Ray ended with exit code {asked.returncode}"])[-1]
    raise RecipeError([Problem(f"cluster.ray: {spec.address!r}", found, START_RAY)])
