"""Checks of the section `[cluster]`: whether the machines that a run needs can join, and where."""

from __future__ import annotations

from stretto.core.errors import Problem, RecipeError
from stretto.launch.recipe.recipe import Recipe
from stretto.processes.http.asgi import is_loopback
from stretto.processes.http.reach import unreachable
from stretto.processes.http.tls import server_context
from stretto_cluster.address import bound
from stretto_cluster.placing import NO_RAY, PlaceAgents, RayPlacerSpec, has_ray, look


def check_cluster(recipe: Recipe) -> None:
    """Check that the machines which the run needs can join as the recipe says: Ray, the address to listen on, the
    certificates and `cluster.trusted_network`.

    Raises:
        RecipeError: they cannot; lists every reason.
    """
    config = recipe.cluster
    problems = [NO_RAY] if config.placer == "ray" and not has_ray() else []
    if config.placer == "ray" and ":" in config.ray and (fault := unreachable(config.ray)):
        remedy = "ray start --head there, or --ray local for a cluster of this machine"
        problems.append(Problem(f"cluster.ray: {config.ray!r}", f"no Ray cluster answers: {fault}", remedy))
    ranks = recipe.trainer.remote_ranks
    if ranks and not config.listen and config.placer != "ray":
        found, remedy = "and cluster.listen is empty: no machine can join", 'give cluster.listen="HOST:PORT"'
        problems.append(Problem("trainer.remote_ranks", f"{ranks}, {found}", remedy))
    try:
        server_context(config.tls or "")
    except RecipeError as error:
        problems += error.problems
    try:
        within = config.listen != "" and _is_loopback(config.listen)
    except RecipeError as error:
        problems += error.problems
    else:
        if ranks and (config.listen or config.placer == "ray") and not within and not config.trusted_network:
            found = f"false, and trainer.remote_ranks = {ranks}: collectives know neither key nor encryption"
            remedy = "true says that nobody else is on their network (docs/how_to/cluster.md)"
            problems.append(Problem("cluster.trusted_network", found, remedy))
    if problems:
        raise RecipeError(problems)


def check_ray(recipe: Recipe) -> None:
    """Check that the Ray cluster which is to start the engines exists and is large enough. Does nothing without Ray.

    Raises:
        RecipeError: it is missing or too small.
    """
    config, engine = recipe.cluster, recipe.engine
    if config.placer == "ray":
        spec = RayPlacerSpec("preflight", config.ray, (), cpus=engine.threads, gpus=config.gpus, seconds=config.wait)
        look(spec, PlaceAgents(engine.count, recipe.trainer.remote_ranks), recipe.deadlines.start)


def _is_loopback(listen: str) -> bool:
    with bound(listen) as reserved:
        return is_loopback(reserved)
