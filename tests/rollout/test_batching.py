"""Promises of the batch decision:

- oldest first, B at a time, whatever the policy;
- "wait" refuses exactly the batches after which somebody could no longer be trained in time;
- "mask" names the oldest version that may be learned from; "expire" names who has to leave.
"""

from stretto.core.records import Completion, Group, Outcome, Prompt, StopReason, Trajectory, Verdict
from stretto.rollout.batching import QueueState, can_all_be_trained_in_time, choose


def group(name: str, admitted: int, versions: tuple[int, ...] | None = None) -> Group:
    completion = Completion(
        request=name,
        member=0,
        token_ids=(1, 2),
        behavior_logprobs=(-0.5, -0.5),
        versions=versions or (admitted, admitted),
        stop_reason=StopReason.STOP,
    )
    trajectory = Trajectory(
        id=f"{name}/0", segments=(completion.segment,), verdict=Verdict(outcome=Outcome.RIGHT, reward=1.0), text="x"
    )
    prompt = Prompt(id=name, token_ids=(1,), text="?", answer="!")
    return Group(id=name, prompt=prompt, admitted_version=admitted, trajectories=(trajectory,))


def facts(finished: list[Group], in_flight: list[int], version: int, max_staleness: float = 1) -> QueueState:
    return QueueState(
        finished=finished, in_flight=in_flight, version=version, batch_size=2, max_staleness=max_staleness
    )


def names(groups: tuple[Group, ...]) -> list[str]:
    return [g.id for g in groups]


def test_a_batch_is_the_oldest_finished_groups() -> None:
    finished = [group("a", 0), group("b", 0), group("c", 1)]
    assert names(choose("train", facts(finished, [], version=1)).groups) == ["a", "b"]


def test_nothing_is_taken_while_the_batch_is_not_full() -> None:
    for policy in ("train", "wait", "mask", "expire"):
        assert choose(policy, facts([group("a", 0)], [], version=0)).groups == ()


def test_waiting_refuses_to_overtake_a_group_that_is_due_now() -> None:
    # At version 1 with eta = 1 the straggler admitted at 0 is due now: leaving it behind would break the bound.
    finished = [group("b", 1), group("c", 1)]
    assert choose("wait", facts(finished, [0], version=1)).groups == ()
    assert names(choose("train", facts(finished, [0], version=1)).groups) == ["b", "c"]


def test_waiting_goes_on_once_the_straggler_is_finished() -> None:
    finished = [group("a", 0), group("b", 1), group("c", 1)]
    assert names(choose("wait", facts(finished, [], version=1)).groups) == ["a", "b"]


def test_waiting_may_leave_as_many_as_the_next_batch_can_take() -> None:
    # Left after this batch: two groups due by version 1, and the batch at version 1 takes two.
    assert choose("wait", facts([group("a", 0), group("b", 0)], [0, 0], version=0)).groups
    # Three would be one too many.
    assert not choose("wait", facts([group("a", 0), group("b", 0)], [0, 0, 0], version=0)).groups


def test_the_k_th_group_left_needs_a_place_before_it_is_due() -> None:
    assert can_all_be_trained_in_time([0, 0, 1, 1], facts([], [], version=0))
    assert not can_all_be_trained_in_time([0, 0, 0, 1], facts([], [], version=0))


def test_without_a_bound_waiting_never_waits() -> None:
    unbounded = facts([group("a", 0), group("b", 0)], [0] * 50, version=90, max_staleness=float("inf"))
    assert names(choose("wait", unbounded).groups) == ["a", "b"]


def test_masking_names_the_oldest_version_that_may_be_learned_from() -> None:
    finished = [group("a", 0, versions=(0, 3)), group("b", 4)]
    assert choose("mask", facts(finished, [], version=5, max_staleness=2)).oldest_trainable == 3


def test_masking_without_a_bound_masks_nothing() -> None:
    choice = choose("mask", facts([group("a", 0), group("b", 4)], [], version=5, max_staleness=float("inf")))
    assert choice.oldest_trainable == 0


def test_expiry_sends_away_whoever_holds_a_stale_token_and_takes_the_rest() -> None:
    finished = [group("a", 0, versions=(0, 3)), group("b", 2), group("c", 3)]
    choice = choose("expire", facts(finished, [], version=3))
    assert names(choice.expired) == ["a"]
    assert names(choice.groups) == ["b", "c"]


def test_expiry_happens_even_when_the_rest_makes_no_batch() -> None:
    choice = choose("expire", facts([group("a", 0), group("b", 3)], [], version=3))
    assert (names(choice.expired), choice.groups) == (["a"], ())
