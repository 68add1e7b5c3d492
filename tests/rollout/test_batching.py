"""Promises of the batch decision:

- oldest first, B at a time, whatever the policy;
- "wait" refuses exactly the batches after which somebody could no longer be trained in time;
- "mask" names the oldest version that may be learned from; "expire" names who has to leave.
"""

import math

from stretto.core.records import Group
from stretto.rollout.batching import QueueState, can_all_be_trained_in_time, choose
from tests.store.make import judged, prompts


def group(name: str, admitted: int, versions: tuple[int, ...] | None = None, bound: float = 1) -> Group:
    one = judged(f"{name}/0", versions=versions or (admitted, admitted))
    return Group(name, prompts(1)[0], admitted_version=admitted, trajectories=(one,), max_staleness=bound)


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


def test_waiting_refuses_to_overtake_a_group_that_is_due_now_until_it_is_finished() -> None:
    # At version 1 with eta = 1 the straggler admitted at 0 is due now: leaving it behind would break the bound.
    finished = [group("b", 1), group("c", 1)]
    assert choose("wait", facts(finished, [1], version=1)).groups == ()
    assert names(choose("train", facts(finished, [1], version=1)).groups) == ["b", "c"]
    assert names(choose("wait", facts([group("a", 0), *finished], [], version=1)).groups) == ["a", "b"]


def test_waiting_may_leave_as_many_as_the_next_batch_can_take() -> None:
    # Left after this batch: two groups due by version 1, and the batch at version 1 takes two.
    assert choose("wait", facts([group("a", 0), group("b", 0)], [1, 1], version=0)).groups
    # Three would be one too many.
    assert not choose("wait", facts([group("a", 0), group("b", 0)], [1, 1, 1], version=0)).groups


def test_the_k_th_group_left_needs_a_place_before_it_is_due() -> None:
    assert can_all_be_trained_in_time([1, 1, 2, 2], facts([], [], version=0))
    assert not can_all_be_trained_in_time([1, 1, 1, 2], facts([], [], version=0))


def test_without_a_bound_nothing_waits_and_nothing_is_masked() -> None:
    finished, inf = [group("a", 0, bound=math.inf), group("b", 0, bound=math.inf)], math.inf
    assert names(choose("wait", facts(finished, [inf] * 50, version=90)).groups) == ["a", "b"]
    assert choose("mask", facts(finished, [], version=5)).oldest_trainable == 0


def test_masking_names_the_oldest_version_that_may_be_learned_from() -> None:
    choice = choose("mask", facts([group("a", 0, versions=(0, 3), bound=2), group("b", 4, bound=2)], [], version=5))
    assert (choice.oldest_trainable, choice.oldest_by_group) == (3, {})


def test_each_group_is_masked_by_the_bound_of_its_own_admission() -> None:
    # Trained at version 5: "a" may have tokens from version 1 on, "b", admitted under a bound that was lowered, from 4.
    choice = choose("mask", facts([group("a", 1, versions=(1, 3), bound=4), group("b", 4, bound=1)], [], version=5))
    assert (choice.oldest_trainable, choice.oldest_by_group) == (1, {"b": 4})


def test_expiry_sends_away_groups_with_a_stale_token_and_takes_the_rest_if_it_makes_a_batch() -> None:
    finished = [group("a", 0, versions=(0, 3)), group("b", 2), group("c", 3)]
    for rest, taken in ((finished, ["b", "c"]), (finished[:2], [])):
        choice = choose("expire", facts(rest, [], version=3))
        assert (names(choice.expired), names(choice.groups)) == (["a"], taken)
