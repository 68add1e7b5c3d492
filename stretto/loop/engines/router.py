"""Which engine answers the next group: the one with the fewest answers in flight."""

from __future__ import annotations


class Router:
    """Least-loaded routing over the engines that are up.

    >>> router = Router(["engine-0", "engine-1"])
    >>> router.start(8), router.start(8), router.start(8)
    ('engine-0', 'engine-1', 'engine-0')
    >>> router.finish("engine-0", 8); router.finish("engine-0", 8)
    >>> router.start(8)
    'engine-0'
    >>> router.leave("engine-0"); router.start(8)
    'engine-1'
    """

    def __init__(self, engines: list[str], alone: bool = False) -> None:
        """`alone`: an engine has nothing but what it was given together."""
        self._alone = alone
        self._load = dict.fromkeys(engines, 0)
        self._up = list(engines)

    @property
    def up(self) -> frozenset[str]:
        """The engines that get groups."""
        return frozenset(self._up)

    def load(self, engine: str) -> int:
        """Answers that the engine has in flight."""
        return self._load.get(engine, 0)

    def start(self, answers: int) -> str | None:
        """The engine that gets a group of so many answers; None while no engine is up, or free where one is to be
        alone."""
        if not self._up:
            return None
        engine = min(self._up, key=lambda name: self._load[name])
        if self._alone and self._load[engine]:
            return None
        self._load[engine] += answers
        return engine

    def finish(self, engine: str, answers: int) -> None:
        """A group has left the engine, answered or not."""
        self._load[engine] -= answers

    def leave(self, engine: str) -> None:
        """The engine is down: it gets no more groups."""
        self._up.remove(engine)

    def join(self, engine: str) -> None:
        """The engine is up and has the newest version."""
        self._load.setdefault(engine, 0)
        self._up.append(engine)
