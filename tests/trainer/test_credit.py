"""Promises of the credit of turns: turns are compared within their role alone; a bias rewards no number of turns; the
filter `zero_variance` refuses a group exactly when its advantages are all zero."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.core.records import NOTHING, Batch, Group, Outcome, Prompt, Segment, StopReason, Trajectory, Verdict
from stretto.rollout.filters import zero_variance
from stretto.trainer.batch.credit import rewards_compared
from stretto.trainer.batch.samples import samples_of
from stretto.trainer.objective.algorithm import AlgorithmConfig

GIVEN = Segment.of((9,))


def turn(reward: float | None = None, parent: int | None = None) -> Segment:
    return Segment.of((4,), (-0.5,), (6,), stop_reason=StopReason.STOP, parent=parent, reward=reward)


def told(cause: str) -> Segment:
    """The first segment of another role."""
    return Segment.of((7,), parent=NOTHING, cause=cause)


def algorithm(credit: str, **further: object) -> AlgorithmConfig:
    return AlgorithmConfig.model_validate({"advantages": {"kind": "group_mean", "credit": credit}, **further})


def group(*members: tuple[Segment, ...], rewards: tuple[float, ...] = ()) -> Group:
    verdicts = [Verdict(Outcome.RIGHT, reward) for reward in rewards or [0.0] * len(members)]
    pairs = enumerate(zip(members, verdicts, strict=True))
    made = tuple(Trajectory(f"g/{k}", segments, verdict, "") for k, (segments, verdict) in pairs)
    return Group("g", Prompt(id="0", token_ids=(5, 12), text="", answer=""), 5, made)


def advantages(config: AlgorithmConfig, of: Group) -> dict[str, tuple[float, ...]]:
    found = samples_of(Batch(8, 7, (of,)), config, longest=8).samples
    return {sample.id: tuple(sample.advantages) for sample in found}


def test_turns_of_different_roles_are_not_compared() -> None:
    """Of three answers one is wrong; the users that the policy plays get 0 and are as good as each other."""
    members = [(turn(reward), told("user"), turn(0.0)) for reward in (1.0, 1.0, 0.0, 0.0)]
    found = advantages(algorithm("turn"), group(*members))
    assert [found[f"g/{k}"] for k in range(4)] == [(0.5,), (0.5,), (-0.5,), (-0.5,)]
    assert [found[f"g/{k}:1"] for k in range(4)] == [(0.0,)] * 4


def test_each_role_has_its_own_mean() -> None:
    """Users 2 and 4, critics 0 and 6, the turns behind the prompt 1 and 3."""
    first = (turn(1.0), told("user"), turn(2.0), told("critic"), turn(0.0))
    second = (turn(3.0), told("critic"), turn(6.0), told("user"), turn(4.0))
    found = advantages(algorithm("turn"), group(first, second))
    assert [found[id] for id in ("g/0", "g/0:1", "g/0:2")] == [(-1.0,), (-1.0,), (-3.0,)]
    assert [found[id] for id in ("g/1", "g/1:1", "g/1:2")] == [(1.0,), (3.0,), (1.0,)]


def test_a_bias_is_the_same_for_a_conversation_of_one_turn_and_of_three() -> None:
    one, three = (turn(0.0),), (turn(0.0), GIVEN, turn(0.0), GIVEN, turn(0.0))
    biased = algorithm("turn", shaping={"bias": 0.5})
    assert set(advantages(biased, group(one, three)).values()) == {(0.0,), (0.0, 0.0, 0.0)}
    raw = AlgorithmConfig.model_validate(
        {"advantages": {"kind": "reward", "credit": "turn"}, "shaping": {"bias": 0.5, "scale": 2.0}}
    )
    assert advantages(raw, group(one, three)) == {"g/0": (1.0,), "g/1": (1.0, 1.0, 1.0)}


REWARDS = st.sampled_from([None, 0.0, 1.0])
MEMBERS = st.lists(
    st.tuples(REWARDS, st.lists(st.tuples(st.sampled_from(["next", "branch", "user"]), REWARDS), max_size=3)),
    min_size=1,
    max_size=3,
)


def member(first: float | None, further: list[tuple[str, float | None]]) -> tuple[Segment, ...]:
    found = [turn(first)]
    for how, reward in further:
        between = {"next": GIVEN, "branch": Segment.of((3,), parent=0, cause="fork"), "user": told("user")}[how]
        found += [between, turn(reward)]
    return tuple(found)


@pytest.mark.parametrize("credit", ["trajectory", "turn"])
@given(MEMBERS, st.lists(st.sampled_from([0.0, 1.0]), min_size=3, max_size=3))
def test_zero_variance_refuses_exactly_the_groups_without_an_advantage(
    credit: str, members: list[tuple[float | None, list[tuple[str, float | None]]]], rewards: list[float]
) -> None:
    config = algorithm(credit)
    made = group(*(member(*one) for one in members), rewards=tuple(rewards[: len(members)]))
    flat = not any(value for found in advantages(config, made).values() for value in found)
    refused = zero_variance(made, lambda group: rewards_compared(config, group))
    assert refused.keys() == ({one.id for one in made.trajectories} if flat else set())
