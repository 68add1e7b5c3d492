"""An engine on a machine that has joined the run."""

from __future__ import annotations

import asyncio
import secrets
import ssl
from collections.abc import AsyncIterator, Callable

from stretto.cluster.machine import SILENT_SECONDS, JoinedMachine
from stretto.core.errors import DeadlineExceeded, EngineLeft, EngineLost, MachineLost
from stretto.core.records import Completion, GenerateRequest
from stretto.engine.http.client import HttpEngine
from stretto.engine.spec import ENGINE_KEY, EngineSpec
from stretto.loop.config import DeadlinesConfig
from stretto.loop.engines.handle import EngineHandle
from stretto.processes.role import RestartBudget

_NEWS_SECONDS = 0.5
_PULL_SECONDS = 900.0  # its mirror gives up before


class GuestEngine(HttpEngine):
    """The client of an engine on another machine: a version is transferred there before the engine pauses for it."""

    def __init__(
        self,
        spec: EngineSpec,
        machine: JoinedMachine,
        deadlines: DeadlinesConfig,
        key: str,
        context: ssl.SSLContext | None,
    ) -> None:
        super().__init__(
            spec.name,
            spec.address,
            answer_seconds=deadlines.answer,
            load_seconds=deadlines.load,
            health_seconds=deadlines.answer,
            key=key,
            context=context,
        )
        self._machine = machine

    async def generate(self, *requests: GenerateRequest) -> AsyncIterator[Completion]:
        """As `HttpEngine.generate`; an engine that does not answer is lost to the run, and does not end it.

        Raises:
            EngineLeft: its machine is what was lost, or has fallen silent.
        """
        try:
            async for completion in super().generate(*requests):
                yield completion
        except (EngineLost, DeadlineExceeded) as loss:
            how = loss.how if isinstance(loss, EngineLost) else str(loss)
            raise (EngineLeft if await self._machine_is_gone() else EngineLost)(self.name, how) from None

    async def _machine_is_gone(self) -> bool:
        """When a machine goes, the connections to its engines may break before the one to its agent."""
        if self._machine.silence > SILENT_SECONDS:
            return True
        await asyncio.wait([self._machine.lost], timeout=_NEWS_SECONDS)
        return self._machine.lost.done()

    async def update(self, version: int) -> int:
        """As `HttpEngine.update`; the machine may have pulled a newer version by then, which is loaded instead. A pull
        may take as long as its machine's mirror allows: one that takes too long makes the engine lag."""
        try:
            version = await self._machine.until_mirrored(version, _PULL_SECONDS)
            return await super().update(version)
        except (MachineLost, DeadlineExceeded) as loss:
            raise EngineLost(self.name, str(loss)) from None


def guest(
    spec: EngineSpec,
    place: int,
    machine: JoinedMachine,
    role: str,
    deadlines: DeadlinesConfig,
    changed: Callable[[EngineHandle], None],
    load_interval: float,
    context: ssl.SSLContext | None,
) -> EngineHandle:
    """The engine in a place of a machine, not started yet; `role` is the module of its process."""
    key = secrets.token_hex(32)
    process = machine.role(place, spec.name, role, {ENGINE_KEY: key})
    client = GuestEngine(spec, machine, deadlines, key, context)
    restarts = RestartBudget(deadlines.engine_restarts, deadlines.restart_window)
    return EngineHandle(spec, process, client, deadlines, restarts, changed, load_interval, machine.host)
