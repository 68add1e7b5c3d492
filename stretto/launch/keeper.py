"""What is kept of a run beside its ledger: checkpoints to go on from, policies to look at, evaluations on the way."""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec

from stretto.core.deadlines import deadline
from stretto.core.events import Span
from stretto.core.records import Record, Update
from stretto.launch.config import DeadlinesConfig
from stretto.launch.evaluation import Evaluation
from stretto.launch.recorder import Past, Recorder
from stretto.launch.stopping import put_away
from stretto.launch.trainer_link import TrainerLink
from stretto.rollout.controller import Controller
from stretto.rollout.prompts import Position
from stretto.store.checkpoints import Checkpoints
from stretto.store.run_folder import RunFolder
from stretto.trainer.config import TrainerConfig

_CONDUCTOR = "conductor.json"


class ConductorState(Record, frozen=True):
    """The conductor's part of a checkpoint: where the prompts stand, and what the run has come to."""

    step: int
    position: Position
    past: Past


def read_conductor_state(checkpoint: Path) -> ConductorState:
    """The conductor's part of a checkpoint that the store has verified."""
    return msgspec.json.decode((checkpoint / _CONDUCTOR).read_bytes(), type=ConductorState)


class Keeper:
    """After each step: a policy, a checkpoint, an evaluation, where they are due."""

    def __init__(
        self,
        folder: RunFolder,
        checkpoints: Checkpoints,
        config: TrainerConfig,
        trainer: TrainerLink,
        controller: Controller,
        recorder: Recorder,
        deadlines: DeadlinesConfig,
    ) -> None:
        self._folder, self._checkpoints, self._config = folder, checkpoints, config
        self._trainer, self._controller, self._recorder = trainer, controller, recorder
        self._deadlines = deadlines
        self.saved_step = controller.published

    async def after(self, update: Update) -> None:
        """The step of `update` is published and recorded."""
        due = update.step % self._config.checkpoint_every == 0
        if due:
            await self.save_checkpoint()
        if self._config.keep_versions == "all" or due:
            await self.save_policy(update.version)

    async def save_policy(self, version: int) -> None:
        """``policy/v...``; the oldest leave if only the newest so many are to be kept (the start always stays)."""
        if self._folder.policy(version).exists():  # which appears whole
            return
        await self._trainer.save_policy(self._folder.policy(version))
        if self._config.keep_versions != "all":
            saved = sorted(path for path in self._folder.policies.glob("v*") if path != self._folder.policy(0))
            for path in saved[: -self._config.keep_versions]:
                shutil.rmtree(path)

    async def save_checkpoint(self) -> None:
        """Everything from which the run can go on; nothing to do if this step has one."""
        step = self._controller.published
        if step == self.saved_step:
            return
        past = Past.of(self._recorder.totals())
        state = ConductorState(step=step, position=self._controller.position(), past=past)
        loop = asyncio.get_running_loop()

        def write(folder: Path) -> None:
            # An order that always ends, because it has a deadline of its own.
            asyncio.run_coroutine_threadsafe(self._trainer.save_checkpoint(folder), loop).result()
            (folder / _CONDUCTOR).write_bytes(msgspec.json.encode(state))

        # As much again for the disk as the trainer has for writing.
        async with deadline("conductor", f"the checkpoint of step {step} to be on disk", 2 * self._deadlines.save):
            await asyncio.to_thread(self._checkpoints.save, step, write)
        self.saved_step = step


class Examiner:
    """Evaluates now and then beside the training, one evaluation at a time."""

    def __init__(self, evaluate: Callable[[], Awaitable[Evaluation]], recorder: Recorder, every: int) -> None:
        self._evaluate, self._recorder, self._every = evaluate, recorder, every
        self._running: asyncio.Task[None] | None = None

    def after(self, update: Update) -> None:
        """Start an evaluation if one is due and none is under way."""
        if self._every and update.step % self._every == 0 and (self._running is None or self._running.done()):
            self.check()
            self._running = asyncio.create_task(self.examine(update.step))

    async def examine(self, step: int) -> None:
        """Evaluate and record."""
        start = time.monotonic()
        evaluation = await self._evaluate()
        self._recorder.evaluated(evaluation, step)
        span = Span(role="conductor", name="evaluate", start=start, end=time.monotonic(), version=evaluation.version)
        self._recorder.spans([span])

    def check(self) -> None:
        """Raise what the last evaluation failed of, if it did."""
        if self._running is not None and self._running.done() and not self._running.cancelled():
            self._running.result()

    async def end(self) -> None:
        """Wait for the evaluation under way; each of its waits has a deadline."""
        if self._running is not None:
            await self._running

    async def close(self) -> None:
        """Put the evaluation under way away, if there is one."""
        if self._running is not None:
            await put_away([self._running])
