"""What the workers of a reward say of it, and a run has to record: the level of its sandbox, for one."""

from __future__ import annotations

from collections.abc import Mapping


class Facts:
    """The first worker speaks for all; what another one finds otherwise, after a restart say, is a fact of its own.

    >>> facts = Facts()
    >>> facts.hear("rewards-0", {"sandbox": "level A"}), facts.hear("rewards-1", {"sandbox": "level A"})
    ([], [])
    >>> facts.hear("rewards-1", {"sandbox": "level D"})
    ['rewards-1 works with another sandbox: level D, in place of level A']
    >>> facts.known
    {'sandbox': 'level A', 'sandbox of rewards-1': 'level D'}
    """

    def __init__(self) -> None:
        self.known: dict[str, str] = {}

    def hear(self, worker: str, found: Mapping[str, str]) -> list[str]:
        """A sentence for each fact that is news."""
        if not self.known:
            self.known = dict(found)
        news = {name: fact for name, fact in found.items() if fact not in self.known.values()}
        self.known |= {f"{name} of {worker}": fact for name, fact in news.items()}
        return [
            f"{worker} works with another {name}: {fact}, in place of {self.known[name]}" for name, fact in news.items()
        ]
