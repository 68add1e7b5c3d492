"""Agents on a Ray cluster: start, order and replace the placer's process (`stretto_cluster.ray_placer`)."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import msgspec

from stretto.core.deadlines import deadline
from stretto.core.errors import DeadlineExceeded, Problem, RecipeError, RoleDied, RoleFailed
from stretto.loop.config import DeadlinesConfig
from stretto.processes.channel import ConductorEnd, Failed
from stretto.processes.role import RoleProcess
from stretto.processes.spawn import FRESH, TOKEN
from stretto.processes.supervisor import RestartBudget, Supervisor
from stretto_cluster.placing import FROM_PLACER, RAY_PLACER, FromPlacer, NotPlaced, PlaceAgents, RayPlacerSpec

_NAME = "the placer of Ray"
_GRACE = 5.0
_PAUSE_SECONDS = 2.0  # a cluster that has lost a node may get a new one
_USERS_MISTAKE = RecipeError.exit_code


def placing_seconds(wait: float) -> float:
    """Time limit of an order in seconds: Ray finds resources, starts agents and reports their nodes, each within `wait`
    seconds."""
    return 3 * wait


@dataclass
class RayAgents:
    """Keeps the wanted number of agents on a Ray cluster, by a placer process, which `place` starts.

    Attributes:
        log: log file of the placer.
        spec: what the placer is started with.
        token: the run's, for the agents; it reaches the placer in its environment.
        say: gets sentences for the log of the run.
        module: Python module of the placer.
        pause: seconds before a failed order is repeated; doubled after each failure.
    """

    deadlines: DeadlinesConfig
    log: Path
    spec: RayPlacerSpec
    token: str
    say: Callable[[str], None]
    module: str = RAY_PLACER
    pause: float = _PAUSE_SECONDS

    def __post_init__(self) -> None:
        # Started without heartbeat: Ray's own threads manage its processes.
        self._process = RoleProcess(_NAME, self.module, self.log, spawner=FRESH)
        allowed, window = self.deadlines.engine_restarts, self.deadlines.restart_window
        restarts = RestartBudget(allowed, window, delay=self.pause, factor=2.0)
        self._supervisor = Supervisor(_NAME, self._place_anew, restarts, self.say, str(self.log))
        self._channel: ConductorEnd[FromPlacer] | None = None
        self._order = PlaceAgents(engines=0)  # last order that was carried out
        self._numbers = itertools.count(1)
        self._one = asyncio.Lock()

    async def place(self, engines: int, ranks: int) -> None:
        """Place agents for this many engines and ranks; they join the run by themselves. A failure leaves the present
        agents, unless the placer died.

        Raises:
            RecipeError: Ray does not run, or has too few resources.
            RoleFailed, RoleDied, DeadlineExceeded: the placer failed.
        """
        async with self._one:
            if self._channel is None:
                await self._start()
            await self._ask(PlaceAgents(engines=engines, ranks=ranks))

    async def _start(self) -> None:
        if self._channel is not None:
            self._channel.close()
        self._channel = channel = ConductorEnd(_NAME, FROM_PLACER, str(self.log))
        spec = msgspec.structs.replace(self.spec, descriptor=channel.far.fileno())
        await self._process.start(spec, 1, (channel.far.fileno(),), environment={TOKEN: self.token})
        await channel.open(self._process.ended)

    async def _ask(self, order: PlaceAgents) -> None:
        assert self._channel is not None, "_start() comes first"
        order = msgspec.structs.replace(order, number=next(self._numbers))
        await self._channel.send(order)
        reply = await self._reply(self._channel, order.number)
        if isinstance(reply, Failed):
            await self._process.last_words()
        if isinstance(reply, Failed | NotPlaced):
            if reply.exit_code == _USERS_MISTAKE:
                raise RecipeError([Problem("Ray", reply.problem)])
            raise RoleFailed(_NAME, reply.problem, reply.exit_code)
        self._order = order
        ranks = f" and {order.ranks} rank(s)" if order.ranks else ""
        nodes = ", ".join(sorted(set(reply.nodes)))
        self.say(f"Ray has placed {order.engines} engine(s){ranks} on the nodes {nodes}")

    async def _reply(self, channel: ConductorEnd[FromPlacer], number: int) -> FromPlacer:
        """Wait for the reply to the order `number`. Late replies to earlier orders are dropped. Raises DeadlineExceeded
        if none comes in time."""
        async with deadline("conductor", f"{_NAME} to place agents", placing_seconds(self.spec.seconds)):
            while True:
                reply = await channel.next()
                if isinstance(reply, Failed) or reply.number == number:
                    return reply

    async def supervise(self) -> NoReturn:
        """Replace the placer when it dies, and its agents, which end with it.

        Raises:
            RoleDied: it died too often, or its agents cannot be placed again.
        """
        while True:
            await self._supervisor.replace(await self._process.ended())
            self._supervisor.restarts.progressed()

    async def _place_anew(self) -> None:
        """Repeat the last order, with a new placer unless one is running; RoleDied if the order fails."""
        async with self._one:
            try:
                if not self._process.running:
                    await self._start()
                await self._ask(self._order)
            except DeadlineExceeded as error:
                self._process.kill()  # it may hang; a new placer places the agents again
                how = f"{error}; {await self._process.last_words()}"
            except RoleDied as error:
                how = await self._process.last_words() if self._process.running else error.how
            except RoleFailed as error:
                how = error.problem
            except RecipeError as error:  # the cluster has shrunk since the run started
                how = str(error)
            else:
                return
        raise RoleDied(_NAME, how)

    async def close(self) -> None:
        """End the placer, if it has been started, and so its agents."""
        if self._channel is not None:
            self._channel.close()
        await self._process.stop(_GRACE)
