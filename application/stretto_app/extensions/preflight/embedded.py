"""The engine of a command that has one alone, without a run."""

from __future__ import annotations

from collections.abc import Sequence

from stretto.core.errors import Problem, RecipeError
from stretto.core.machine import Gpu, Need, Seat
from stretto.engine.config import EngineConfig
from stretto.launch.preflight.checks import given_to_servers
from stretto.launch.preflight.devices import alone
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


def seat_alone(config: EngineConfig, base: ModelFolder, there: Sequence[Gpu]) -> Seat | None:
    """Return the seat of an engine without a run, on the GPU, of those `there`, with the most free memory. None: it
    runs on the CPU, as it is configured or because there is no GPU.

    Raises:
        RecipeError: the engine needs more than 1.5 times the free memory.
    """
    if config.device == "cpu" or not there:
        return None
    parts = {"weights of the engine": base.parameters * BYTES[config.dtype], "cache": config.cache_bytes}
    return alone(Need("engine-0", parts), there)  # the name by which `seat_of_engine` finds it
