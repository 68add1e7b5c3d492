"""Machines of a run: this one alone, or others too through `stretto_cluster`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn, Protocol

from stretto.core.events import Span
from stretto.doors.packages import from_package, is_there
from stretto.launch.assemble.specs import Endpoints
from stretto.launch.preflight.checks import medium_of
from stretto.launch.preflight.plan import Plan
from stretto.loop.engines.pool import EnginePool
from stretto.loop.learner.link import StartRanks
from stretto.loop.records.tenure import Tenure
from stretto.processes.spawn import Spawner
from stretto.store.folder.run_folder import RunFolder

_PACKAGES = ("stretto_app", "stretto_cluster")


class Machines(Protocol):
    """Other machines of a run: the port where they join, the weights they receive, the ranks and engines they run
    (Protocol)."""

    @property
    def ranks(self) -> StartRanks | None:
        """Starter of trainer ranks on other machines; None if there are none."""
        ...

    async def open(self) -> None:
        """Let machines join.

        Raises:
            RecipeError: an address cannot be had.
        """
        ...

    async def supervise(self) -> NoReturn:
        """Keep the services for other machines alive.

        Raises:
            RoleDied: one of them dies too often.
        """
        ...

    def drain_spans(self) -> list[Span]:
        """Spans of other machines since the last call."""
        ...

    async def close(self, why: str, again: bool) -> None:
        """Dismiss every machine with the reason `why`. `again`: the run may be resumed, so they may look for it."""
        ...


@dataclass(frozen=True)
class MachineParts:
    """Parts of a run that `Machines` need."""

    plan: Plan
    folder: RunFolder
    endpoints: Endpoints
    engines: EnginePool
    report: Callable[[str], None]
    spawner: Spawner
    tenure: Tenure


@dataclass(frozen=True)
class ThisMachine:
    """A run on this machine alone, without `stretto scale` (satisfies `Machines`)."""

    parts: MachineParts
    ranks: None = None

    async def open(self) -> None:
        """Log how weights reach the engines."""
        medium = medium_of(self.parts.plan.recipe)
        self.parts.report(f"weights.medium is {medium.medium}: {medium.reason}")

    async def supervise(self) -> NoReturn:
        """Wait forever: nothing needs to be kept alive."""
        await asyncio.get_running_loop().create_future()
        raise AssertionError("nobody sets it")

    def drain_spans(self) -> list[Span]:
        """Empty: local roles report their spans themselves."""
        return []

    async def close(self, why: str, again: bool) -> None:
        """Do nothing: no machine has joined."""


def machines_of(parts: MachineParts) -> Machines:
    """The machines of a run. Where `stretto_cluster` is installed, its gate also serves runs on one machine, for
    `stretto scale`.

    Raises:
        RecipeError: the recipe names other machines, and the package is missing or of another version.
    """
    if not parts.plan.recipe.has_machines and not is_there(*_PACKAGES):
        return ThisMachine(parts)
    machines: Machines = from_package("stretto_app.extensions.machines:cluster_of", "cluster", *_PACKAGES)(parts)
    return machines
