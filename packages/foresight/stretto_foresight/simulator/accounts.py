"""In-memory journal of a simulated run: the state of every trajectory, with a check of the accounting law, and counts
by completion.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field

from stretto.core.admission import BoundChange
from stretto.core.errors import StoreError
from stretto.core.records import Batch, Group, Prompt, State, Trajectory, trajectory_id
from stretto.core.states import ALLOWED


class Accounts:
    """Journal of a simulated run in memory, called as the ledger of a real one. It raises StoreError if a trajectory is
    issued twice or changes to a state that is not allowed, so that issued = trained + filtered + expired + failed +
    buffered + in flight.

    `balance`: number of trajectories in each state. `expired`: trajectories that expired after their completion had
    ended (those aborted in flight have no record). `changes`: changes of the adaptive bounds.
    """

    def __init__(self) -> None:
        self._state: dict[str, State] = {}
        self.balance: Counter[State] = Counter()
        self.expired: list[Trajectory] = []
        self.changes: list[BoundChange] = []

    @property
    def issued(self) -> int:
        return len(self._state)

    def issue(self, group_id: str, prompt: Prompt, members: int, admitted_version: int) -> None:
        for member in range(members):
            name = trajectory_id(group_id, member)
            if name in self._state:
                raise StoreError(f"trajectory {name} was issued twice")
            self._state[name] = State.IN_FLIGHT
        self.balance[State.IN_FLIGHT] += members

    def buffer(self, group: Group) -> None:
        for trajectory in group.trajectories:
            self._move(trajectory.id, State.BUFFERED)

    def settle(self, id: str, state: State, reason: str, trajectory: Trajectory | None = None) -> None:
        self._move(id, state)
        if state is State.EXPIRED and trajectory is not None:
            self.expired.append(trajectory)

    def commit_batch(self, batch: Batch) -> None:
        for group in batch.groups:
            for trajectory in group.trajectories:
                self._move(trajectory.id, State.TRAINED)

    def change_bound(self, change: BoundChange) -> None:
        self.changes.append(change)

    def _move(self, name: str, state: State) -> None:
        before = self._state[name]
        if state not in ALLOWED.get(before, ()):
            raise StoreError(f"trajectory {name} cannot go from {before} to {state}")
        self._state[name] = state
        self.balance[before] -= 1
        self.balance[state] += 1


@dataclass
class SimulationReport:
    """Counts of a simulated run after its warm-up: completions and their simulated tokens; prompts are not counted.

    `staleness` counts the tokens in the loss by age in versions. `sampled` and `recomputed` are in tokens of the model.
    Seconds in which the trainer idles (`waiting`) or works (`training`); in which engines work (`generating`, summed
    over engines), `loading` and `recomputing` included; and of `judging`, summed over completions. Counters of trained
    `completions` and their `masked` tokens, of `expired` completions and their sampled (`dropped`) tokens, are by
    length: a completion's full length, for an aborted one the length that it would have had.
    """

    steps: int = 0
    seconds: float = 0.0
    waiting: float = 0.0  # seconds in which the trainer was idle
    training: float = 0.0  # seconds in which the trainer worked
    generating: float = 0.0  # seconds in which engines worked, summed over engines; of these:
    loading: float = 0.0  # seconds of loads of weights
    recomputing: float = 0.0  # seconds of recomputing contexts after a load
    judging: float = 0.0  # seconds of judging, summed over completions
    sampled: float = 0.0  # tokens of the model, of all completions
    recomputed: float = 0.0  # tokens of the model whose KV cache was recomputed
    preempted: float = 0.0  # completions evicted from a full cache
    staleness: Counter[int] = field(default_factory=Counter)
    completions: Counter[int] = field(default_factory=Counter)  # completions trained on, by length
    masked: Counter[int] = field(default_factory=Counter)  # their masked tokens, by the completion's length
    touched: int = 0  # completions with a masked token
    expired: Counter[int] = field(default_factory=Counter)  # completions that expired, by length
    dropped: Counter[int] = field(default_factory=Counter)  # sampled tokens of expired completions, by length
    max_staleness: float = math.inf  # bound in force at the end
    max_in_flight: int = 0  # bound on the groups in flight, at the end
    warnings: list[str] = field(default_factory=list)  # messages about selection bias

    @property
    def trained_tokens(self) -> int:
        """Tokens of all completions that were trained on, masked ones included."""
        return sum(length * count for length, count in self.completions.items())

    @property
    def worst_staleness(self) -> int:
        return max(self.staleness, default=0)

    @property
    def mean_staleness(self) -> float:
        return sum(age * n for age, n in self.staleness.items()) / max(1, self.staleness.total())

    def staleness_quantile(self, share: float) -> int:
        """Return the smallest age, in versions, that at least the share `share` (0 to 1) of the tokens in the loss does
        not exceed; 0 if there are none."""
        left = share * self.staleness.total()
        for age in sorted(self.staleness):
            left -= self.staleness[age]
            if left <= 0:
                return age
        return self.worst_staleness

    @property
    def masked_share(self) -> float:
        """Masked tokens as a share of the trained completions' tokens; 0 if there are none."""
        return self.masked.total() / max(1, self.trained_tokens)

    @property
    def dropped_share(self) -> float:
        """Sampled tokens of expired completions as a share of those of trained and expired ones; 0 without any."""
        return self.dropped.total() / max(1, self.trained_tokens + self.dropped.total())

    @property
    def expired_share(self) -> float:
        """Expired completions as a share of those trained or expired; 0 if there are none."""
        return self.expired.total() / max(1, self.completions.total() + self.expired.total())

    def train(self, batch: Batch) -> None:
        """Add the completions of a batch that was trained on to the counts; `steps` stays."""
        pairs = ((group, trajectory) for group in batch.groups for trajectory in group.trajectories)
        for group, trajectory in pairs:
            oldest = batch.oldest_of(group.id)
            length = trajectory.sampled_length
            stamps = [stamp for segment in trajectory.segments for stamp in segment.stamps]
            self.completions[length] += 1
            for version, tokens in stamps:
                if version >= oldest:
                    self.staleness[batch.version - version] += tokens
                else:
                    self.masked[length] += tokens
            self.touched += stamps[0][0] < oldest

    def expire(self, length: int, sampled: int) -> None:
        """Count a completion of `length` tokens that expired when `sampled` of them had been sampled."""
        self.expired[length] += 1
        self.dropped[length] += sampled
