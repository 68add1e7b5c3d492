"""Facts about a reward that a run records, such as the level of its sandbox."""

from __future__ import annotations

from collections.abc import Mapping


class Facts:
    """Facts of the first worker, and facts of later workers (a restarted one, say) that differ from them.

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
        """Add a worker's facts, by name; returns a sentence for each that differs from all known ones."""
        if not self.known:
            self.known = dict(found)
        news = {name: fact for name, fact in found.items() if fact not in self.known.values()}
        self.known |= {f"{name} of {worker}": fact for name, fact in news.items()}
        return [
            f"{worker} works with another {name}: {fact}, in place of {self.known[name]}" for name, fact in news.items()
        ]
