"""Which engine gets the next group; and requests are made again when their engine is lost."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Iterator
from types import TracebackType

from stretto.core.errors import EngineLeft, EngineLost

#: Engines that requests may lose before they are given up: the requests may be what the engines die of.
LOSSES = 3


class Router:
    """The engine with the fewest completions in flight, of those that are up.

    >>> router = Router(["engine-0", "engine-1"])
    >>> router.start(8), router.start(8), router.start(8)
    ('engine-0', 'engine-1', 'engine-0')
    >>> router.finish("engine-0", 8); router.finish("engine-0", 8)
    >>> router.start(8)
    'engine-0'
    >>> router.leave("engine-0"); router.start(8)
    'engine-1'
    """

    def __init__(self, engines: Iterable[str] = ()) -> None:
        self._up = dict.fromkeys(engines)  # in the order in which they came
        self._load = dict.fromkeys(self._up, 0)

    @property
    def up(self) -> frozenset[str]:
        """The engines that get groups."""
        return frozenset(self._up)

    def gives(self, engine: str) -> bool:
        """Whether the engine gets groups."""
        return engine in self._up

    def load(self, engine: str) -> int:
        """Completions that the engine has in flight."""
        return self._load.get(engine, 0)

    def start(self, completions: int) -> str | None:
        """The engine that gets a group of `completions`; None while there is none."""
        engine = min(self._free(), key=self._load.__getitem__, default=None)
        if engine is not None:
            self._load[engine] += completions
        return engine

    def finish(self, engine: str, completions: int) -> None:
        """A group has left the engine, complete or not."""
        self._load[engine] -= completions

    def leave(self, engine: str) -> None:
        """The engine is down: it gets no more groups."""
        del self._up[engine]

    def join(self, engine: str) -> None:
        """The engine is up and has the newest version."""
        self._load.setdefault(engine, 0)
        self._up[engine] = None

    def _free(self) -> Collection[str]:
        """The engines that may get a group now."""
        return self._up


class ExclusiveRouter(Router):
    """An engine that has something in flight gets nothing else: what it computes together was given together.

    >>> router = ExclusiveRouter(["engine-0"])
    >>> router.start(8), router.start(8)
    ('engine-0', None)
    """

    def _free(self) -> Collection[str]:
        return [engine for engine in self._up if not self._load[engine]]


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
