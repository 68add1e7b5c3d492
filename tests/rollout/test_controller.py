"""Promises of the rollout controller:

- equation 3 decides who starts, and the number in flight bounds it further;
- every group leaves exactly once: trained, filtered, expired or failed, and the journal hears of it first;
- an undecided answer fails, it is never a zero reward; a failed or expired prompt is asked again;
- of an engine whose proof of a version is taken back, what is buffered with tokens of both fails, and nothing else;
- a controller that is restored stands where the other stood; what comes twice or too late is refused.
"""

from collections.abc import Sequence

import msgspec
import pytest

from stretto.core.records import Prompt, State, StopReason, Trajectory, derive_seed, trajectory_id
from stretto.rollout.config import RolloutConfig
from stretto.rollout.controller import Controller, ControllerState, Ticket, TooManyFailures
from stretto.rollout.prompts import Position, PromptStream
from stretto_foresight.simulator.accounts import Accounts
from tests.store.make import judged, prompts

PROMPTS = prompts(5)


def controller(position: Position | None = None, **settings: object) -> tuple[Controller, Accounts]:
    defaults = {"batch_size": 2, "group_size": 2, "max_in_flight": 8, "max_staleness": 1, "beyond_bound": "train"}
    config = RolloutConfig.model_validate(defaults | settings)
    accounts = Accounts()
    return Controller(config, PromptStream(PROMPTS, seed=3, position=position), accounts, seed=3), accounts


def admit_all(control: Controller) -> list[Ticket]:
    return list(iter(control.admit, None))


def admit(control: Controller) -> Ticket:
    ticket = control.admit()
    assert ticket is not None
    return ticket


def answers(
    ticket: Ticket, rewards: Sequence[float | None], version: int = 0, stops: Sequence[StopReason] | None = None
) -> list[Trajectory]:
    ends = stops or [StopReason.STOP] * len(rewards)
    ids = [trajectory_id(ticket.group_id, member) for member in range(len(rewards))]
    return [judged(id, reward, (version,), stop=stop) for id, reward, stop in zip(ids, rewards, ends, strict=True)]


@pytest.mark.parametrize(("most", "started"), [(8, 4), (3, 3)])
def test_as_many_groups_start_as_staleness_and_the_number_in_flight_allow(most: int, started: int) -> None:
    control, _ = controller(max_in_flight=most)
    assert len(admit_all(control)) == started


def test_each_member_has_the_seed_of_its_name() -> None:
    ticket = admit(controller(group_size=12)[0])
    assert ticket.seeds == tuple(derive_seed(3, trajectory_id(ticket.group_id, member)) for member in range(12))


def test_synchronous_means_one_batch_at_a_time() -> None:
    control, _ = controller(max_staleness=0)
    tickets = admit_all(control)
    assert len(tickets) == 2
    for ticket in tickets:
        control.finish(ticket, answers(ticket, [0.0, 1.0]))
    assert control.take() is not None
    assert admit_all(control) == []
    control.publish(1)
    assert admit_all(control) == [], "the engines do not have version 1 yet"
    control.load(1)
    assert [t.admitted_version for t in admit_all(control)] == [1, 1]


def test_a_batch_is_trained_at_the_published_version_and_publishes_the_next() -> None:
    control, accounts = controller()
    for ticket in admit_all(control)[:2]:
        control.finish(ticket, answers(ticket, [0.0, 1.0]))
    batch = control.take()
    assert batch is not None
    assert (batch.step, batch.version, len(batch.groups)) == (1, 0, 2)
    assert accounts.balance[State.TRAINED] == 4
    assert control.take() is None


def test_undecided_answers_fail_and_so_does_a_group_with_too_few_others_whose_prompt_is_asked_again() -> None:
    control, accounts = controller()
    ticket = admit(control)
    group = control.finish(ticket, answers(ticket, [None, 1.0]))
    assert group is not None
    assert [t.reward for t in group.trajectories] == [1.0]
    assert (accounts.balance[State.FAILED], accounts.balance[State.BUFFERED]) == (1, 1)
    control, accounts = controller(min_group_size=2)
    first = admit_all(control)[0]
    assert control.finish(first, answers(first, [None, 1.0])) is None
    assert accounts.balance[State.FAILED] == 2
    assert admit(control).group_id == f"0.{first.draw.prompt.id}.1"


def test_a_filtered_group_leaves_room_for_another() -> None:
    control, accounts = controller(filter="zero_variance")
    tickets = admit_all(control)
    control.finish(tickets[0], answers(tickets[0], [1.0, 1.0]))
    assert accounts.balance[State.FILTERED] == 2
    assert control.admit() is not None


def test_a_group_goes_on_without_the_answers_that_a_filter_refuses() -> None:
    control, accounts = controller(group_size=3, truncated="filter", filter="zero_variance")
    first, second = admit_all(control)[:2]
    group = control.finish(first, answers(first, [0.0, 1.0, 1.0], stops=[StopReason.STOP] * 2 + [StopReason.LENGTH]))
    assert group is not None
    assert len(group.trajectories) == 3  # all that could be decided, for the accuracy
    control.finish(second, answers(second, [0.0, 1.0, None]))
    batch = control.take()
    assert batch is not None
    assert [len(one.trajectories) for one in batch.groups] == [2, 2]
    assert (accounts.balance[State.FILTERED], accounts.balance[State.FAILED]) == (1, 1)
    assert (control.filtered, control.reasons) == (0, {}), "a group that is kept in part is refused by no filter"


