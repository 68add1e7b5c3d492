"""Handling of Ctrl-C and SIGTERM: the first signal requests a clean stop, the second an immediate end.

The same signal again within `ONCE` seconds counts as one: coreutils' `timeout` signals its command and then its process
group.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from stretto.core.tasks import cancel_and_wait

T = TypeVar("T")

ONCE = 0.05
_CUT_SHORT = 128 + signal.SIGINT
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class StopSignal:
    """Handles SIGINT, SIGTERM and SIGHUP: the first requests a stop, a further one cancels the task that created this
    object; the same signal again within `ONCE` seconds counts as one. Create it inside the running event loop. Signals
    that the parent process ignores stay ignored."""

    def __init__(self) -> None:
        self._event = asyncio.Event()
        self._signal: int = 0
        self._heard = 0.0  # when, by the clock of the event loop
        self._calls: list[Callable[[], None]] = []
        self._main = asyncio.current_task()
        for number in _SIGNALS:
            if signal.getsignal(number) is signal.SIG_IGN:
                continue  # ignored by the parent process, such as nohup
            asyncio.get_running_loop().add_signal_handler(number, self._hear, number)

    @property
    def requested(self) -> bool:
        return self._event.is_set()

    @property
    def exit_code(self) -> int:
        """Exit code as shells count: 0 if no stop was requested, else 128 + the number of the first signal."""
        return 128 + self._signal if self._signal else 0

    def call(self, on_stop: Callable[[], None]) -> None:
        """Call `on_stop` once, when a stop is requested; at once if it was already."""
        self._calls.append(on_stop)
        if self.requested:
            on_stop()

    async def unless(self, work: Awaitable[T]) -> T | None:
        """Await `work` and return its result; None, with the work cancelled, if a stop is requested first."""
        task = asyncio.ensure_future(work)
        stop = asyncio.ensure_future(self._event.wait())
        try:
            await asyncio.wait([task, stop], return_when=asyncio.FIRST_COMPLETED)
            return await task if task.done() else None
        finally:
            await cancel_and_wait([task, stop])

    def _hear(self, number: int) -> None:
        now = asyncio.get_running_loop().time()
        if self.requested and self._main is not None:
            if number != self._signal or now - self._heard > ONCE:
                self._main.cancel()
            return
        self._signal, self._heard = number, now
        self._event.set()
        for on_stop in self._calls:
            on_stop()


def until_cut_short(
    work: Coroutine[Any, Any, T], make_loop: Callable[[], asyncio.AbstractEventLoop] | None = None
) -> T:
    """Run `work` in its own event loop; returns its result. `make_loop`: creates the loop; None: asyncio's. Raises
    SystemExit with code 130 if `work` was cancelled by a second signal (`StopSignal`) or by Ctrl-C."""
    try:
        with asyncio.Runner(loop_factory=make_loop) as runner:
            return runner.run(work)
    except (asyncio.CancelledError, KeyboardInterrupt):
        raise SystemExit(_CUT_SHORT) from None
