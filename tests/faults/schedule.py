"""What happens in a simulated run: everything follows from the seed."""

import random
from dataclasses import dataclass, replace

from stretto.rollout.config import RolloutConfig


@dataclass(frozen=True)
class Schedule:
    """What happens under one seed."""

    seed: int
    rollout: RolloutConfig
    prompts: int
    steps: int
    engines: int
    answer_seconds: float
    step_seconds: float
    loss_rate: float  # of requests: their engine dies
    twice_rate: float  # of answers: they come twice
    undecided_rate: float  # of verdicts
    kill_rate: float  # of the conductor, a virtual second
    checkpoint_every: int
    rounds: bool = False  # groups begin and end together; staleness is 0 then

    @classmethod
    def of(cls, seed: int) -> "Schedule":
        chance = random.Random(seed)
        rollout = RolloutConfig(
            batch_size=chance.randint(1, 3),
            group_size=chance.randint(1, 3),
            max_in_flight=chance.randint(1, 8),
            max_staleness=chance.choice([0, 1, 2, 4, float("inf")]),
            beyond_bound=chance.choice(["train", "wait", "mask", "expire"]),
            filter=chance.choice(["none", "none", "zero_variance"]),
            max_attempts=chance.randint(1, 3),
            max_failures_in_a_row=10_000,
        )
        return cls(
            seed=seed,
            rollout=rollout if rollout.group_size > 1 else rollout.model_copy(update={"filter": "none"}),
            prompts=chance.randint(2, 12),
            steps=chance.randint(2, 7),
            engines=chance.randint(1, 3),
            answer_seconds=chance.choice([0.05, 0.5, 2.0]),
            step_seconds=chance.choice([0.05, 0.5, 2.0]),
            loss_rate=chance.choice([0.0, 0.05, 0.3]),
            twice_rate=chance.choice([0.0, 0.2]),
            undecided_rate=chance.choice([0.0, 0.1]),
            kill_rate=chance.choice([0.0, 0.05, 0.3]),
            checkpoint_every=chance.randint(1, 3),
        )

    def in_rounds(self, *, undisturbed: bool) -> "Schedule":
        """The same as a synchronous run in rounds, which no engine's death may make ask a prompt anew; `undisturbed`:
        nobody dies at all."""
        rollout = self.rollout.model_copy(update={"max_staleness": 0.0, "beyond_bound": "wait"})
        loss_rate, kill_rate = (0.0, 0.0) if undisturbed else (min(self.loss_rate, 0.02), self.kill_rate)
        return replace(self, rollout=rollout, rounds=True, loss_rate=loss_rate, kill_rate=kill_rate)
