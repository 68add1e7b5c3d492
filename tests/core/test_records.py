"""Promises of the records: they cross the wire unchanged, cannot be changed, refuse what they do not know; a verdict
without a reward is undecided and never a zero; seeds depend on all their parts."""

import msgspec
import pytest

from stretto.core.records import Completion, Outcome, Prompt, StopReason, Trajectory, Verdict, derive_seed


def test_a_record_crosses_the_wire_unchanged() -> None:
    completion = Completion(
        request="0.17.0",
        member=1,
        token_ids=(4, 4, 2),
        behavior_logprobs=(-0.1, -0.7, -0.02),
        versions=(6, 6, 7),
        stop_reason=StopReason.STOP,
        interrupted=1,
    )
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(completion), type=Completion) == completion


def test_a_record_cannot_be_changed() -> None:
    prompt = Prompt(id="1", token_ids=(1,), text="?", answer="!")
    with pytest.raises(AttributeError):
        prompt.text = "other"  # type: ignore[misc]


def test_an_unknown_field_is_refused() -> None:
    with pytest.raises(msgspec.ValidationError, match="unknown field `reward_scale`"):
        msgspec.convert({"outcome": "right", "reward": 1.0, "reward_scale": 2}, Verdict)


@pytest.mark.parametrize(("outcome", "reward"), [(Outcome.UNDECIDED, 0.0), (Outcome.WRONG, None)])
def test_a_verdict_has_a_reward_exactly_when_it_is_decided(outcome: Outcome, reward: float | None) -> None:
    with pytest.raises(ValueError, match="a verdict has a reward unless it is undecided"):
        Verdict(outcome=outcome, reward=reward)


def test_an_undecided_trajectory_has_no_reward_to_train_on() -> None:
    verdict = Verdict(outcome=Outcome.UNDECIDED, reward=None, reason="timeout after 1 s")
    completion = Completion(
        request="a", member=0, token_ids=(), behavior_logprobs=(), versions=(), stop_reason=StopReason.LENGTH
    )
    trajectory = Trajectory(id="a/0", segments=(completion.segment,), verdict=verdict, text="")
    with pytest.raises(ValueError, match="timeout after 1 s"):
        _ = trajectory.reward


def test_seeds_depend_on_every_part_and_fit_63_bits() -> None:
    seeds = {derive_seed(1, "a"), derive_seed(1, "b"), derive_seed(2, "a"), derive_seed("1a")}
    assert len(seeds) == 4
    assert all(0 <= seed < 2**63 for seed in seeds)
