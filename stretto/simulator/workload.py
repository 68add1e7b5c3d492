"""The workload of a simulated run: lengths, durations, and rates of failure."""

from __future__ import annotations

import random
from dataclasses import dataclass


@dataclass(frozen=True)
class Workload:
    """Completions have log-normal lengths, tokens come at a constant rate, every training step takes the same time.

    Times are in any one unit. Completions are cut off at `max_tokens`. `failure_rate` and `filter_rate` are shares of
    groups.
    """

    median_tokens: float = 16.0
    sigma: float = 1.0
    max_tokens: int = 512
    seconds_per_token: float = 1.0 / 16.0
    train_seconds: float = 1.0
    load_seconds: float = 0.0
    failure_rate: float = 0.0
    filter_rate: float = 0.0

    def answer_tokens(self, chance: random.Random) -> int:
        """The length of one completion, at least one token."""
        return max(1, min(self.max_tokens, round(chance.lognormvariate(0.0, self.sigma) * self.median_tokens)))
