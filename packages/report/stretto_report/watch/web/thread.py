"""Executor with a single daemon thread that does not delay the end of the process."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

Result = TypeVar("Result")

_Work = tuple[Future[Any], Callable[[], Any]]


class ReadingThread(Executor):
    """Executor with one daemon thread, for work that only reads, or writes in transactions. A `ThreadPoolExecutor`
    would join its thread at the end of the process, and so delay Ctrl-C for as long as a comparison takes."""

    def __init__(self, name: str) -> None:
        self._waiting: SimpleQueue[_Work | None] = SimpleQueue()
        threading.Thread(target=self._work, name=name, daemon=True).start()

    def submit(self, do: Callable[..., Result], /, *args: Any, **kwargs: Any) -> Future[Result]:
        """Queue a call. It runs after the calls submitted before."""
        future: Future[Result] = Future()
        self._waiting.put((future, lambda: do(*args, **kwargs)))
        return future

    def shutdown(self, wait: bool = False, *, cancel_futures: bool = True) -> None:
        """Cancel the queued calls and start no more. The running call is not waited for."""
        try:
            while True:
                if (work := self._waiting.get_nowait()) is not None:
                    work[0].cancel()
        except Empty:
            self._waiting.put(None)

    def _work(self) -> None:
        while (work := self._waiting.get()) is not None:
            future, do = work
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(do())
            except BaseException as error:  # raised to the caller that waits for the result
                future.set_exception(error)
