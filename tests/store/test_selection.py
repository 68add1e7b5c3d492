"""Selection bias: asynchrony that trains on other groups than it samples is noticed, and nothing else is.

Promises: the statistic and its p are those worked by hand; a run under `expire` with a heavy tail is warned of, under
`wait` there is nothing to warn of; under `mask` it is said how much of the signal is in masked groups; groups that are
lost by chance raise no alarm, over many windows; what is shown is of now; what is known survives a resume.
"""

import math
import random
from collections.abc import Iterator

import pytest

from stretto.core.records import State, Trajectory
from stretto.rollout.config import BeyondBound, RolloutConfig
from stretto.store.selection import (
    MEASURES,
    WINDOW,
    Bias,
    EndedGroup,
    MaskedGroups,
    SelectionBias,
    SelectionWatch,
    biases,
    compare,
    masked_groups,
)
from stretto_foresight.simulator.accounts import Accounts
from stretto_foresight.simulator.run import SimulatedRun, Workload
from stretto_report.reading.inspection import newest_biases
from tests.store.make import Make


def simulated(policy: BeyondBound, sigma: float, failure_rate: float = 0.0) -> SimulatedRun:
    """200 steps of the real controller: 8 groups of 4 completions in a batch, a step as long as 32 tokens."""
    config = RolloutConfig(batch_size=8, group_size=4, max_in_flight=64, max_staleness=2, beyond_bound=policy)
    workload = Workload(median_tokens=16, sigma=sigma, max_tokens=512, train_seconds=2.0, failure_rate=failure_rate)
    return SimulatedRun(config, workload, steps=200, seed=5)


def test_the_test_is_the_one_worked_by_hand() -> None:
    """Ranks of the lost: 2 to 8 and 11; rank sum 46 of (1 + 16) * 8 / 2 = 68 without bias, variance 64 * 17 / 12."""
    lost, others = [2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 11.0], [1.0, 9.0, 10.0, 12.0, 13.0, 14.0, 15.0, 16.0]
    found = compare(lost, others, factor=1)
    assert found.statistic == pytest.approx(2 * (46 - 68) / 64)
    assert found.p == pytest.approx(math.erfc(21.5 / math.sqrt(64 * 17 / 12) / math.sqrt(2)))
    assert compare(others, lost, factor=1).statistic == -found.statistic
    assert compare(lost, others, factor=6).p == pytest.approx(6 * found.p)


def test_equal_values_are_half_above_and_half_below_each_other() -> None:
    """Eight zeros against four zeros and four ones: 32 of 64 pairs are ties, in the others the lost is smaller. Of the
    16 values 12 and 4 are tied: the variance 64 / 12 * (17 - (12**3 - 12 + 4**3 - 4) / 240)."""
    found = compare([0.0] * 8, [0.0] * 4 + [1.0] * 4, factor=1)
    assert found.statistic == pytest.approx(-32 / 64)
    assert found.p == pytest.approx(math.erfc(15.5 / math.sqrt(64 / 12 * (17 - 1776 / 240)) / math.sqrt(2)))
    assert compare([1.0] * 8, [1.0] * 8, factor=1) == Bias()


def test_too_few_groups_are_not_compared() -> None:
    assert compare([9.0] * 7, [1.0] * 200, factor=1) == compare([9.0] * 200, [1.0] * 7, factor=1) == Bias()


def test_a_heavy_tail_under_expire_is_warned_of() -> None:
    run = simulated("expire", sigma=1.2)
    run.run()
    found = newest_biases(run.selection.known)
    assert run.selection.known.windows >= 5
    assert found["length"].p < 0.01
    assert found["length"].statistic > 0.3  # what expires is longer
    assert found["latency"].p < 0.01
    assert found["latency"].statistic > 0.3
    assert found["difficulty"] == Bias()  # every group has as many right completions
    assert [sentence.partition(" (")[0].rsplit(" ", 4)[1:] for sentence in run.report.warnings] == [
        ["longer", "than", "the", "others"],
        ["slower", "than", "the", "others"],
    ]


def test_groups_that_are_masked_in_part_are_trained_and_what_they_carry_is_said() -> None:
    run = simulated("mask", sigma=1.2)
    run.run()
    assert newest_biases(run.selection.known) == dict.fromkeys(MEASURES, Bias())
    assert run.report.warnings == []
    masked = run.selection.known.masked
    assert masked is not None
    assert 0 < masked.masked < masked.groups == WINDOW
    assert 0 < masked.tokens < 1


def test_the_share_of_the_signal_in_masked_groups_is_that_worked_by_hand() -> None:
    """Of 6 groups that are trained 2 are masked in part, by 3 of 4 and 1 of 2 tokens of 4 and 8, of 4 + 8 + 4 * 3 = 24:
    (3 + 4) / 24. Both have a signal, and one of the other four: two thirds of the signal are in masked groups."""
    masked = [EndedGroup(False, 4.0, masked=0.75, signal=True), EndedGroup(False, 8.0, masked=0.5, signal=True)]
    others = [EndedGroup(False, 3.0, signal=place == 0) for place in range(4)]
    found = masked_groups([*masked, *others, EndedGroup(True, 9.0, masked=1.0, signal=True)])
    assert found == MaskedGroups(6, 2, 7 / 24, 1.0, 0.25, 2 / 3)
    assert str(found) == (
        "2 of 6 groups (29.2% of all tokens); 100% of them carry a signal, 25% of the others: 67% of the signal is in "
        "masked groups"
    )
    assert masked_groups(others) is None


