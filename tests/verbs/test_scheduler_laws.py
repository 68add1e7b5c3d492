"""Laws of `stretto.Scheduler` and `stretto.Ledger`, for calls in any order, kills between them, and other prompts.

- A call works, or is a `UserError` that changes nothing; what the ledger counts is what the scheduler has.
- One batch is out at a time; after a kill at any moment it comes again, as do all that the trainer has lost, as they
  were. No trajectory is in two batches, and no token is trained beyond the bound.
- A group that was finished is finished after a kill.
- A ledger goes on with the prompts, the seed and the group size with which its groups began, or says what differs.
"""

import contextlib
import shutil
import tempfile
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

import stretto
from stretto.core.records import Batch
from tests.verbs.test_scheduler import BOUNDS, PROMPTS, said, trajectories

_MEMBERS = 2
_REWARDS = st.lists(st.none() | st.sampled_from([0.0, 0.5, True]), min_size=_MEMBERS, max_size=_MEMBERS)


class AnyOrder(RuleBasedStateMachine):
    """A loop that calls the scheduler as it likes, and is killed now and then."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.lives = 0
        self.tickets, self.taken = list[stretto.Ticket](), dict[int, Batch]()
        self.before = list[stretto.Ticket]()  # of schedulers that were killed
        self.out: Batch | None = None

    @initialize(policy=st.sampled_from(["wait", "expire"]), flush_seconds=st.sampled_from([0.0, 60.0]))
    def begin(self, policy: str, flush_seconds: float) -> None:
        self.bounds = {**BOUNDS, "beyond_bound": policy, "max_failures_in_a_row": 1_000}
        self.flush_seconds = flush_seconds
        self.live(0)

    def live(self, version: int) -> None:
        self.ledger = stretto.Ledger(self.folder / str(self.lives), flush_seconds=self.flush_seconds)
        self.scheduler = stretto.Scheduler(PROMPTS, ledger=self.ledger, version=version, **self.bounds)

    @rule()
    def admit(self) -> None:
        if (ticket := self.scheduler.admit()) is not None:
            self.tickets.append(ticket)

    @rule(draw=st.data(), rewards=_REWARDS, newest=st.integers(-2, 2))
    def finish(self, draw: st.DataObject, rewards: list[float | None], newest: int) -> None:
        """Also a group that was finished, lost or overdue before; also by a version that nobody has trained."""
        if not self.tickets:
            return
        ticket = draw.draw(st.sampled_from(self.tickets))
        version = max(ticket.admitted_version, self.scheduler.version + newest)
        answers = [said(version) for _ in ticket.seeds]
        if version <= self.scheduler.version + (self.scheduler.version in self.taken):
            self.scheduler.finish(ticket, answers, rewards)
        else:
            with pytest.raises(stretto.DataError, match="was sampled by version"):
                self.scheduler.finish(ticket, answers, rewards)

    @rule(draw=st.data())
    def lose(self, draw: st.DataObject) -> None:
        if self.tickets:
            self.scheduler.lose(draw.draw(st.sampled_from(self.tickets)), "its completions did not come")

    @rule(draw=st.data())
    def finish_of_before(self, draw: st.DataObject) -> None:
        if self.before:
            ticket = draw.draw(st.sampled_from(self.before))
            version = min(ticket.admitted_version, self.scheduler.version)
            finish = partial(self.scheduler.finish, ticket, [said(version)] * _MEMBERS, [1.0] * _MEMBERS)
            if any(one.group_id == ticket.group_id for one in self.scheduler._controller.tickets):
                with pytest.raises(stretto.DataError, match="of another scheduler"):
                    finish()
            else:  # its group has ended, or is not admitted yet: told, or passed over
                before = self.ledger.balance(), self.scheduler.in_flight, self.scheduler.buffered
                with contextlib.suppress(stretto.DataError):
                    finish()
                assert (self.ledger.balance(), self.scheduler.in_flight, self.scheduler.buffered) == before

    @rule()
    def take(self) -> None:
        batch, version = self.scheduler.take(), self.scheduler.version
        if version not in self.taken:
            if batch is not None:
                assert (batch.step, batch.version) == (version + 1, version)
                self.taken[version] = batch
        else:  # the same one until it is trained, also after a kill
            assert batch is not None
            known = self.taken[version]
            assert [one.trajectories for one in batch.groups] == [one.trajectories for one in known.groups]

    @rule(further=st.sampled_from([0, 1, 1, 1, 2]))
    def advance(self, further: int) -> None:
        version = self.scheduler.version
        if further == 1 and version in self.taken:
            self.scheduler.advance(version + 1, {"kl_behavior": 0.01})
            assert self.scheduler.version == version + 1
        else:
            with pytest.raises(stretto.DataError, match="advance: "):
                self.scheduler.advance(version + further)
            assert self.scheduler.version == version

    @rule(back=st.integers(0, 3))
    def kill(self, back: int) -> None:
        """What is in the files now is all that is left; the newest checkpoint is `back` versions old."""
        old, self.lives = self.folder / str(self.lives), self.lives + 1
        shutil.copytree(old, self.folder / str(self.lives))
        self.ledger.close()
        self.before += self.tickets
        self.tickets, finished = [], self.scheduler.buffered
        self.live(max(0, self.scheduler.version - back))
        assert self.scheduler.buffered == finished

    @invariant()
    def balanced(self) -> None:
        balance = self.ledger.balance()
        assert balance.in_flight == self.scheduler.in_flight * _MEMBERS
        assert self.scheduler.buffered <= balance.buffered <= self.scheduler.buffered * _MEMBERS
        trained = [name for batch in self.taken.values() for name in trajectories(batch)]
        assert len(trained) == len(set(trained)) == balance.trained

    def teardown(self) -> None:
        for batch in self.taken.values():
            ages = [batch.version - one for group in batch.groups for it in group.trajectories for one in it.versions]
            assert max(ages) <= self.bounds["max_staleness"]
        self.ledger.close()
        shutil.rmtree(self.folder)


TestCallsInAnyOrder = AnyOrder.TestCase
TestCallsInAnyOrder.settings = settings(max_examples=15, stateful_step_count=40)


@st.composite
def changes(draw: st.DrawFn) -> tuple[list[Any], dict[str, Any]]:
    """Prompts and settings of a resume: those of the run, or some of them changed."""
    prompts = list(PROMPTS)
    match draw(st.sampled_from(["none", "order", "tokens", "before", "after", "fewer", "seed", "members"])):
        case "order":
            prompts = draw(st.permutations(prompts))
        case "tokens":
            at = draw(st.integers(0, len(prompts) - 1))
            prompts[at] = (*prompts[at][:-1], draw(st.integers(2, 5)))
        case "before":
            prompts.insert(0, (9, 9))
        case "after":
            prompts.append((9, 9))
        case "fewer":
            prompts.pop(draw(st.integers(0, len(prompts) - 1)))
        case "seed":
            return prompts, {"seed": draw(st.integers(0, 2))}
        case "members":
            return prompts, {"group_size": draw(st.integers(1, 3))}
    return prompts, {}


@given(change=changes(), finished=st.integers(0, 5))
def test_a_ledger_goes_on_as_begun_or_says_the_change(change: tuple[list[Any], dict[str, Any]], finished: int) -> None:
    prompts, given_settings = change
    with tempfile.TemporaryDirectory() as folder:
        with stretto.Ledger(folder) as ledger:
            scheduler = stretto.Scheduler(PROMPTS, ledger=ledger, **BOUNDS)
            for ticket in list(iter(scheduler.admit, None))[:finished]:
                scheduler.finish(ticket, [said(0)] * 2, [1.0, 0.0])
            first = scheduler.take()
        same = prompts == PROMPTS and {"seed": 0, **BOUNDS, **given_settings} == {"seed": 0, **BOUNDS}
        with stretto.Ledger(folder) as ledger:
            if not same:
                with pytest.raises(stretto.RunFolderError, match=r"was begun with .*; give .*, or another folder"):
                    stretto.Scheduler(prompts, ledger=ledger, **{**BOUNDS, **given_settings})
            scheduler = stretto.Scheduler(PROMPTS, ledger=ledger, **BOUNDS)  # a refusal has changed nothing
            again = scheduler.take()
            assert (first is None) == (again is None)
            if first is not None and again is not None:
                assert [group.trajectories for group in again.groups] == [one.trajectories for one in first.groups]
                assert [one.prompt.token_ids for one in again.groups] == [one.prompt.token_ids for one in first.groups]


def test_a_ledger_without_a_group_may_begin_with_other_prompts(tmp_path: Path) -> None:
    with stretto.Ledger(tmp_path) as ledger:
        stretto.Scheduler(PROMPTS[1:], ledger=ledger, seed=5, **BOUNDS)
        assert stretto.Scheduler(PROMPTS, ledger=ledger, **BOUNDS).admit() is not None
        with pytest.raises(stretto.RunFolderError, match="was begun with other prompts, or in another order"):
            stretto.Scheduler(PROMPTS[1:], ledger=ledger, **BOUNDS)


def test_facts_and_counts_may_be_read_and_kept_from_any_thread(tmp_path: Path) -> None:

    with stretto.Ledger(tmp_path) as ledger, ThreadPoolExecutor(4) as threads:
        scheduler = stretto.Scheduler(PROMPTS, ledger=ledger, **BOUNDS)
        tickets = list(iter(scheduler.admit, None))

        def note(number: int) -> int | None:
            ledger.put(f"fact {number % 7}", number % 7)
            scheduler.finish(tickets[number % len(tickets)], [said(0)] * 2, [1.0, 0.0])
            ledger.flush()
            return ledger.get(f"fact {number % 7}", int)

        assert list(threads.map(note, range(60))) == [number % 7 for number in range(60)]
        assert ledger.balance().buffered == len(tickets) * 2
