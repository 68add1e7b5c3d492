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
    """Places that weights must reach. `engines`: the recipe's `engine.kind`. `elsewhere`: whether an engine runs, or
    may join later, on another machine than the trainer's."""

    engines: str
    elsewhere: bool


@dataclass(frozen=True)
class ChosenMedium:
    """The medium of a run, and the reason for it, for the log."""

    medium: Medium
    reason: str


def choose(config: WeightsConfig, route: Route) -> ChosenMedium:
    """Choose the medium that the recipe asks for; for "auto" shared memory, or http if engines are elsewhere. The
    result says why. Raises RecipeError if the recipe asks for shared_memory although engines are elsewhere, for http
    although none are, or for broadcast to other engines than SGLang servers on this machine."""
    found, remedy = "", 'use "auto"'
    if config.medium == "shared_memory" and route.elsewhere:
        found, remedy = '"shared_memory" does not reach engines on other machines', 'use "http", or "auto"'
    elif config.medium == "http" and not route.elsewhere:
        found = '"http", and all engines are on the machine of the run, where they map the trainer\'s file'
        remedy = 'give cluster.listen, for machines that join, or use "auto"'
    elif config.medium == "broadcast" and (why := _no_broadcast(route)):
        found = f'"broadcast", and {why}'
    if found:
        raise RecipeError([Problem("weights.medium", found, remedy)])
    if config.medium != "auto":
        return ChosenMedium(config.medium, "the recipe asks for it")
    if route.elsewhere:
        come_and_go = "engines on other machines may come and go"
        return ChosenMedium("http", f"{come_and_go}: each machine pulls a version once, and verifies every byte")
    same = "all engines are on the trainer's machine and map the file that it has written"
    return ChosenMedium("shared_memory", same)


def _no_broadcast(route: Route) -> str:
    """Text of the reason why the engines cannot receive weights by a collective; "" if they can."""
    if route.elsewhere:
        return "machines may join, which pull each version and verify every byte of it"
    return {
        "native": "the embedded engine maps the file of the trainer",
        "vllm": "vLLM's own transfer engines meet their sender by a communicator that only vLLM has",
        "sglang": "",
    }.get(route.engines, "only servers of SGLang take them by a collective")
