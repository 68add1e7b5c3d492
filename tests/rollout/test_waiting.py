"""Promises of ``beyond_bound = "wait"``, in whatever order things happen (the proof is in
docs/explanation/staleness.md):

- the invariant: with b batches taken, at most (d - b + 1) * B untrained groups are due by d, for every d >= b - 1;
- it is always possible: as soon as the B untrained groups that are due first are finished, there is a batch.

Groups are admitted at the version that the slowest engine has loaded, finish in any order, and may fail at any time;
the bound may change at any time, to any value, for the groups that are admitted afterwards.
"""

from collections.abc import Callable
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from stretto.rollout.config import RolloutConfig
from stretto.rollout.controller import Controller, Ticket
from stretto.rollout.prompts import PromptStream
from stretto_foresight.simulator.accounts import Accounts
from tests.store.make import judged, prompts

PROMPTS = prompts(50)


class Changing(Controller):
    """A controller whose bound changes without any rule."""

    bound = 0

    @property
    def max_staleness(self) -> float:
        return self.bound


class Story:
    """A controller, and what happens to it; one method for each thing that can happen."""

    def __init__(self, batch_size: int, max_staleness: int) -> None:
        config = RolloutConfig(
            batch_size=batch_size,
            group_size=1,
            max_in_flight=1_000,
            max_staleness=max_staleness,
            beyond_bound="wait",
            max_failures_in_a_row=10_000,
        )
        self.control = Changing(config, PromptStream(PROMPTS, seed=1), Accounts(), seed=1)
        self.control.bound = max_staleness
        self.batch_size = batch_size
        self.in_flight: list[Ticket] = []
        self.finished: list[Ticket] = []
        self.taken = 0
        self.training: int | None = None

    def admit(self, choice: int) -> None:
        if (ticket := self.control.admit()) is not None:
            self.in_flight.append(ticket)

    def finish(self, choice: int) -> None:
        if self.in_flight:
            ticket = self._leave_flight(choice)
            # The oldest token that it can have: of the version at which it was admitted.
            self.control.finish(ticket, [judged(f"{ticket.group_id}/0", versions=(ticket.admitted_version,))])
            self.finished.append(ticket)

    def fail(self, choice: int) -> None:
        if self.in_flight:
            self.control.fail(self._leave_flight(choice), "bad luck")

    def _leave_flight(self, choice: int) -> Ticket:
        """Nearly always the newest, so that old ones become stragglers."""
        return self.in_flight.pop(-1 if choice else 0)

    def take(self, choice: int) -> None:
        if self.training is not None:
            return
        batch = self.control.take()
        assert batch is not None or not self.first_due_are_finished()
        if batch is not None:
            trained = {group.id for group in batch.groups}
            self.finished = [ticket for ticket in self.finished if ticket.group_id not in trained]
            self.taken, self.training = self.taken + 1, batch.version + 1

    def publish(self, choice: int) -> None:
        if self.training is not None:
            self.control.publish(self.training)
            self.training = None

    def load(self, choice: int) -> None:
        """The slowest engine has loaded some version that is published."""
        self.control.load(choice % (self.control.published + 1))

    def change(self, choice: int) -> None:
        """Another bound from now on."""
        self.control.bound = choice % 6

    def first_due_are_finished(self) -> bool:
        """Are there B untrained groups, the B of them that are due first finished?"""
        untrained = sorted([*self.in_flight, *self.finished], key=lambda ticket: (ticket.due, ticket.order))
        first = untrained[: self.batch_size]
        return len(first) == self.batch_size and all(ticket in self.finished for ticket in first)

    def check(self) -> None:
        dues = [ticket.due for ticket in [*self.in_flight, *self.finished]]
        for d in range(self.taken - 1, self.taken + 7):
            assert sum(due <= d for due in dues) <= (d - self.taken + 1) * self.batch_size


EVENTS = [Story.fail] + [Story.admit] * 3 + [Story.finish] * 3 + [Story.take] * 2 + [Story.publish] * 2 + [Story.load]


def played(story: Story, events: list[tuple[Callable[[Story, int], None], int]]) -> None:
    for event, choice in events:
        event(story, choice)
        story.check()


def drawn(*further: Callable[[Story, int], None]) -> Any:
    """Events in any order, each with a choice."""
    return st.lists(st.tuples(st.sampled_from([*EVENTS, *further]), st.integers(0, 30)), min_size=60, max_size=200)


@given(batch_size=st.integers(1, 3), max_staleness=st.integers(0, 3), events=drawn())
def test_no_batch_breaks_the_bound_and_there_is_one_when_the_oldest_are_finished(
    batch_size: int, max_staleness: int, events: list[tuple[Callable[[Story, int], None], int]]
) -> None:
    played(Story(batch_size, max_staleness), events)


@given(batch_size=st.integers(1, 3), events=drawn(Story.change))
def test_so_it_is_while_bounds_change(batch_size: int, events: list[tuple[Callable[[Story, int], None], int]]) -> None:
    played(Story(batch_size, max_staleness=1), events)
