"""The staleness of a batch, counted over the tokens that are in the loss."""

from __future__ import annotations

import msgspec

from stretto.core.admission import loss_tokens
from stretto.core.records import Batch, Group, Outcome, Prompt, Segment, Trajectory, Verdict

GIVEN = Segment.of((9, 9, 9))


def trajectory(member: int, *segments: Segment) -> Trajectory:
    return Trajectory(f"g/{member}", segments, Verdict(Outcome.RIGHT, 1.0), "")


def sampled(*versions: int) -> Segment:
    return Segment.of((1,) * len(versions), (-0.5,) * len(versions), versions)


def test_each_sampled_token_of_the_loss_counts_once_with_the_versions_since_it_was_sampled() -> None:
    """A branch begins behind an older turn, so versions may fall from one segment to the next."""
    turns = trajectory(0, sampled(6, 7, 7), GIVEN, sampled(8), sampled(7, 8))
    group = Group("g", Prompt("p", (1,), "", ""), 6, (turns, trajectory(1, sampled(5, 8)), trajectory(2)))
    batch = Batch(step=9, version=8, groups=(group,))
    assert loss_tokens(batch) == {3: 1, 2: 1, 1: 3, 0: 3}
    assert loss_tokens(msgspec.structs.replace(batch, oldest_trainable=6)) == {2: 1, 1: 3, 0: 3}
    stricter = msgspec.structs.replace(batch, oldest_trainable=6, oldest_by_group={"g": 7})
    assert loss_tokens(stricter) == {1: 3, 0: 3}
