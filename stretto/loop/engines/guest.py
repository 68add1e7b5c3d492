"""An engine on a machine that has joined the run."""

from __future__ import annotations

import secrets
import ssl
from collections.abc import Callable

from stretto.cluster.machine import JoinedMachine
from stretto.core.errors import EngineLost, MachineLost
from stretto.engine.http.client import HttpEngine
from stretto.engine.spec import ENGINE_KEY, EngineSpec
from stretto.loop.config import DeadlinesConfig
from stretto.loop.engines.handle import EngineHandle
from stretto.processes.role import RestartBudget


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
        self._machine, self._seconds = machine, deadlines.load

    async def update(self, version: int) -> int:
        """As `HttpEngine.update`; the machine may have pulled a newer version by then, which is loaded instead."""
        try:
            version = await self._machine.until_mirrored(version, self._seconds)
        except MachineLost as loss:
            raise EngineLost(self.name, str(loss)) from None
        return await super().update(version)


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
