"""The thread in which engines of this process sample, and from which those of other processes are asked."""

from __future__ import annotations

import asyncio
import atexit
import logging
import os
import threading
from collections.abc import Coroutine, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from stretto.core.errors import StrettoError

Result = TypeVar("Result")
_END_SECONDS = 5.0
_QUIET_SECONDS = 2.0
log = logging.getLogger(__name__)


class Background:
    """An event loop in a thread of its own, which ends with the process."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="stretto engines", daemon=True)
        self._thread.start()
        atexit.register(self._end)

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()

    def _end(self) -> None:
        """Let the step in progress end: an interpreter that goes away under a thread of torch may crash."""
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(_END_SECONDS)

    @property
    def here(self) -> bool:
        """Whether the caller is in this thread."""
        return threading.current_thread() is self._thread

    def start(self, work: Coroutine[Any, Any, Result]) -> Future[Result]:
        """Begin to work on it."""
        return asyncio.run_coroutine_threadsafe(work, self.loop)

    def call(self, work: Coroutine[Any, Any, Result]) -> Result:
        """The result of it; what interrupts the caller ends the work.

        Raises:
            StrettoError: the caller is in this thread itself, such as a callback of a future, and would wait for ever.
        """
        if self.here:
            work.close()
            raise StrettoError("an engine was asked to wait in its own thread; ask by `submit`, or from another thread")
        future = self.start(work)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise


_known: dict[int, Background] = {}
_making = threading.Lock()


def background() -> Background:
    """That of this process; a process that was forked has one of its own."""
    with _making:
        if (process := os.getpid()) not in _known:
            _known[process] = Background()
        return _known[process]


@contextmanager
def told_if_slow(name: str, said: Path) -> Iterator[None]:
    """Log that processes are starting, and where they write what they say, once the block has taken two seconds."""
    words = ("%s: still starting; what it says is in %s", name, said)
    timer = threading.Timer(_QUIET_SECONDS, log.warning, words)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
