"""Promises: whatever numbers come from outside as rewards, of a trajectory or of its turns, and as log-probabilities,
every estimator makes finite advantages of them, at the bounds of every setting too; what a run folder holds from
before rewards were bounded counts as the bound."""

import math

import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st

from stretto.core.records import Batch, Group, Outcome, Prompt, Segment, StopReason, Trajectory, Verdict
from stretto.core.states import LARGEST_REWARD, bounded_reward, why_no_reward
from stretto.trainer.batch.samples import samples_of
from stretto.trainer.objective.advantages import Shaping
from stretto.trainer.objective.algorithm import AlgorithmConfig, ReferenceConfig

PROMPT = Prompt(id="0", token_ids=(5, 12), text="", answer="")
KINDS = ("group", "group_mean", "leave_one_out", "lite_ppo", "batch", "reinforce_pp", "reinforce_pp_baseline", "gae")
LONGEST = 4

#: Numbers of old run folders too, where any float was a reward.
anything = st.one_of(
    st.sampled_from([0.0, 1.0, LARGEST_REWARD, -LARGEST_REWARD, 5e-324, 1e-170, 1e154, 1e300, -1e300, 1.7e308]),
    st.floats(allow_nan=False),
)
large = st.sampled_from([-LARGEST_REWARD, 0.0, 1.0, LARGEST_REWARD])
turns = st.tuples(
    st.integers(1, LONGEST), st.none() | anything, st.sampled_from([-0.5, -800.0, -1e30, -1.7e308]).map(float)
)
members = st.lists(st.tuples(anything, st.lists(turns, min_size=1, max_size=3)), min_size=1, max_size=4)


def batch_of(groups: list[list[tuple[float, list[tuple[int, float | None, float]]]]]) -> Batch:
    made = []
    for number, group in enumerate(groups):
        trajectories = []
        for member, (reward, told) in enumerate(group):
            segments = tuple(
                Segment.of((1,) * count, (logprob,) * count, (6,) * count, stop_reason=StopReason.STOP, reward=own)
                for count, own, logprob in told
            )
            trajectories.append(Trajectory(f"{number}/{member}", segments, Verdict(Outcome.RIGHT, reward), ""))
        made.append(Group(id=str(number), prompt=PROMPT, admitted_version=6, trajectories=tuple(trajectories)))
    return Batch(step=8, version=7, groups=tuple(made))


@settings(max_examples=100)
@given(
    st.lists(members, min_size=1, max_size=3),
    st.sampled_from([*KINDS, "reward"]),
    st.sampled_from(["trajectory", "turn"]),
    st.builds(Shaping, bias=large, scale=st.sampled_from([1e-300, 1.0, LARGEST_REWARD])),
    st.sampled_from([None, "k1", "k2", "k3"]),
    st.sampled_from([1e-3, 1e308]),
)
@example([[(0.0, [(2, 1e300, -0.5)]), (0.0, [(1, 0.0, -0.5)])]], "group", "turn", Shaping(), None, 1.0)
@example([[(1e300, [(2, None, -0.5)]), (0.0, [(1, None, -0.5)])]], "batch", "trajectory", Shaping(), None, 1.0)
def test_advantages_of_every_estimator_are_finite(
    groups: list[list[tuple[float, list[tuple[int, float | None, float]]]]],
    kind: str,
    credit: str,
    shaping: Shaping,
    divergence: str | None,
    weight: float,
) -> None:
    reference = divergence and ReferenceConfig.model_validate(
        {"estimator": divergence, "weight": weight, "into": "reward"}
    )
    told = {"advantages": {"kind": kind, "credit": credit}, "shaping": shaping, "reference": reference or None}
    batch = batch_of(groups)
    scores = {
        one.id: [-1.0] * sum(map(len, [segment.token_ids for segment in one.segments]))
        for group in batch.groups
        for one in group.trajectories
    }
    found = samples_of(batch, AlgorithmConfig.model_validate(told), LONGEST, reference_logprobs=scores)
    for sample in found.samples:
        assert np.isfinite(sample.advantages).all(), sample.advantages


@given(anything)
def test_what_is_a_reward_stays_as_it_is_and_what_is_none_counts_as_the_nearest(value: float) -> None:
    nearest = bounded_reward(value)
    assert not why_no_reward(nearest)
    assert (nearest == value) == (not why_no_reward(value))
    assert abs(nearest) == min(abs(value), 1e6)
    assert math.copysign(1.0, nearest) == math.copysign(1.0, value)


def test_an_integer_of_any_size_is_no_reward_and_none_that_raises() -> None:
    assert why_no_reward(10**6) == ""
    assert why_no_reward(10**6 + 1) == "1e+06; it must lie between ±1e+06"
    assert why_no_reward(-(10**9999)) == "an integer beyond any float; it must lie between ±1e+06"
