"""Workload of a simulated run: lengths, durations, and failure rates."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol


class GroupLengths(Protocol):
    """Lengths of a simulated run, and the shares of groups that fail or are filtered (Protocol)."""

    @property
    def prompt_tokens(self) -> int: ...
    @property
    def failure_rate(self) -> float: ...
    @property
    def filter_rate(self) -> float: ...

    def groups(self, chance: random.Random, members: int) -> Iterator[tuple[int, ...]]:
        """Infinite iterator over groups of `members` completions: their lengths in simulated tokens."""


@dataclass(frozen=True)
class Workload:
    """Workload with log-normal lengths, a constant token rate, and training steps of equal time.

    Times are in an arbitrary unit. Lengths are truncated at `max_tokens`. `failure_rate` and `filter_rate` are shares
    of groups. It also implements `Durations`: prompts and verdicts take no time, and a load does not pause generation.
    """

    median_tokens: float = 16.0
    sigma: float = 1.0
    max_tokens: int = 512
    seconds_per_token: float = 1.0 / 16.0
    train_seconds: float = 1.0
    load_seconds: float = 0.0
    failure_rate: float = 0.0
    filter_rate: float = 0.0
    prompt_tokens: int = 0

    def answer_tokens(self, chance: random.Random) -> int:
        """Draw the length of one completion, at least one token."""
        return max(1, min(self.max_tokens, round(chance.lognormvariate(0.0, self.sigma) * self.median_tokens)))

    def groups(self, chance: random.Random, members: int) -> Iterator[tuple[int, ...]]:
        while True:
            yield tuple([self.answer_tokens(chance) for _ in range(members)])

    def decode(self, rows: int, cached: float) -> float:
        return self.seconds_per_token

    def prefill(self, contexts: Sequence[float]) -> float:
        return 0.0

    def transfer(self) -> float:
        return self.load_seconds

    def load(self) -> float:
        return 0.0

    def judge(self) -> float:
        return 0.0

    def train(self, sequences: Sequence[int]) -> float:
        return self.train_seconds
