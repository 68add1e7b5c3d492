"""Options of `stretto plan` besides the recipe, checked before large libraries are imported."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import msgspec

from stretto.core.errors import Problem, RecipeError, nearest, several
from stretto_foresight.planner.lengths import check_lengths
from stretto_foresight.planner.machine import MachineProfile, machine_of

#: Quantities that the best layout may minimise.
GOALS = ("time", "cost", "staleness")
_UNITS = {"mbit": 1e6, "gbit": 1e9, "tbit": 1e12}
_REACHED = 0.8  # achieved share of a network's nominal rate


@dataclass(frozen=True)
class PlanChoice:
    """Options of `stretto plan` besides the recipe, as given. `machine`: file or name. `gpus`: devices, None: predict
    the recipe's own layout. `nodes`: over which these are spread; None: nodes of the machine's size. `network`: rate of
    one device to other nodes ("400gbit"). `lengths`: of completions. `run`: folder of the predicted run, into which the
    plan is written."""

    machine: str
    gpus: int | None = None
    nodes: int | None = None
    network: str | None = None
    goal: str = "time"
    lengths: str | None = None
    run: Path | None = None


def machine_chosen(choice: PlanChoice) -> MachineProfile:
    """Load the chosen machine, with the chosen nodes and network, and check the other options.

    Raises:
        UserError: an option is wrong.
    """
    if choice.goal not in GOALS:
        raise RecipeError([Problem(f"--goal {choice.goal}", "no such goal", nearest(choice.goal, GOALS))])
    if choice.lengths is not None:
        check_lengths(choice.lengths)
    return _connected(machine_of(choice.machine), choice)


def _connected(machine: MachineProfile, choice: PlanChoice) -> MachineProfile:
    """The machine with the chosen nodes and network; RecipeError if they do not fit."""
    changes: dict[str, object] = {}
    if choice.gpus is not None and choice.gpus < 2:
        raise RecipeError([Problem(f"--gpus {choice.gpus}", "one trains and one generates", "at least 2")])
    if choice.nodes is not None:
        gpus = choice.gpus or 0
        if choice.nodes < 1 or gpus % choice.nodes or not gpus:
            found = f"{gpus or 'no'} GPUs cannot be shared out to {several(choice.nodes, 'node')}"
            raise RecipeError([Problem(f"--nodes {choice.nodes}", found, "give --gpus as a multiple of --nodes")])
        changes["node_devices"] = gpus // choice.nodes
    if choice.network is not None:
        rate = re.fullmatch(r"(\d+(?:\.\d+)?)(mbit|gbit|tbit)", choice.network.lower())
        if rate is None or not float(rate[1]):
            remedy = "bits per second of one device, such as 400gbit"
            raise RecipeError([Problem(f"--network {choice.network}", "is no rate", remedy)])
        changes["network_bandwidth"] = _REACHED * float(rate[1]) * _UNITS[rate[2]] / 8
    return msgspec.structs.replace(machine, **changes)
