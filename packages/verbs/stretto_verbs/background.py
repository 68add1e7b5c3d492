"""A background thread with an event loop. Engines in this process sample in it, and requests to engines in other
processes are sent from it."""

from __future__ import annotations

import asyncio
import atexit
import logging
import os
import threading
from collections.abc import Coroutine, Iterator
from concurrent.futures import CancelledError, Future, wait
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

from stretto.core.errors import StrettoError

Result = TypeVar("Result")
_END_SECONDS = 5.0
_QUIET_SECONDS = 2.0
log = logging.getLogger(__name__)


class Background:
    """An event loop in a daemon thread; both end with the process."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="stretto engines", daemon=True)
        self._thread.start()
        atexit.register(self._end)

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()
        open_tasks = asyncio.all_tasks(self.loop)
        for task in open_tasks:
            task.cancel()  # Python complains of tasks that still wait when it takes their loop down
        self.loop.run_until_complete(asyncio.gather(*open_tasks, return_exceptions=True))
        self.loop.close()

    def _end(self) -> None:
        """Stop the loop, cancel its tasks and wait up to five seconds for the step in progress: an interpreter that
        exits while torch computes may crash. Does nothing if the thread has ended, or in a fork, which has none."""
        if self._thread.is_alive():
            self.loop.call_soon_threadsafe(self.loop.stop)
            self._thread.join(_END_SECONDS)

    @property
    def here(self) -> bool:
        """Whether the caller runs in the background thread."""
        return threading.current_thread() is self._thread

    def start(self, work: Coroutine[Any, Any, Result]) -> Future[Result]:
        """Start a coroutine in the thread; returns a future of its result, which is cancelled if the process ends."""
        try:
            return asyncio.run_coroutine_threadsafe(work, self.loop)
        except RuntimeError:  # the loop is closed: a finalizer, say, that Python calls after `_end`
            work.close()
            ended = Future[Result]()
            ended.cancel()
            return ended

    def call(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Run a coroutine in the thread and wait for its result. If the caller is interrupted, the coroutine is
        cancelled. Raises StrettoError if the caller runs in this thread itself, as a callback of a future does, and
        would wait forever."""
        if self.here:
            work.close()
            raise StrettoError("an engine was called, with a wait, in its own thread; use `submit`, or another thread")
        future = self.start(work)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise


_known: dict[int, Background] = {}
_making = threading.Lock()


def background() -> Background:
    """Return the background thread of this process, created at the first call. A forked process gets its own."""
    with _making:
        if (process := os.getpid()) not in _known:
            _known[process] = Background()
        return _known[process]


def await_end(ending: Future[None], name: str, seconds: float) -> None:
    """Wait for the end of `name`, and raise the error with which it failed. After `seconds`, log a warning and return.
    An end that was cancelled, as this process ends, is none to tell of."""
    if ending in wait([ending], seconds).done:
        with suppress(CancelledError):
            ending.result()
    else:
        log.warning("%s has not ended after %g s; its end goes on in the background", name, seconds)


@contextmanager
def told_if_slow(name: str, said: Path) -> Iterator[None]:
    """Context manager: log a warning if the block takes longer than two seconds: `name` is still starting, and its
    output is in `said`, a file or folder."""
    words = ("%s: still starting; what it says is in %s", name, said)
    timer = threading.Timer(_QUIET_SECONDS, log.warning, words)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
