"""Promises of the batch decision:

- oldest first, B at a time, whatever the policy;
- "wait" refuses exactly the batches after which somebody could no longer be trained in time;
- "mask" names the oldest version that may be learned from; "expire" names who has to leave.
"""

from stretto.core.records import Completion, Group, Outcome, Prompt, Segment, StopReason, Trajectory, Verdict
from stretto.rollout.batching import QueueState, can_all_be_trained_in_time, choose


def group(name: str, admitted: int, versions: tuple[int, ...] | None = None, bound: float = 1) -> Group:
    completion = Completion(
        name,
        0,
        Segment.of(
            token_ids=(1, 2),
            behavior_logprobs=(-0.5, -0.5),
            versions=versions or (admitted, admitted),
            stop_reason=StopReason.STOP,
        ),
    )
    trajectory = Trajectory(
        id=f"{name}/0", segments=(completion.segment,), verdict=Verdict(outcome=Outcome.RIGHT, reward=1.0), text="x"
    )
    prompt = Prompt(id=name, token_ids=(1,), text="?", answer="!")
    return Group(id=name, prompt=prompt, admitted_version=admitted, trajectories=(trajectory,), max_staleness=bound)


def facts(finished: list[Group], in_flight: list[float], version: int) -> QueueState:
    """`in_flight`: the versions at which groups in flight are due."""
    return QueueState(finished=finished, in_flight=in_flight, version=version, batch_size=2)


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
    assert choose("wait", facts(finished, [1], version=1)).groups == ()
    assert names(choose("train", facts(finished, [1], version=1)).groups) == ["b", "c"]


def test_waiting_goes_on_once_the_straggler_is_finished() -> None:
    finished = [group("a", 0), group("b", 1), group("c", 1)]
    assert names(choose("wait", facts(finished, [], version=1)).groups) == ["a", "b"]


def test_waiting_may_leave_as_many_as_the_next_batch_can_take() -> None:
    # Left after this batch: two groups due by version 1, and the batch at version 1 takes two.
    assert choose("wait", facts([group("a", 0), group("b", 0)], [1, 1], version=0)).groups
    # Three would be one too many.
    assert not choose("wait", facts([group("a", 0), group("b", 0)], [1, 1, 1], version=0)).groups


def test_the_k_th_group_left_needs_a_place_before_it_is_due() -> None:
    assert can_all_be_trained_in_time([1, 1, 2, 2], facts([], [], version=0))
    assert not can_all_be_trained_in_time([1, 1, 1, 2], facts([], [], version=0))


def test_without_a_bound_waiting_never_waits() -> None:
    inf = float("inf")
    unbounded = facts([group("a", 0, bound=inf), group("b", 0, bound=inf)], [inf] * 50, version=90)
    assert names(choose("wait", unbounded).groups) == ["a", "b"]


def test_masking_names_the_oldest_version_that_may_be_learned_from() -> None:
    finished = [group("a", 0, versions=(0, 3), bound=2), group("b", 4, bound=2)]
    choice = choose("mask", facts(finished, [], version=5))
    assert (choice.oldest_trainable, choice.oldest_by_group) == (3, {})


def test_each_group_is_masked_by_the_bound_of_its_own_admission() -> None:
    # Trained at version 5: "a" may have tokens from version 1 on, "b", admitted under a bound that was lowered, from 4.
    finished = [group("a", 1, versions=(1, 3), bound=4), group("b", 4, bound=1)]
    choice = choose("mask", facts(finished, [], version=5))
    assert (choice.oldest_trainable, choice.oldest_by_group) == (1, {"b": 4})


def test_masking_without_a_bound_masks_nothing() -> None:
    choice = choose("mask", facts([group(name, 0, bound=float("inf")) for name in "ab"], [], version=5))
    assert choice.oldest_trainable == 0


def test_expiry_sends_away_whoever_holds_a_stale_token_and_takes_the_rest() -> None:
    finished = [group("a", 0, versions=(0, 3)), group("b", 2), group("c", 3)]
    choice = choose("expire", facts(finished, [], version=3))
    assert names(choice.expired) == ["a"]
    assert names(choice.groups) == ["b", "c"]


def test_expiry_happens_even_when_the_rest_makes_no_batch() -> None:
    choice = choose("expire", facts([group("a", 0), group("b", 3)], [], version=3))
    assert (names(choice.expired), choice.groups) == (["a"], ())
