"""Receiving a trainer's messages: replies, in the order of the orders, and notices of written checkpoints and versions
in between."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable

from stretto.core.deadlines import deadline, standstill
from stretto.core.errors import UNREADABLE, RoleFailed, StrettoError, WireError
from stretto.processes.channel import ConductorEnd
from stretto.trainer.messages import CheckpointFailed, CheckpointSaved, FromTrainer, Published


class TrainerReplies:
    """Receives the messages of one trainer process, in a task that lives until the channel closes. `on_published`:
    called with the notice that engines can load a version, as it comes."""

    def __init__(self, channel: ConductorEnd[FromTrainer], on_published: Callable[[Published], None]) -> None:
        self._channel, self._on_published = channel, on_published
        self._replies: asyncio.Queue[FromTrainer | StrettoError] = asyncio.Queue()
        self._writing: dict[str, asyncio.Future[None]] = {}
        self._end: StrettoError | None = None
        self._task = asyncio.create_task(self._listen(), name="replies of the trainer")

    async def next(
        self, awaited: str, seconds: float, progress: Callable[[], Awaitable[object]] | None = None
    ) -> FromTrainer:
        """Wait for the next reply to an order (not for a notice of a checkpoint or version), and return it.

        Args:
            awaited: what is awaited, for the error message, such as "to finish step 7".
            seconds: deadline.
            progress: the deadline restarts whenever its result changes (`standstill`); None: it does not.

        Raises:
            DeadlineExceeded: no reply came within `seconds`.
            RoleDied: the trainer closed its end of the channel.
            WireError: a message cannot be decoded.
        """
        wait = "conductor", f"{self._channel.role} {awaited}", seconds
        async with deadline(*wait) if progress is None else standstill(*wait, progress):
            reply = await self._replies.get()
        if isinstance(reply, StrettoError):
            self._replies.put_nowait(reply)  # later callers get the same
            raise reply
        return reply

    async def saved(self, folder: str, seconds: float) -> None:
        """Wait until the trainer has written the checkpoint to `folder`, as it was named in the order; returns at once
        if it has. May be called once for an order.

        Raises:
            RoleDied: the trainer ended before.
            WireError: a message of the trainer cannot be decoded.
            RoleFailed: the checkpoint cannot be written.
            DeadlineExceeded: the writing took longer than `seconds`.
        """
        async with deadline("conductor", f"{self._channel.role} to write {folder}", seconds):
            await self._written(folder)
        self._writing.pop(folder, None)

    async def published(self, version: int, seconds: float) -> None:
        """Wait at most `seconds` until engines can load `version`. Raises DeadlineExceeded, or RoleDied or WireError as
        `saved`."""
        await self.saved(_name(version), seconds)

    async def _listen(self) -> None:
        """Sort messages into replies and notices until the channel ends; the error then goes to all callers of `next`,
        `saved` and `published`. There is no deadline: the link closes the channel."""
        while True:
            try:
                message = await self._channel.next()
            except (StrettoError, *UNREADABLE) as found:
                unread = f"{self._channel.role}: its message cannot be read: {found}"
                error = found if isinstance(found, StrettoError) else WireError(unread)
                self._end = error
                self._replies.put_nowait(error)
                for written in self._writing.values():
                    _fail(written, error)
                return
            match message:
                case CheckpointSaved(folder):
                    with contextlib.suppress(asyncio.InvalidStateError):  # nobody waits for it any more
                        self._written(folder).set_result(None)
                case CheckpointFailed(folder, problem, exit_code):
                    _fail(self._written(folder), RoleFailed(self._channel.role, problem, exit_code))
                case Published(version):
                    self._on_published(message)
                    with contextlib.suppress(asyncio.InvalidStateError):
                        self._written(_name(version)).set_result(None)
                    self._writing.pop(_name(version - 1), None)  # nobody asks for it any more
                case _:
                    self._replies.put_nowait(message)

    def _written(self, folder: str) -> asyncio.Future[None]:
        if folder not in self._writing:
            self._writing[folder] = written = asyncio.get_running_loop().create_future()
            written.add_done_callback(lambda done: done.cancelled() or done.exception())  # perhaps nobody awaits it
            if self._end is not None:
                _fail(written, self._end)
        return self._writing[folder]


def _name(version: int) -> str:
    return f"version {version}"


def _fail(written: asyncio.Future[None], error: StrettoError) -> None:
    if not written.done():
        written.set_exception(error)
