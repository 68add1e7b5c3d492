"""Choose the engine for the next group; retry requests whose engine is lost."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Iterator

from stretto.core.errors import EngineLeft, EngineLost

#: Number of lost engines after which a request is sent once more at most: the request may be the cause.
LOSSES = 3


class Router:
    """Chooses the engine with the fewest completions in flight among those that are up; of several, the first. It only
    counts: the caller sends the requests. `engines`: names of the engines that are up at the start. `exclusive`: an
    engine gets new work only when it has nothing in flight, so that only requests of one call share a batch.

    >>> router = Router(["engine-0", "engine-1"])
    >>> router.start(8), router.start(8), router.start(8)
    ('engine-0', 'engine-1', 'engine-0')
    >>> router.finish("engine-0", 8); router.finish("engine-0", 8)
    >>> router.start(8)
    'engine-0'
    >>> router.leave("engine-0"); router.start(8)
    'engine-1'
    >>> router = Router(["engine-0"], exclusive=True)
    >>> router.start(8), router.start(8)
    ('engine-0', None)
    """

    def __init__(self, engines: Iterable[str] = (), *, exclusive: bool = False) -> None:
        self._exclusive = exclusive
        self._up = dict.fromkeys(engines)  # in the order in which they came
        self._load = dict.fromkeys(self._up, 0)

    @property
    def up(self) -> frozenset[str]:
        """Engines that take groups."""
        return frozenset(self._up)

    def gives(self, engine: str) -> bool:
        """Whether this engine takes groups."""
        return engine in self._up

    def load(self, engine: str) -> int:
        """Number of completions in flight on this engine; 0 if it is unknown."""
        return self._load.get(engine, 0)

    def start(self, completions: int, avoided: Collection[str] = ()) -> str | None:
        """Choose an engine for `completions` completions, add them to its load, and return its name; None while no
        engine but those `avoided` is available. The caller calls `finish` with the same number later."""
        free = [one for one in self._up if one not in avoided and not (self._exclusive and self._load[one])]
        engine = min(free, key=self._load.__getitem__, default=None)
        if engine is not None:
            self._load[engine] += completions
        return engine

    def finish(self, engine: str, completions: int) -> None:
        """Subtract `completions` from the engine's load: they have ended, or were aborted."""
        self._load[engine] -= completions

    def leave(self, engine: str) -> None:
        """Give this engine, which must be one of `up`, no more groups: it has gone down. Its load is kept."""
        del self._up[engine]

    def join(self, engine: str) -> None:
        """Give this engine groups: it is up, with the newest version. An engine that was known keeps its load."""
        self._load.setdefault(engine, 0)
        self._up[engine] = None


class _Attempt(contextlib.AbstractContextManager["_Attempt"]):
    """One attempt. Suppresses EngineLeft always, and any other EngineLost except in the last attempt. `lost`: whether
    such another EngineLost was raised."""

    def __init__(self, last: bool) -> None:
        self._last, self.lost = last, False

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        if isinstance(error, EngineLeft):  # its requests are not the cause
            return True
        self.lost = isinstance(error, EngineLost)
        return self.lost and not self._last


def attempts() -> Iterator[contextlib.AbstractContextManager[object]]:
    """Yield a context manager for each attempt to use an engine.

    A context manager suppresses EngineLost, so that the loop tries again. The last one, after three losses, does not.
    An engine that leaves the run (EngineLeft) does not count as a loss. After a success the caller leaves the loop.

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
