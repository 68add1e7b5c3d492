"""The machines of a run: this one alone, or those that `stretto_cluster` lets join."""

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
from stretto.loop.learner.link import RankStarter
from stretto.loop.records.tenure import Tenure
from stretto.processes.spawn import Spawner
from stretto.store.folder.run_folder import RunFolder

_PACKAGES = ("stretto_app", "stretto_cluster")


class Machines(Protocol):
    """Other machines in a run: where they join, how weights reach them, and what they bring."""

    @property
    def ranks(self) -> RankStarter | None:
        """Starts ranks of the trainer on other machines; None: there are none."""
        ...

    async def open(self) -> None:
        """Let machines join.

        Raises:
            RecipeError: an address cannot be had.
        """
        ...

    async def supervise(self) -> NoReturn:
        """Keep what serves other machines alive.

        Raises:
            RoleDied: a part of it dies too often.
        """
        ...

    def drain_spans(self) -> list[Span]:
        """The spans of other machines since the last call."""
        ...

    async def close(self, why: str, again: bool) -> None:
        """Dismiss every machine; `again`: the run may go on, and they may look for it."""
        ...


@dataclass(frozen=True)
class MachineParts:
    """What other machines of a run work with."""

    plan: Plan
    folder: RunFolder
    endpoints: Endpoints
    engines: EnginePool
    report: Callable[[str], None]
    spawner: Spawner
    tenure: Tenure


@dataclass(frozen=True)
class ThisMachine:
    """A run on this machine alone, without `stretto scale`."""

    parts: MachineParts
    ranks: None = None

    async def open(self) -> None:
        """Say how weights reach the engines."""
        medium = medium_of(self.parts.plan.recipe)
        self.parts.report(f"weights.medium is {medium.medium}: {medium.reason}")

    async def supervise(self) -> NoReturn:
        """There is nothing to keep alive."""
        await asyncio.get_running_loop().create_future()
        raise AssertionError("nobody sets it")

    def drain_spans(self) -> list[Span]:
        """None: the roles of this machine say theirs themselves."""
        return []

    async def close(self, why: str, again: bool) -> None:
        """There is none to dismiss."""


def machines_of(parts: MachineParts) -> Machines:
    """The machines of a run. Where the package for other machines is installed, its gate serves runs of one machine
    too: `stretto scale` speaks to it.

    Raises:
        RecipeError: the recipe has other machines, and the package is missing, or of another version.
    """
    if not parts.plan.recipe.has_machines and not is_there(*_PACKAGES):
        return ThisMachine(parts)
    machines: Machines = from_package("stretto_app.extensions.machines:cluster_of", "cluster", *_PACKAGES)(parts)
    return machines
