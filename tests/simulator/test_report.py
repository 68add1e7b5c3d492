"""Promises of the simulator's report:

- tokens that were learned from are counted by their age, masked ones by the length of their answer, never both;
- an answer that was stopped counts as long as it would have become, and wastes what it had sampled;
- over a whole run the counts agree with the accounts: nothing is counted twice, nothing is left out."""

import pytest

from stretto.core.records import Batch, Group, Outcome, Prompt, Segment, State, StopReason, Trajectory, Verdict
from stretto.rollout.config import BeyondBound, RolloutConfig
from stretto_foresight.simulator.accounts import SimulationReport
from stretto_foresight.simulator.run import SimulatedRun, Workload


def batch(*answers: tuple[int, ...], version: int, oldest_trainable: int = 0) -> Batch:
    """A batch of one group; each answer is given by the versions of its tokens."""
    trajectories = tuple(
        Trajectory(
            id=f"0.1.0/{member}",
            segments=(
                Segment.of(
                    token_ids=(0,) * len(versions),
                    behavior_logprobs=(0.0,) * len(versions),
                    versions=versions,
                    stop_reason=StopReason.STOP,
                ),
            ),
            verdict=Verdict(outcome=Outcome.RIGHT, reward=1.0),
            text="",
        )
        for member, versions in enumerate(answers)
    )
    prompt = Prompt(id="1", token_ids=(1,), text="?", answer="!")
    group = Group(id="0.1.0", prompt=prompt, admitted_version=0, trajectories=trajectories)
    return Batch(step=version + 1, version=version, groups=(group,), oldest_trainable=oldest_trainable)


def test_tokens_are_counted_by_their_age() -> None:
    report = SimulationReport()
    report.train(batch((3, 3, 5), (5,), version=5))
    assert (report.staleness, report.completions) == ({2: 2, 0: 2}, {3: 1, 1: 1})
    assert (report.worst_staleness, report.mean_staleness) == (2, 1.0)
    assert (report.masked.total(), report.touched) == (0, 0)


def test_masked_tokens_are_counted_by_the_length_of_their_answer_and_have_no_age() -> None:
    report = SimulationReport()
    report.train(batch((2, 3, 4, 5), (1, 1), (4, 5), version=5, oldest_trainable=4))
    assert (report.staleness, report.masked, report.touched) == ({1: 2, 0: 2}, {4: 2, 2: 2}, 2)
    assert report.masked_share == 4 / 8


def test_shares_of_expiry_are_over_what_ended_trained_or_expired() -> None:
    report = SimulationReport()
    report.train(batch((0, 0, 0), version=0))
    report.expire(length=40, sampled=9)
    assert (report.expired_share, report.dropped_share) == (1 / 2, 9 / 12)


@pytest.mark.parametrize("beyond_bound", ["train", "wait", "mask", "expire"])
def test_the_counts_of_a_run_agree_with_its_accounts(beyond_bound: BeyondBound) -> None:
    config = RolloutConfig(batch_size=4, group_size=2, max_staleness=1, beyond_bound=beyond_bound)
    run = SimulatedRun(config, Workload(sigma=1.2, failure_rate=0.1), steps=50, seed=4)
    report = run.run()
    assert report.completions.total() == 50 * 4 * 2
    assert report.trained_tokens == report.staleness.total() + report.masked.total()
    assert report.expired.total() == run.accounts.balance[State.EXPIRED]
    assert (report.expired.total() > 0) == (beyond_bound == "expire")
    assert (report.touched > 0) == (beyond_bound == "mask")
    assert all(report.dropped[length] <= length * answers for length, answers in report.expired.items())
