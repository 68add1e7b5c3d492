"""What a rollout asks of others. It asks for abilities, not for classes: no machine is imported here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from stretto.core.records import Batch, Group, Prompt, State, Trajectory, Verdict


class Score(Protocol):
    """A verdict for each answer, in the order of the answers. Undecided is a verdict, not an exception."""

    async def __call__(self, prompt: str, completions: Sequence[str], answer: str) -> Sequence[Verdict]: ...


class Detokenize(Protocol):
    """Token ids to text, special tokens left out."""

    def __call__(self, token_ids: Sequence[int], /) -> str: ...


class Journal(Protocol):
    """Where state changes are written before they take effect (`store.ledger.ledger`, or a counter in a simulation)."""

    def issue(self, group_id: str, prompt: Prompt, members: int, admitted_version: int) -> None:
        """`members` trajectories of the group are in flight."""
        ...

    def buffer(self, group: Group) -> None:
        """The group's trajectories are finished and wait to be trained on."""
        ...

    def settle(self, id: str, state: State, reason: str, trajectory: Trajectory | None = None) -> None:
        """A trajectory has left for good: filtered, expired or failed. `trajectory` is its answer, if there is one."""
        ...

    def commit_batch(self, batch: Batch) -> None:
        """The batch is about to be trained on. Durable when this returns."""
        ...