def test_a_group_of_which_too_little_is_left_is_filtered_and_counted() -> None:
    control, accounts = controller(group_size=3, truncated="filter", min_group_size=2)
    ticket = admit_all(control)[0]
    control.finish(ticket, answers(ticket, [0.0, 1.0, 1.0], stops=[StopReason.STOP] + [StopReason.LENGTH] * 2))
    assert accounts.balance[State.FILTERED] == 3
    assert control.filtered == 1
    assert control.admit() is not None


def test_a_prompt_is_given_up_after_its_last_attempt() -> None:
    control, _ = controller(max_attempts=1)
    first = admit_all(control)[0]
    control.fail(first, "engine lost")
    assert admit(control).draw.prompt.id != first.draw.prompt.id


def test_a_lost_engine_is_not_a_failure_of_the_prompt() -> None:
    control, _ = controller(max_attempts=2)
    first = ticket = admit_all(control)[0]
    for attempt in (1, 2, 3):
        control.lose(ticket, "engine-0 died")
        ticket = admit(control)
        assert (ticket.draw.attempt, ticket.draw.prompt) == (attempt, first.draw.prompt)
    control.fail(ticket, "refused")
    assert admit(control).draw.failures == 1


def test_too_many_failures_in_a_row_stop_the_run() -> None:
    control, _ = controller(max_failures_in_a_row=2)
    tickets = admit_all(control)
    control.fail(tickets[0], "undecided")
    control.fail(tickets[1], "undecided")
    with pytest.raises(TooManyFailures, match="3 groups failed in a row"):
        control.fail(tickets[2], "undecided")


def test_overdue_groups_are_named_and_expire_with_their_prompt_asked_again() -> None:
    control, accounts = controller(beyond_bound="expire", max_staleness=0)
    straggler, other = admit_all(control)
    control.finish(other, answers(other, [0.0, 1.0]))
    assert control.overdue() == []
    control.publish(1)
    assert control.overdue() == [straggler]
    control.expire(straggler)
    assert accounts.balance[State.EXPIRED] == 2
    control.load(1)
    assert admit(control).draw.prompt == straggler.draw.prompt


def test_what_is_buffered_with_tokens_of_a_proof_that_is_taken_back_fails_and_is_asked_again() -> None:
    control, accounts = controller()
    tickets = admit_all(control)
    for ticket, engine, version in zip(tickets, ("engine-0", "engine-0", "engine-1"), (4, 3, 4), strict=False):
        of_both, written = answers(ticket, [0.0, 1.0], version), list[Trajectory]()
        for one in of_both:
            segment = msgspec.structs.replace(one.segments[0], engines=((engine, one.segments[0].length),))
            written.append(msgspec.structs.replace(one, segments=(segment,)))
        control.finish(ticket, written)
    control.withdraw("engine-0", 4, "engine-0 has changed its weights")
    assert (control.buffered, accounts.balance[State.FAILED]) == (2, 2)
    assert admit(control).draw.prompt == tickets[0].draw.prompt


def test_members_have_seeds_of_their_own_that_depend_on_the_trajectory_alone() -> None:
    (one, _), (two, _) = controller(), controller(max_in_flight=1)
    assert len(set(seeds := admit(one).seeds)) == 2
    assert admit(two).seeds == seeds


def test_a_controller_that_is_restored_stands_where_the_other_stood() -> None:
    control, _ = controller()
    tickets = admit_all(control)
    buffered = control.finish(tickets[0], answers(tickets[0], [0.0, 1.0]))
    assert buffered is not None
    control.fail(tickets[1], "refused")
    (again,) = admit_all(control)
    assert (again.draw.prompt, again.draw.failures) == (tickets[1].draw.prompt, 1)

    state = control.state()
    restored, _ = controller(position=state.position)
    restored.restore(buffered.id, 0, buffered.trajectories)
    for ticket in control.tickets:
        restored.restore(ticket.group_id, 0, (), state.failures.get(ticket.group_id, 0))
    assert [ticket.seeds for ticket in restored.tickets] == [ticket.seeds for ticket in control.tickets]
    assert [ticket.draw for ticket in restored.tickets] == [ticket.draw for ticket in control.tickets]
    assert (restored.counted, restored.buffered, restored.admit()) == (control.counted, 1, None)
    assert restored.state() == state


def test_answers_that_come_twice_or_too_late_are_refused_and_counted() -> None:
    control, accounts = controller()
    first, second, *_ = admit_all(control)
    control.finish(first, answers(first, [0.0, 1.0]))
    assert control.finish(first, answers(first, [1.0, 1.0])) is None
    control.lose(second, "its engine died")
    assert control.finish(second, answers(second, [1.0, 1.0])) is None
    assert control.refused == 2
    assert (accounts.balance[State.BUFFERED], accounts.balance[State.FAILED]) == (2, 2)


def test_answers_are_kept_in_the_order_of_the_members() -> None:
    control, _ = controller()
    ticket = admit_all(control)[0]
    group = control.finish(ticket, list(reversed(answers(ticket, [0.0, 1.0]))))
    assert group is not None
    assert [t.member for t in group.trajectories] == [0, 1]


def test_the_state_that_a_journal_writes_beside_a_new_group_has_the_groups_earlier_failures() -> None:
    control, _ = controller()

    class Journal(Accounts):
        def issue(self, group_id: str, prompt: Prompt, members: int, admitted_version: int) -> None:
            super().issue(group_id, prompt, members, admitted_version)
            states.append(control.state())

    states: list[ControllerState] = []
    control._journal = Journal()
    first = admit(control)
    control.finish(first, answers(first, [None, None]))
    again = admit(control)
    assert states[-1].failures == {again.group_id: 1}
