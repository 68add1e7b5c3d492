"""Requests are made again when their engine is lost."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import TracebackType

from stretto.core.errors import EngineLeft, EngineLost

#: Engines that requests may lose before they are given up: the requests may be what the engines die of.
LOSSES = 3


class _Attempt(contextlib.AbstractContextManager["_Attempt"]):
    """Ends with the loss of an engine, which is raised if it is the last attempt."""

    def __init__(self, last: bool) -> None:
        self._last, self.lost = last, False

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if isinstance(error, EngineLeft):  # what was asked of it is not the cause
            return True
        self.lost = isinstance(error, EngineLost)
        return self.lost and not self._last


def attempts() -> Iterator[contextlib.AbstractContextManager[object]]:
    """Attempts to generate: the loss of an engine ends one of them, and the loss of the last one is raised. An engine
    that leaves the run is no loss.

    Example::

        for attempt in attempts():
            with attempt:
                return await generated()
    """
    losses = 0
    while True:
        attempt = _Attempt(last=losses == LOSSES)
        yield attempt
        losses += attempt.lost
