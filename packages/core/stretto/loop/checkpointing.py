"""Checkpoints, policies and evaluations of a run, each when it is due."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from stretto.core.deadlines import deadline
from stretto.core.errors import CheckpointLost, StoreError
from stretto.core.records import Update
from stretto.core.tasks import cancel_and_wait
from stretto.loop.config import DeadlinesConfig
from stretto.loop.learner.link import TrainerLink
from stretto.rollout.controller import Controller
from stretto.store.folder.checkpoints import Checkpoints
from stretto.store.folder.run_folder import RunFolder
from stretto.trainer.config import TrainerConfig

if TYPE_CHECKING:  # a loop without a ledger loads no SQLite
    from stretto.store.ledger.ledger import Ledger


class Checkpointing:
    """Saves a policy or a checkpoint, or starts an evaluation, after each step where one is due."""

    def __init__(
        self,
        folder: RunFolder,
        checkpoints: Checkpoints,
        config: TrainerConfig,
        trainer: TrainerLink,
        controller: Controller,
        ledger: Ledger,
        deadlines: DeadlinesConfig,
        saved_step: int = 0,
    ) -> None:
        self._folder, self._checkpoints, self._config = folder, checkpoints, config
        self._trainer, self._controller, self._ledger = trainer, controller, ledger
        self._deadlines = deadlines
        self.saved_step = saved_step  # the newest step with a checkpoint on disk
        self._started_step = saved_step
        self._saving: asyncio.Task[None] | None = None
        self._lost = 0  # consecutive checkpoints whose trainer died while writing

    async def after(self, update: Update) -> None:
        """Do what is due after the published and recorded step of `update`. A checkpoint may still be on its way to
        disk when this returns; the trainer has copied its state by then and continues."""
        if self._saving is not None and self._saving.done():
            self._saving.result()
        due = update.step % self._config.checkpoint_every == 0
        if due or self._lost:
            await self._begin_checkpoint()
        if self._config.keep_versions == "all" or due:
            await self.save_policy(update.version)

    async def save_policy(self, version: int) -> None:
        """Save the policy as ``policy/v...`` and remove the oldest ones beyond the number to keep; version 0 always
        stays.

        Raises:
            StoreError: the folder of the policies has vanished.
        """
        if self._folder.policy(version).exists():  # which appears whole
            return
        if not (self._folder.is_ours() and self._folder.policies.is_dir()):
            raise StoreError(f"{self._folder.policies}: no longer exists")
        await self._trainer.save_policy(self._folder.policy(version))
        if self._config.keep_versions != "all":
            saved = sorted(path for path in self._folder.policies.glob("v*") if path != self._folder.policy(0))
            for path in saved[: -self._config.keep_versions]:
                shutil.rmtree(path)

    async def save_checkpoint(self) -> None:
        """Save the trainer's state, so that earlier batches need not be trained again. Does nothing if this step has
        one."""
        while True:
            await self._begin_checkpoint()
            await self.end()
            if self.saved_step == self._controller.published:
                return

    async def end(self) -> None:
        """Wait, with a deadline, until the checkpoint in progress is on disk."""
        if self._saving is not None:
            await self._saving

    async def close(self) -> None:
        """Cancel the checkpoint in progress, if any; it leaves no trace."""
        if self._saving is not None:
            await cancel_and_wait([self._saving])

    async def _begin_checkpoint(self) -> None:
        """Start a checkpoint, one at a time; returns when the trainer has copied its state."""
        await self.end()
        step = self._controller.published
        if step == self._started_step:
            return
        if self.saved_step and not self._folder.checkpoints.is_dir():
            raise StoreError(f"{self._folder.checkpoints}: no longer exists")
        self._ledger.sync()
        self._started_step, copied = step, asyncio.Event()
        self._saving = asyncio.create_task(self._save(step, copied))
        waiting = asyncio.create_task(copied.wait())
        try:
            await asyncio.wait([self._saving, waiting], return_when=asyncio.FIRST_COMPLETED)
        finally:
            waiting.cancel()
        if self._saving.done():
            self._saving.result()

    async def _save(self, step: int, copied: asyncio.Event) -> None:
        """Write, seal and fsync a checkpoint. If the trainer dies meanwhile, the next step tries again; if every
        attempt kills it, the run ends."""
        loop = asyncio.get_running_loop()

        def write(folder: Path) -> None:
            # An order that always ends, because it has deadlines of its own.
            asyncio.run_coroutine_threadsafe(self._trainer.save_checkpoint(folder, copied.set), loop).result()

        # The trainer has so long to copy, and to write; the disk has as long again.
        async with deadline("conductor", f"the checkpoint of step {step} to be on disk", 3 * self._deadlines.save):
            try:
                await asyncio.to_thread(self._checkpoints.save, step, write)
            except CheckpointLost as lost:
                self._ledger.event("checkpoint", str(lost))
                self._started_step, self._lost = self.saved_step, self._lost + 1
                if self._lost > self._deadlines.trainer_restarts:
                    raise
                return
        self.saved_step, self._lost = step, 0
        self._ledger.forget(self._checkpoints.steps()[0])
