"""Where an engine runs, as its handle sees it."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import msgspec


class EngineProcess(Protocol):
    """Where an engine runs: in a process of this machine (`processes.role`), or of another (`cluster.machine`)."""

    @property
    def log(self) -> Path: ...

    @property
    def clock_offset(self) -> float:
        """Seconds from its clock to ours."""
        ...

    @property
    def running(self) -> bool: ...

    @property
    def killed(self) -> bool: ...

    async def start(self, spec: msgspec.Struct, threads: int) -> None:
        """
        Raises:
            RoleDied: the system has no room for another process.
            MachineLost: its machine is gone.
        """
        ...

    async def ended(self) -> str: ...

    async def stop(self, grace: float) -> None: ...

    def kill(self) -> None: ...
