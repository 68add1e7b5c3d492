"""In-memory journal of a simulated run: the state of every trajectory, with a check of the accounting law."""

from __future__ import annotations

from collections import Counter

from stretto.core.admission import BoundChange
from stretto.core.errors import StoreError
from stretto.core.records import Batch, Group, Prompt, State, Trajectory, trajectory_id
from stretto.core.states import ALLOWED


class Accounts:
    """Journal that checks: issued = trained + filtered + expired + failed + buffered + in flight, each id once.

    `expired`: trajectories that expired after their completion had ended (those aborted in flight have no record).
    `changes`: changes of the adaptive bounds.
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
