"""Promises: a sample holds the loss tokens that are young enough, with everything logged about them; the others are
context; impossible answers stop the run.
"""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from stretto.core.errors import BoundViolated
from stretto.core.records import Batch, Completion, Group, Outcome, Prompt, Segment, StopReason, Trajectory, Verdict
from stretto.trainer.batch.samples import Sample, samples_of
from stretto.trainer.objective.algorithm import AlgorithmConfig
from stretto.trainer.objective.estimators import ESTIMATORS
from stretto.trainer.objective.shaping import Shaping

CONFIG = AlgorithmConfig(advantages=ESTIMATORS("group_mean"))
LONGEST = 4


def answer(member: int, reward: float, versions: tuple[int, ...] = (5, 6, 7)) -> Trajectory:
    completion = Completion(
        "g",
        member,
        Segment.of(
            token_ids=(4, 4, 2)[: len(versions)],
            behavior_logprobs=(-0.1, -0.7, -0.02)[: len(versions)],
            versions=versions,
            stop_reason=StopReason.STOP,
        ),
    )
    verdict = Verdict(outcome=Outcome.RIGHT if reward else Outcome.WRONG, reward=reward)
    return Trajectory(id=f"g/{member}", segments=(completion.segment,), verdict=verdict, text="")


def batch(*answers: Trajectory, oldest_trainable: int = 0) -> Batch:
    prompt = Prompt(id="0", token_ids=(5, 12), text="", answer="")
    group = Group(id="g", prompt=prompt, admitted_version=5, trajectories=answers)
    return Batch(step=8, version=7, groups=(group,), oldest_trainable=oldest_trainable)


def test_the_example_of_the_docstring() -> None:
    samples = samples_of(batch(answer(0, 1.0), answer(1, 0.0), oldest_trainable=6), CONFIG, LONGEST)
    expected = Sample("g/0", (5, 12, 4, 4, 2), 2, (3, 4), (-0.7, -0.02), (1, 0), (0.5, 0.5))
    assert samples.samples == (expected, replace(expected, id="g/1", advantages=(-0.5, -0.5)))
    assert samples.masked_tokens == 2
    assert samples.reward_mean == 0.5


def test_each_group_has_its_own_oldest_version() -> None:
    """Versions 5, 6, 7; the batch masks what is older than 6, this group what is older than 7."""
    stricter = msgspec.structs.replace(batch(answer(0, 1.0), oldest_trainable=6), oldest_by_group={"g": 7})
    samples = samples_of(stricter, CONFIG, LONGEST)
    assert (tuple(samples.samples[0].loss_positions), samples.masked_tokens) == ((4,), 2)


def test_every_token_is_trained_on_when_none_is_too_old() -> None:
    samples = samples_of(batch(answer(0, 1.0)), CONFIG, LONGEST)
    assert tuple(samples.samples[0].loss_positions) == (2, 3, 4)
    assert samples.masked_tokens == 0


def test_answers_without_loss_tokens_make_no_row_but_count_in_the_group() -> None:
    old, empty = answer(0, 1.0, (3, 3, 3)), answer(1, 0.0, ())
    samples = samples_of(batch(old, empty, answer(2, 0.5), oldest_trainable=5), CONFIG, LONGEST)
    assert len(samples.samples) == 1
    assert tuple(samples.samples[0].advantages) == (0.0, 0.0, 0.0)
    assert samples.masked_tokens == 3


def test_a_token_from_the_future_stops_the_run() -> None:
    with pytest.raises(BoundViolated, match="version 8"):
        samples_of(batch(answer(0, 1.0, (7, 7, 8))), CONFIG, LONGEST)


def test_a_flipped_byte_stops_the_run() -> None:
    whole = answer(0, 1.0)
    (segment,) = whole.segments
    for at in range(len(segment.columns)):
        columns = bytearray(segment.columns)
        columns[at] ^= 16
        torn = msgspec.structs.replace(segment, columns=bytes(columns))
        with pytest.raises(BoundViolated, match="no checksum fits"):
            samples_of(batch(msgspec.structs.replace(whole, segments=(torn,))), CONFIG, LONGEST)


def test_rewards_are_shaped_before_they_become_advantages_and_reported_as_they_were() -> None:
    # 3 of 4 tokens with a buffer of 2: half the penalty of 4, so (1 - 2 + 0.5) * 3 = -1.5
    shaping = Shaping(scale=3.0, bias=0.5, overlong_buffer=2, overlong_penalty=4.0)
    samples = samples_of(
        batch(answer(0, 1.0)), AlgorithmConfig(advantages=ESTIMATORS("reward"), shaping=shaping), LONGEST
    )
    assert tuple(samples.samples[0].advantages) == (-1.5, -1.5, -1.5)
    assert samples.reward_mean == 1.0


def test_a_discount_counts_from_the_end_of_the_whole_answer() -> None:
    config = AlgorithmConfig(advantages=ESTIMATORS("gae", gamma=0.5))
    samples = samples_of(batch(answer(0, 1.0), oldest_trainable=6), config, LONGEST)
    assert tuple(samples.samples[0].advantages) == (0.5, 1.0)
