"""Promises of the records: they cross the wire unchanged, cannot be changed, refuse what they do not know; a verdict
without a reward is undecided and never a zero; seeds depend on all their parts; the engines that a segment names are
those of its tokens, wherever it is cut and joined again."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.core.records import (
    Completion,
    Outcome,
    Prompt,
    Segment,
    StopReason,
    Trajectory,
    Verdict,
    Writers,
    derive_seed,
)


def test_a_record_crosses_the_wire_unchanged() -> None:
    completion = Completion(
        "0.17.0",
        1,
        Segment.of(
            token_ids=(4, 4, 2),
            behavior_logprobs=(-0.1, -0.7, -0.02),
            versions=(6, 6, 7),
            interrupted=1,
            stop_reason=StopReason.STOP,
        ),
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
        "a", 0, Segment.of(token_ids=(), behavior_logprobs=(), versions=(), stop_reason=StopReason.LENGTH)
    )
    trajectory = Trajectory(id="a/0", segments=(completion.segment,), verdict=verdict, text="")
    with pytest.raises(ValueError, match="timeout after 1 s"):
        _ = trajectory.reward


def test_seeds_depend_on_every_part_and_fit_63_bits() -> None:
    seeds = {derive_seed(1, "a"), derive_seed(1, "b"), derive_seed(2, "a"), derive_seed("1a")}
    assert len(seeds) == 4
    assert all(0 <= seed < 2**63 for seed in seeds)


def segment(count: int) -> Segment:
    return Segment.of(tuple(range(count)), (-0.5,) * count, (0,) * count)


def by_token(writers: Writers) -> list[str]:
    return [name for name, count in writers for _ in range(count)]


@given(st.lists(st.tuples(st.sampled_from(["", "a", "b"]), st.integers(0, 3)), max_size=6), st.integers(0, 20))
def test_a_segments_engines_are_those_of_its_tokens_wherever_it_is_cut(pieces: list[tuple[str, int]], cut: int) -> None:
    whole, cuts = Segment(), [segment(count).written_by(name) if name else segment(count) for name, count in pieces]
    for one in cuts:
        whole += one
    assert Segment.whole([Segment(), *cuts]) == whole
    expected = [name for name, count in pieces for _ in range(count)]
    assert by_token(whole.writers) == expected
    assert by_token(whole.after(cut).writers) == expected[cut:]
    assert all(one[0] != other[0] for one, other in zip(whole.engines, whole.engines[1:], strict=False))


def test_a_completion_that_moved_names_both_engines_and_how_much_each_wrote() -> None:
    prefix = segment(4).written_by("a")
    ended = Completion("0.17.0", 0, msgspec.structs.replace(segment(9), stop_reason=StopReason.STOP))
    assert ended.written_by("b", prefix).engines == (("a", 4), ("b", 5))
    assert ended.written_by("a", prefix).engines == (("a", 9),)
    assert ended.written_by("b", segment(4)).engines == (("", 4), ("b", 5))  # the journal of an earlier stretto
    at_its_limit = Completion("0.17.0", 0, msgspec.structs.replace(prefix, stop_reason=StopReason.LENGTH))
    assert at_its_limit.written_by("b", prefix).engines == (("a", 4),)
