"""The engines of a command without a run."""

from __future__ import annotations

from collections.abc import Sequence

from stretto.core.errors import Problem, RecipeError
from stretto.core.machine import Gpu, Need, Seat
from stretto.engine.config import EngineConfig
from stretto.launch.preflight.checks import given_to_servers
from stretto.launch.preflight.devices import seated
from stretto.launch.recipe.recipe import Recipe
from stretto.model.hf.inspection import ModelFolder
from stretto.model.hf.shape import BYTES


def check_embedded(config: EngineConfig) -> None:
    """Check the engine's settings for a command whose engine runs in its own process, so that it must be the native
    one.

    Raises:
        RecipeError: the engine is of another make, or settings are for a server of another make; lists them.
    """
    found = "and only the runs and evaluations of a recipe have another engine than the embedded one"
    problems = [Problem(f"engine.{key}", f"is given, {found}", "leave it out") for key in given_to_servers(config)]
    remedy = 'allowed: "native"; vLLM and SGLang are servers themselves'
    if config.kind != "native":
        problems.insert(0, Problem("engine.kind", f'"{config.kind}", {found}', remedy))
    if problems:
        raise RecipeError(problems)


def seats_of_engines(recipe: Recipe, base: ModelFolder, there: Sequence[Gpu]) -> tuple[Seat, ...]:
    """Assign the engines of a server, without a trainer, to the GPUs `there`: each to those with the most free memory.
    Empty: they run on the CPU, as configured or because there is no GPU, or the recipe names servers that run.

    Raises:
        RecipeError: engines need more than 1.5 times the free memory, or more GPUs than there are.
    """
    config = recipe.engine
    if config.device == "cpu" or config.addresses:
        return ()
    weights = base.parameters * BYTES[config.dtype] * config.copies
    parts = {"weights of the engine": weights // config.gpus, "cache": config.cache_bytes // config.gpus}
    needs = [Need(f"engine-{number}", parts, config.gpus) for number in range(recipe.local_engines)]
    return seated(recipe, needs, there, ranks=False)
