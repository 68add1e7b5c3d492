"""What a controller reports to (a Protocol of `rollout.controller`)."""

from __future__ import annotations

from typing import Protocol

from stretto.core.admission import BoundChange
from stretto.core.records import Batch, Group, Prompt, State, Trajectory


class Journal(Protocol):
    """The record that gets each state change before it takes effect: the ledger, or the accounts of a simulation."""

    def issue(self, group_id: str, prompt: Prompt, members: int, admitted_version: int) -> None:
        """`members` trajectories of the group are in flight."""

    def buffer(self, group: Group) -> None:
        """The group's trajectories are finished and wait for a batch."""

    def settle(self, id: str, state: State, reason: str, trajectory: Trajectory | None = None) -> None:
        """A trajectory ends untrained: filtered, expired or failed. `trajectory` is its record, if it has one."""

    def commit_batch(self, batch: Batch) -> None:
        """The batch is about to be trained on. Durable when this returns."""

    def change_bound(self, change: BoundChange) -> None:
        """Groups that are issued from now on are under another bound."""
