"""Saving the checkpoints and policies of a run when they are due."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from stretto.core.deadlines import deadline
from stretto.core.errors import CheckpointLost, StoreError
from stretto.core.records import Update
from stretto.core.tasks import cancel_and_wait, first_of, in_daemon_thread
from stretto.loop.config import DeadlinesConfig
from stretto.loop.trainer_link import TrainerLink
from stretto.rollout.controller import Controller
from stretto.store.checkpoints import Checkpoints
from stretto.store.run_folder import RunFolder
from stretto.trainer.config import TrainerConfig

if TYPE_CHECKING:  # a loop without a ledger loads no SQLite
    from stretto.store.ledger.ledger import Ledger


class Checkpointing:
    """Saves checkpoints (the trainer's whole state, every `trainer.checkpoint_every` steps) and policies (models that
    can be loaded, as many as `trainer.keep_versions` says). `saved_step`: the newest step with a checkpoint on disk; 0:
    none."""

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
        self.saved_step = saved_step
        self._started_step = saved_step
        self._saving: asyncio.Task[None] | None = None
        self._thread: Future[Path] | None = None  # that writes the newest checkpoint
        self._lost = 0  # consecutive checkpoints whose trainer died while writing

    async def after(self, update: Update) -> None:
        """Save what is due after the step of `update`, which is published and recorded. A checkpoint is due every
        `checkpoint_every` steps, and after one that was lost. A policy is due every `checkpoint_every` steps, or after
        every step if `keep_versions` is "all".

        On return, the policy is saved, and the trainer can train on. The checkpoint may still be on its way to disk.
        Raises the error of an earlier checkpoint that failed, or of saving this policy.
        """
        if self._saving is not None and self._saving.done():
            self._saving.result()
        due = update.step % self._config.checkpoint_every == 0
        if due or self._lost:
            await self._begin_checkpoint()
        if self._config.keep_versions == "all" or due:
            await self.save_policy(update.version)

    async def save_policy(self, version: int) -> None:
        """Save the trainer's policy as ``policy/v...``, then remove the oldest policies beyond `trainer.keep_versions`;
        version 0 always stays. Does nothing if the policy is saved already. `version`: the version that the trainer is
        at.

        Raises:
            StoreError: the folder of the policies has vanished.
            RoleDied, RoleFailed: the trainer died too often, or reported an error.
            DeadlineExceeded: it took longer than `deadlines.save`.
        """
        if self._folder.policy(version).exists():  # the folder is renamed into place, so it is complete
            return
        if not (self._folder.is_ours() and self._folder.policies.is_dir()):
            raise StoreError(f"{self._folder.policies}: no longer exists")
        await self._trainer.save_policy(self._folder.policy(version))
        if self._config.keep_versions != "all":
            saved = [path for number, path in self._folder.saved_policies() if number]
            for path in saved[: -self._config.keep_versions]:
                shutil.rmtree(path)

    async def save_checkpoint(self) -> None:
        """Save a checkpoint of the newest step and wait until it is on disk. Does nothing if this step has one. If the
        trainer dies meanwhile, saves it again; raises CheckpointLost after more than `deadlines.trainer_restarts` lost
        ones in a row, and the errors of `Checkpoints.save` and `TrainerLink.save_checkpoint`."""
        while True:
            await self._begin_checkpoint()
            await self.end()
            if self.saved_step == self._controller.published:
                return

    async def end(self) -> None:
        """Wait until the checkpoint in progress, if any, is on disk, or lost because the trainer died (`saved_step`
        then stays). Raises its error, if it failed. Its writing has a deadline."""
        if self._saving is not None:
            await self._saving

    async def close(self, say: Callable[[str], None], left_by: type[BaseException] | None = None, *_: object) -> None:
        """Wait until the thread of the checkpoint in progress, if any, has completed it or left no trace of it; `say`
        is told. To be called once the trainer has ended. A thread that a disk holds up for more than `deadlines.save`
        seconds is left behind, and dies with the process; at once if the run is cut short (`left_by`: class of the
        error that ends it, CancelledError then). The run folder stays locked until it has ended."""
        if self._saving is not None:
            await cancel_and_wait([self._saving])
        cut_short = left_by is not None and issubclass(left_by, asyncio.CancelledError)
        if self._thread is not None and not self._thread.done() and not cut_short:
            most = f"for {self._deadlines.save:g} s at most"
            say(f"waits for the checkpoint of step {self._started_step} to be on disk, {most}")
            ended = asyncio.wrap_future(self._thread)
            await asyncio.wait([ended], timeout=self._deadlines.save)
            await cancel_and_wait([ended])
        if self._thread is not None and not self._thread.done():
            self._folder.held_until(self._thread)

    async def _begin_checkpoint(self) -> None:
        """Wait for the checkpoint in progress, then sync the ledger and start a checkpoint of the newest step; returns
        when the trainer has copied its state. Starts none if one of this step was started before and not lost. Raises
        StoreError if the folder of checkpoints has vanished, or the error of either checkpoint."""
        await self.end()
        step = self._controller.published
        if step == self._started_step:
            return
        if self.saved_step and not self._folder.checkpoints.is_dir():
            raise StoreError(f"{self._folder.checkpoints}: no longer exists")
        self._ledger.sync()
        self._started_step, copied = step, asyncio.get_running_loop().create_future()
        self._saving = asyncio.create_task(self._save(step, copied))
        await first_of(self._saving, copied)
        if self._saving.done():
            self._saving.result()

    async def _save(self, step: int, copied: asyncio.Future[None]) -> None:
        """Write, seal and fsync a checkpoint; `copied` is done when the trainer has copied its state. Then the ledger
        deletes what no resume needs any more (`Ledger.forget`).

        If the trainer dies meanwhile, returns without a checkpoint, and `after` tries again at the next step. After
        more than `deadlines.trainer_restarts` such attempts in a row, raises CheckpointLost. Raises DeadlineExceeded if
        a checkpoint takes longer than 3 × `deadlines.save`.
        """
        loop, on_copied = asyncio.get_running_loop(), partial(copied.set_result, None)

        def write(folder: Path) -> None:
            # No timeout here: save_checkpoint has deadlines of its own.
            asyncio.run_coroutine_threadsafe(self._trainer.save_checkpoint(folder, on_copied), loop).result()

        # One `deadlines.save` for the copy, one for the trainer's writing, one for checksums and fsync.
        async with deadline("conductor", f"the checkpoint of step {step} to be on disk", 3 * self._deadlines.save):
            try:
                self._thread = in_daemon_thread(partial(self._checkpoints.save, step, write), f"checkpoint {step}")
                await asyncio.wrap_future(self._thread)
            except CheckpointLost as lost:
                self._ledger.event("checkpoint", str(lost))
                self._started_step, self._lost = self.saved_step, self._lost + 1
                if self._lost > self._deadlines.trainer_restarts:
                    raise
                return
        self.saved_step, self._lost = step, 0
        self._ledger.forget(self._checkpoints.steps()[0])
