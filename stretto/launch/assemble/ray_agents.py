"""Agents on a Ray cluster: the placer's process (`cluster.ray_placer`), started, asked and replaced."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn

import msgspec

from stretto.cluster.placing import FROM_PLACER, RAY_PLACER, FromPlacer, PlaceAgents, RayPlacerSpec
from stretto.core.errors import Problem, RecipeError, RoleDied, RoleFailed
from stretto.launch.preflight.plan import Plan
from stretto.processes.channel import ConductorEnd
from stretto.processes.role import RESTART_DELAY_SECONDS, RestartBudget, RoleProcess
from stretto.processes.run_role import Failed
from stretto.processes.spawn import FRESH
from stretto.store.folder.run_folder import RunFolder

_GRACE = 5.0
_USERS_MISTAKE = RecipeError.exit_code


@dataclass
class RayAgents:
    """How many agents there are to be, and the process that sees to it."""

    plan: Plan
    folder: RunFolder
    spec: RayPlacerSpec
    token: str
    say: Callable[[str], None]

    def __post_init__(self) -> None:
        deadlines = self.plan.recipe.deadlines
        self._log = self.folder.role_log("ray")
        # Ray's own threads start and stop its processes: no heartbeat is asked of them.
        self._process = RoleProcess("the placer of Ray", RAY_PLACER, self._log, spawner=FRESH)
        self._restarts = RestartBudget(deadlines.engine_restarts, deadlines.restart_window)
        self._channel: ConductorEnd[FromPlacer] | None = None
        self._order = PlaceAgents(engines=0)
        self._one = asyncio.Lock()

    async def place(self, engines: int, ranks: int) -> None:
        """Have agents for as many engines and ranks; they join by themselves.

        Raises:
            RecipeError: Ray is not there, or has too few resources.
            RoleFailed, RoleDied: the placer failed.
        """
        async with self._one:
            self._order = PlaceAgents(engines=engines, ranks=ranks)
            if self._channel is None:
                await self._start()
            await self._ask()

    async def _start(self) -> None:
        self._channel = channel = ConductorEnd("the placer of Ray", FROM_PLACER, str(self._log))
        spec = msgspec.structs.replace(self.spec, descriptor=channel.far.fileno())
        await self._process.start(spec, 1, (channel.far.fileno(),), environment={"STRETTO_TOKEN": self.token})
        await channel.open()

    async def _ask(self) -> None:
        assert self._channel is not None, "_start() comes first"
        await self._channel.send(self._order)
        reply = await self._channel.receive("to place agents", 3 * self.spec.seconds)
        if not isinstance(reply, Failed):
            ranks = f" and {self._order.ranks} rank(s)" if self._order.ranks else ""
            nodes = ", ".join(sorted(set(reply.nodes)))
            self.say(f"Ray has placed {self._order.engines} engine(s){ranks} on the nodes {nodes}")
            return
        if reply.exit_code == _USERS_MISTAKE:
            raise RecipeError([Problem("Ray", reply.problem)])
        raise RoleFailed("the placer of Ray", reply.problem, reply.exit_code)

    async def supervise(self) -> NoReturn:
        """Replace the placer when it dies, and its agents, which die with it.

        Raises:
            RoleDied: it dies too often.
        """
        while True:
            how = await self._process.ended()
            if self._restarts.exceeded_by_one_more():
                raise RoleDied("the placer of Ray", f"{how}, {len(self._restarts)} times", str(self._log))
            self.say(f"the placer of Ray {how}: a new one is started, and its agents join anew")
            await asyncio.sleep(RESTART_DELAY_SECONDS)
            async with self._one:
                await self._start()
                await self._ask()

    async def close(self) -> None:
        """End the placer, and so its agents."""
        if self._channel is not None:
            self._channel.close()
        await self._process.stop(_GRACE)
