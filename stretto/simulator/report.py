"""What a simulated run realised, counted answer by answer. No clock and no decision in here."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from stretto.core.records import Batch


@dataclass
class SimulationReport:
    """Counts of answers and of their tokens; prompts count nothing.

    `staleness` counts the tokens that were learned from, by their age in versions. The counters named "by length" have
    the answer's whole length as their key, for an answer that was stopped the length that it would have had.
    """

    steps: int = 0
    seconds: float = 0.0
    waiting: float = 0.0  # seconds in which the trainer had nothing to do
    staleness: Counter[int] = field(default_factory=Counter)
    answers: Counter[int] = field(default_factory=Counter)  # trained on, by length
    masked: Counter[int] = field(default_factory=Counter)  # tokens of those that were context only, by length
    touched: int = 0  # answers with a masked token
    expired: Counter[int] = field(default_factory=Counter)  # answers that expired, by length
    dropped: Counter[int] = field(default_factory=Counter)  # tokens that those had when they expired, by length

    @property
    def trained_tokens(self) -> int:
        """Tokens of all answers that were trained on, masked ones included."""
        return sum(length * answers for length, answers in self.answers.items())

    @property
    def worst_staleness(self) -> int:
        return max(self.staleness, default=0)

    @property
    def mean_staleness(self) -> float:
        return sum(age * n for age, n in self.staleness.items()) / max(1, self.staleness.total())

    @property
    def masked_share(self) -> float:
        """Of the trained answers' tokens."""
        return self.masked.total() / max(1, self.trained_tokens)

    @property
    def dropped_share(self) -> float:
        """Of all tokens that were sampled for answers which ended trained or expired."""
        return self.dropped.total() / max(1, self.trained_tokens + self.dropped.total())

    @property
    def expired_share(self) -> float:
        """Of the answers that ended trained or expired."""
        return self.expired.total() / max(1, self.answers.total() + self.expired.total())

    def train(self, batch: Batch) -> None:
        """The batch was trained on."""
        for trajectory in (trajectory for group in batch.groups for trajectory in group.trajectories):
            versions, length = trajectory.versions, len(trajectory.versions)
            self.answers[length] += 1
            for version, tokens in Counter(versions).items():
                if version >= batch.oldest_trainable:
                    self.staleness[batch.version - version] += tokens
                else:
                    self.masked[length] += tokens
            self.touched += versions[0] < batch.oldest_trainable

    def expire(self, length: int, sampled: int) -> None:
        """An answer of so many tokens expired when `sampled` of them were there."""
        self.expired[length] += 1
        self.dropped[length] += sampled
