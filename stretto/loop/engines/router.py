"""Which engine gets the next group."""

from __future__ import annotations

from collections.abc import Collection, Iterable


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