def test_what_is_reported_is_the_newest_window_and_not_the_strongest_ever() -> None:
    strong = dict.fromkeys(MEASURES, Bias(0.9, 1e-9))
    assert newest_biases(SelectionBias(1, strong)) == strong
    calm = dict.fromkeys(MEASURES, Bias(0.0, 1.0))
    biased = tuple(EndedGroup(place % 2 == 0, float(place % 2), 0.5, 1.0) for place in range(WINDOW - 1))
    assert newest_biases(SelectionBias(2, calm, biased)) == calm  # a window that is not whole says nothing yet


@pytest.mark.parametrize("policy", ["wait", "train"])
def test_where_no_group_is_lost_nothing_is_warned_of(policy: BeyondBound) -> None:
    run = simulated(policy, sigma=1.2, failure_rate=0.1)
    run.run()
    assert run.selection.known.windows >= 5
    assert newest_biases(run.selection.known) == dict.fromkeys(MEASURES, Bias())
    assert run.report.warnings == []


def test_groups_that_are_lost_by_chance_raise_no_alarm_in_many_windows() -> None:
    """Lengths are over three orders of magnitude. The 5 % level is kept: 10 of 200 windows are expected below it, with
    a standard deviation of 3."""
    found, below = list[float](), 0
    for window, groups in enumerate(lost_by_chance(200), start=1):
        found += [bias.p for bias in biases(groups, window).values()]
        below += compared(groups, times=1) < 0.05
    assert min(found) > 0.01
    assert 1 <= below <= 19


def test_completions_that_depend_on_each_other_are_no_evidence_of_their_own() -> None:
    """With each of a group's eight equal completions as one value there would be a false alarm in a third of the
    windows, at a level of 1 %."""
    assert sum(compared(groups, times=8) < 0.01 for groups in lost_by_chance(100)) > 20


def lost_by_chance(windows: int) -> Iterator[list[EndedGroup]]:
    chance = random.Random(3)
    for _ in range(windows):
        drawn = [(chance.random() < 0.2, chance.lognormvariate(0, 2)) for _ in range(WINDOW)]
        yield [EndedGroup(lost, length, chance.random(), length) for lost, length in drawn]


def compared(groups: list[EndedGroup], times: int) -> float:
    """The p of the lengths, before any correction, with each group `times` times."""
    lost, others = ([g.length for g in groups if g.lost is part and g.length is not None] for part in (True, False))
    return compare(lost * times, others * times, factor=1).p


def test_what_is_known_survives_a_resume_and_a_window_goes_on(make: Make) -> None:
    """Of each pair of groups the first is masked whole; it has three tokens, the other one."""
    known = SelectionBias()
    for place in range(WINDOW):
        watch = SelectionWatch(Accounts(), lambda: 1.5, known)
        lost = place % 2 == 0
        group = make.group(f"0.{place}.0", make.trajectory(f"0.{place}.0", 0, (0, 0, 0) if lost else (1,), right=lost))
        watch.issue(group.id, make.prompt, 1, 0)
        watch.buffer(group)
        watch.commit_batch(make.batch(1, group, version=1, oldest_trainable=1))
        ended = EndedGroup(lost, 3.0 if lost else 1.0, float(lost), 0.0, masked=float(lost))
        assert watch.known.open[-1:] == (ended,) or place == 255
        known = watch.known
    assert (known.windows, known.open) == (1, ())
    assert (known.newest["length"].statistic, known.newest["difficulty"].statistic) == (1.0, 1.0)
    assert known.newest["latency"] == Bias()  # all took as long
    assert newest_biases(known) == known.newest


def test_groups_of_before_a_resume_are_lost_as_others_are(make: Make) -> None:
    """One waited in the buffer, with three tokens and right; one was in flight, with four tokens of two completions."""
    watch = SelectionWatch(journal := Elsewhere(), lambda: 1.5)
    watch.sampled = lambda group_id: 4
    watch.restore("0.1.0", 1, [make.trajectory("0.1.0", 0, (0, 0, 1), right=True)])
    watch.restore("0.2.0", 2, ())
    names = ["0.1.0/0", "0.2.0/0", "0.2.0/1"]
    for name in names:
        watch.settle(name, State.EXPIRED, "too old")
    assert journal.settled == names
    assert watch.known.open == (EndedGroup(True, 3.0, 1.0, None), EndedGroup(True, 2.0, None, None))


class Elsewhere(Accounts):
    """The trajectories were issued by an earlier process."""

    def __init__(self) -> None:
        super().__init__()
        self.settled: list[str] = []

    def settle(self, id: str, state: State, reason: str, trajectory: Trajectory | None = None) -> None:
        self.settled.append(id)


@pytest.fixture
def make() -> Make:
    return Make()
