"""What a simulated run is made of: how long answers and training steps take, and what goes wrong."""

from __future__ import annotations

import random
from dataclasses import dataclass


@dataclass(frozen=True)
class Workload:
    """Answers have log-normal lengths and come at a constant rate; a training step takes the same time each.

    Times are in any one unit. The longest answer is cut at `max_tokens`. `failure_rate` and `filter_rate` are
    shares of groups.
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
        """Length of one answer, at least one token."""
        return max(1, min(self.max_tokens, round(chance.lognormvariate(0.0, self.sigma) * self.median_tokens)))
