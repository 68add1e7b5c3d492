"""The machines of a run: this machine alone, or also others, through `stretto_cluster`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn

from stretto.core.events import Span
from stretto.doors.loading import from_package, is_there
from stretto.launch.assemble.specs import Endpoints
from stretto.launch.preflight.checks import medium_of
from stretto.launch.preflight.plan import Plan
from stretto.loop.engines.pool import EnginePool
from stretto.loop.records.totals import Tenure
from stretto.loop.trainer_link import StartRanks
from stretto.processes.spawn import Spawner
from stretto.store.run_folder import RunFolder

_PACKAGES = ("stretto_app", "stretto_cluster")


@dataclass(frozen=True)
class MachineParts:
    """Arguments for the `Machines` of a run. `report`: writes a log line."""

    plan: Plan
    folder: RunFolder
    endpoints: Endpoints
    engines: EnginePool
    report: Callable[[str], None]
    spawner: Spawner
    tenure: Tenure


class Machines:
    """Services of a run for other machines: the port at which they join, the weights that they receive, the ranks and
    engines that they run. This class is for a run on one machine, without these services and `stretto scale`."""

    ranks: StartRanks | None = None  # starts trainer ranks on other machines; None: there are no other machines

    def __init__(self, parts: MachineParts) -> None:
        self._parts = parts

    async def open(self) -> None:
        """Let machines join; this class only logs how weights reach the engines.

        Raises:
            RecipeError: an address cannot be listened on.
        """
        medium = medium_of(self._parts.plan.recipe)
        self._parts.report(f"weights.medium is {medium.medium}: {medium.reason}")

    async def supervise(self) -> NoReturn:
        """Replace services for other machines that die, until an error ends the run. Without services, wait forever.

        Raises:
            RoleDied: a service has used up its restart budget.
        """
        await asyncio.get_running_loop().create_future()
        raise AssertionError("nobody sets it")

    def drain_spans(self) -> list[Span]:
        """Return the time spans of other machines since the last call."""
        return []

    async def close(self, why: str, again: bool) -> None:
        """Dismiss all machines and end the services. `why`: the reason that machines are given; `again`: the run may be
        resumed, so machines may try to join it again."""


def machines_of(parts: MachineParts) -> Machines:
    """Return the machines of a run. If `stretto_cluster` is installed, its gate also serves runs on this machine alone,
    for `stretto scale`.

    Raises:
        RecipeError: the recipe needs other machines, and the package is missing or has another version.
    """
    if not parts.plan.recipe.has_machines and not is_there(*_PACKAGES):
        return Machines(parts)
    machines: Machines = from_package("stretto_app.extensions.machines:cluster_of", "cluster", *_PACKAGES)(parts)
    return machines
