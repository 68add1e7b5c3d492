"""Promises of the benchmarks on the virtual clock:

- quartiles of length are those of the workload, the same for all policies;
- seeds are averaged, and of the worst staleness the worst is kept;
- a fake run trains what it says, with every policy and with both journals."""

import math
from collections import Counter

import pytest

from benchmarks.decisions import JOURNALS, POLICIES, trajectories_per_second
from benchmarks.staleness import Outcome, Setting, by_quartile, cuts, measure, merged, settings
from stretto.rollout.config import BeyondBound
from stretto_foresight.simulator.run import Workload


def test_the_middle_cut_is_the_median_and_the_others_are_as_far_from_it_in_logarithms() -> None:
    first, second, third = cuts(Workload(median_tokens=16, sigma=1.2))
    assert second == pytest.approx(16)
    assert first * third == pytest.approx(16**2)
    assert math.log(third / 16) / 1.2 == pytest.approx(0.6745, abs=1e-4)  # of the normal distribution


def test_shares_are_taken_within_each_quartile() -> None:
    part, whole = Counter({3: 1, 40: 30}), Counter({3: 10, 40: 40})
    assert by_quartile(part, whole, (5, 10, 20)) == (0.1, 0.0, 0.0, 0.75)


def test_seeds_are_averaged_and_the_worst_staleness_is_the_worst_of_all() -> None:
    one, two = (
        Outcome(x, x, x, worst_staleness=10 * x, masked=x, masked_by_quartile=(0.0, 0.0, x, 1.0), touched=x,
                expired=x, expired_by_quartile=(0.0, 0.0, 0.0, 0.0), dropped=x)
        for x in (0.25, 0.75)
    )  # fmt: skip
    both = merged([one, two])
    assert both.worst_staleness == 7.5
    assert both.step_time == both.dropped == 0.5
    assert both.masked_by_quartile == (0.0, 0.0, 0.5, 1.0)


def test_without_a_bound_there_is_one_policy_only() -> None:
    unbounded = [setting for setting in settings() if math.isinf(setting.max_staleness)]
    assert {setting.beyond_bound for setting in unbounded} == {"train"}
    assert len(unbounded) == 4  # two group sizes, two tails


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_but_the_papers_keeps_its_bound(policy: BeyondBound) -> None:
    found = measure(Setting(1, 1.2, policy, 2.0), steps=40, seed=0)
    assert (found.worst_staleness <= 2) == (policy != "train")
    assert (found.masked > 0) == (policy == "mask")
    assert (found.dropped > 0) == (policy == "expire")


@pytest.mark.parametrize("journal", JOURNALS)
def test_a_fake_run_reaches_its_last_batch(journal: str) -> None:
    by_clock, by_processor = trajectories_per_second("wait", journal, steps=3)
    assert by_clock > 0
    assert by_processor > 0
