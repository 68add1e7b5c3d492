"""The trainer's process as the conductor sees it: three orders, each answered within its deadline."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from typing import NoReturn, TypeVar

import msgspec

from stretto.core.errors import RoleDied, RoleError, RoleFailed
from stretto.core.events import Span
from stretto.core.records import Batch, Update
from stretto.launch.channel import ConductorEnd
from stretto.launch.config import DeadlinesConfig
from stretto.launch.messages import (
    FROM_TRAINER,
    Failed,
    FromTrainer,
    Ready,
    SaveCheckpoint,
    Saved,
    SavePolicy,
    Stop,
    Train,
    Trained,
)
from stretto.launch.process import RoleProcess
from stretto.launch.trainer_role import TrainerSpec

_LAST_ANSWER_SECONDS = 1.0

Answer = TypeVar("Answer", Ready, Trained, Saved)


class TrainerLink:
    """One order at a time; the answers come in the order of the orders."""

    def __init__(self, log: Path, deadlines: DeadlinesConfig) -> None:
        self.process = RoleProcess("trainer", "stretto.launch.trainer_role", log)
        self._spans: list[Span] = []
        self._spanned = 0.0  # seconds
        self._began: float | None = None  # when the order under way was given
        self._deadlines = deadlines
        self._channel: ConductorEnd[FromTrainer] = ConductorEnd("trainer", FROM_TRAINER, str(log))
        self._turn = asyncio.Lock()
        self._abandoned = False  # an order was given up before its answer came

    async def start(self, spec: TrainerSpec) -> Ready:
        """Start the process; when this returns its version is published."""
        descriptor = self._channel.far.fileno()
        await self.process.start(msgspec.structs.replace(spec, descriptor=descriptor), spec.threads, (descriptor,))
        await self._channel.open()
        return await self._receive(Ready, "to be ready", self._deadlines.start)

    async def train(self, batch: Batch) -> Update:
        """Train on the batch; when this returns the next version is published."""
        async with self._order():
            await self._send(Train(batch=batch))
            trained = await self._receive(Trained, f"to finish step {batch.step}", self._deadlines.step)
            self._keep(trained.spans)
        return trained.update

    async def save_checkpoint(self, folder: Path) -> None:
        """Write what training needs to go on; durable only once the store has committed the folder."""
        await self._save(SaveCheckpoint(folder=str(folder)), f"to write {folder.name}")

    async def save_policy(self, folder: Path) -> None:
        """Write a Hugging Face folder."""
        await self._save(SavePolicy(folder=str(folder)), f"to write policy {folder.name}")

    async def _save(self, order: SaveCheckpoint | SavePolicy, awaited: str) -> None:
        async with self._order():
            await self._send(order)
            saved = await self._receive(Saved, awaited, self._deadlines.save)
            self._keep([saved.span])

    @contextlib.asynccontextmanager
    async def _order(self) -> AsyncIterator[None]:
        async with self._turn:
            self._began = time.monotonic()
            try:
                yield
            finally:
                self._began = None

    async def _send(self, order: Train | SaveCheckpoint | SavePolicy) -> None:
        try:
            await self._channel.send(order)
        except RoleDied:
            raise RoleDied("trainer", await self.process.last_words(), str(self.process.log)) from None

    async def supervise(self) -> NoReturn:
        """Wait until the process ends, which it does only when it should not.

        Raises:
            RoleDied: it has ended; whoever waits for an answer hears it first, with what the trainer had to say.
        """
        how = await self.process.ended()
        await asyncio.sleep(_LAST_ANSWER_SECONDS)
        raise RoleDied("trainer", how, str(self.process.log))

    async def _receive(self, kind: type[Answer], awaited: str, seconds: float) -> Answer:
        self._abandoned = True
        try:
            answer = await self._channel.receive(awaited, seconds)
        except RoleDied:
            raise RoleDied("trainer", await self.process.last_words(), str(self.process.log)) from None
        self._abandoned = False
        if isinstance(answer, Failed):
            raise RoleFailed("trainer", answer.problem, answer.exit_code)
        if not isinstance(answer, kind):
            raise RoleDied("trainer", f"answered {type(answer).__name__} in place of {kind.__name__}")
        return answer

    def _keep(self, spans: Iterable[Span]) -> None:
        for span in spans:
            self._spans.append(span)
            self._spanned += span.end - span.start

    @property
    def busy_seconds(self) -> float:
        """Seconds of its spans; the order under way, which has none yet, counts from when it was given."""
        return self._spanned + (time.monotonic() - self._began if self._began is not None else 0.0)

    def drain_spans(self) -> list[Span]:
        """The spans since the last call."""
        spans, self._spans = self._spans, []
        return spans

    @property
    def ready(self) -> bool:
        """Is it there, and is no order under way?"""
        return self._channel.is_open and self.process.running and not self._turn.locked() and not self._abandoned

    async def stop(self, grace: float) -> None:
        """Ask it to end; it is gone when this returns."""
        if self.ready:
            with contextlib.suppress(RoleError):  # it is on its way out already; process.stop() waits for it
                await self._channel.send(Stop())
        self._channel.close()
        await self.process.stop(grace)
