"""The `[weights]` section of a recipe, and the choice of a medium for "auto"."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pydantic import BaseModel, Field

from stretto.core.errors import Problem, RecipeError

Medium = Literal["shared_memory", "http", "broadcast"]


class WeightsConfig(BaseModel, extra="forbid", frozen=True):
    """Transport of weights from the trainer to the engines."""

    medium: Literal["auto", "shared_memory", "http", "broadcast"] = Field(
        "auto",
        description="shared_memory: engines map the trainer's file; http: each machine pulls it once into its own "
        "shared memory; broadcast: SGLang servers receive it in a collective group and need no file of the run; auto: "
        "chosen by where the engines are",
    )
    delta: Literal["auto", "always", "never"] = Field(
        "auto",
        description="whether http transfers only changed elements; auto: whichever was faster when measured",
    )


@dataclass(frozen=True)
class Route:
    """Where weights must go. `engines`: the recipe's `engine.kind`. `elsewhere`: whether an engine runs, or may join
    later, on another machine than the trainer's."""

    engines: str
    elsewhere: bool


@dataclass(frozen=True)
class ChosenMedium:
    """The medium of a run, and the reason for it, for the log."""

    medium: Medium
    reason: str


def choose(config: WeightsConfig, route: Route) -> ChosenMedium:
    """Choose the medium that the recipe asks for; for "auto" shared memory, or http if engines are elsewhere. The
    result says why.

    Raises:
        RecipeError: the recipe asks for shared_memory although engines are elsewhere, for http although none are, or
            for broadcast to other engines than SGLang servers on this machine.
    """
    if config.medium == "shared_memory" and route.elsewhere:
        raise RecipeError(
            [
                Problem(
                    "weights.medium",
                    '"shared_memory" does not reach engines on other machines',
                    'use "http", or "auto"',
                )
            ]
        )
    if config.medium == "http" and not route.elsewhere:
        raise RecipeError(
            [
                Problem(
                    "weights.medium",
                    '"http", and all engines are on the machine of the run, where they map the trainer\'s file',
                    'give cluster.listen, for machines that join, or use "auto"',
                )
            ]
        )
    if config.medium == "broadcast" and (why := _no_broadcast(route)):
        raise RecipeError([Problem("weights.medium", f'"broadcast", and {why}', 'use "auto"')])
    if config.medium != "auto":
        return ChosenMedium(config.medium, "the recipe asks for it")
    if not route.elsewhere:
        return ChosenMedium(
            "shared_memory", "all engines are on the trainer's machine and map the file that it has written"
        )
    return ChosenMedium(
        "http",
        "engines on other machines may come and go: each machine pulls a version once, and verifies every byte",
    )


def _no_broadcast(route: Route) -> str:
    """Text of the reason why the engines cannot receive weights by a collective; "" if they can."""
    if route.elsewhere:
        return "machines may join, which pull each version and verify every byte of it"
    return {
        "native": "the embedded engine maps the file of the trainer",
        "vllm": "vLLM's own transfer engines meet their sender by a communicator that only vLLM has",
        "sglang": "",
    }.get(route.engines, "only servers of SGLang take them by a collective")
