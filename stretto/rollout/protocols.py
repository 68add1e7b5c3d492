"""What a rollout asks of others. It asks for abilities, not for classes: no machine is imported here."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Protocol

from stretto.core.records import Batch, Completion, GenerateRequest, Group, State, Trajectory, Verdict


class Generate(Protocol):
    """Answers to one prompt, each as soon as it is whole, in any order."""

    def __call__(self, request: GenerateRequest) -> AsyncIterator[Completion]: ...


class Score(Protocol):
    """A verdict for each answer, in the order of the answers. Undecided is a verdict, not an exception."""

    async def __call__(self, prompt: str, completions: Sequence[str], answer: str) -> Sequence[Verdict]: ...


class Detokenize(Protocol):
    """Token ids to text, special tokens left out."""

    def __call__(self, token_ids: Sequence[int]) -> str: ...


class Journal(Protocol):
    """Where state changes are written before they take effect (`store.ledger`, or a counter in a simulation)."""

    def issue(self, group_id: str, prompt_id: str, members: int, admitted_version: int) -> None:
        """`members` trajectories of the group are in flight."""
        ...

    def buffer(self, group: Group) -> None:
        """The group's trajectories are finished and wait to be trained on."""
        ...

    def drop(self, group_id: str, members: Sequence[int], state: State, reason: str) -> None:
        """Those trajectories have left for good: filtered, expired or failed."""
        ...

    def drop_finished(self, group_id: str, trajectories: Sequence[Trajectory], state: State, reason: str) -> None:
        """As `drop`, for trajectories that were finished: what they said is worth keeping."""
        ...

    def commit_batch(self, batch: Batch) -> None:
        """The batch is about to be trained on. Durable when this returns."""
        ...
