"""Promises of a whole run on the virtual clock, with the real admission, filter, buffer and batches:

- **the bound**: under "wait", "mask" and "expire" no token older than max_staleness is ever trained on, whatever the
  durations, failures and filters; under "train" (the paper's rule) this does not hold;
- **no standstill**: every run reaches its last step;
- **a bound that the run changes itself** is kept all the same: no token is older than the bound that was in force when
  its group was admitted, and equation 3 holds with that bound;
- **the accounting law**: issued = trained + filtered + expired + failed + buffered + in flight;
- the same seed gives the same run."""

import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.core.admission import BoundChange
from stretto.core.records import Batch, State
from stretto.rollout.config import BeyondBound, RolloutConfig
from stretto_foresight.simulator.accounts import SimulationReport
from stretto_foresight.simulator.engines import EngineLimits
from stretto_foresight.simulator.run import SimulatedRun, Workload

workloads = st.builds(
    Workload,
    sigma=st.floats(0.0, 2.0),
    median_tokens=st.floats(2, 24),
    train_seconds=st.floats(0.0, 4.0),
    load_seconds=st.floats(0.0, 1.0),
    failure_rate=st.floats(0.0, 0.3),
    filter_rate=st.floats(0.0, 0.5),
)


@st.composite
def configs(draw: st.DrawFn, beyond_bound: st.SearchStrategy[BeyondBound]) -> RolloutConfig:
    return RolloutConfig(
        batch_size=draw(st.integers(1, 6)),
        group_size=draw(st.integers(1, 3)),
        max_in_flight=draw(st.integers(1, 40)),
        max_staleness=draw(st.integers(0, 6)),
        beyond_bound=draw(beyond_bound),
        filter=draw(st.sampled_from(["none", "zero_variance"])),
        max_failures_in_a_row=10_000,
    )


bounded: st.SearchStrategy[BeyondBound] = st.sampled_from(["wait", "mask", "expire"])
any_policy: st.SearchStrategy[BeyondBound] = st.sampled_from(["train", "wait", "mask", "expire"])


@settings(max_examples=20)
@given(
    config=configs(bounded).filter(lambda c: c.group_size > 1 or c.filter == "none"),
    workload=workloads,
    seed=st.integers(0, 999),
)
def test_no_token_older_than_the_bound_is_trained_on(config: RolloutConfig, workload: Workload, seed: int) -> None:
    report = SimulatedRun(config, workload, steps=25, seed=seed).run()
    assert report.steps == 25
    assert report.worst_staleness <= config.staleness_bounds[1]


@settings(max_examples=12)
@given(
    config=configs(any_policy).filter(lambda c: c.group_size > 1 or c.filter == "none"),
    bounds=st.tuples(st.integers(0, 3), st.integers(0, 9)),
    workload=workloads,
    seed=st.integers(0, 999),
)
def test_no_token_is_older_than_the_bound_in_force_when_its_group_was_admitted(
    config: RolloutConfig, bounds: tuple[int, int], workload: Workload, seed: int
) -> None:
    """The mismatch that is measured is drawn at random, so that the bound goes up and down."""
    low, high = bounds[0], sum(bounds)
    settings = {"max_staleness": "auto", "staleness_min": low, "staleness_max": high}
    chance, trained = random.Random(seed), list[Batch]()

    def measured(batch: Batch) -> dict[str, float]:
        trained.append(batch)
        return {"kl_behavior": chance.choice((0.0, 0.0, 0.2))}

    run = SimulatedRun(config.model_copy(update=settings), workload, steps=25, seed=seed, measured=measured)
    run.run()
    in_force = [low, *(change.after for change in run.accounts.changes)]
    assert all(low <= bound <= high for bound in in_force)
    assert [change.before for change in run.accounts.changes] == in_force[:-1]
    for batch, group in ((one, group) for one in trained for group in one.groups):
        assert group.max_staleness in in_force
        versions = [version for one in group.trajectories for version in one.versions]
        oldest = min((version for version in versions if version >= batch.oldest_of(group.id)), default=batch.version)
        assert config.beyond_bound == "train" or batch.version - oldest <= group.max_staleness
        if config.beyond_bound == "mask":  # and no more is masked than that
            assert batch.oldest_of(group.id) == max(0, batch.version - group.max_staleness)
    untrained = run.controller.counted - 25 * config.batch_size
    assert untrained <= (max(in_force) + 1) * config.batch_size


def test_a_bound_that_no_mismatch_holds_down_grows_until_the_trainer_need_not_wait() -> None:
    """Generation has a heavy tail: without mismatch the bound grows to its limit. A generation without one, and quicker
    than the training, has the next batch ready under a small bound, which stays."""
    config = RolloutConfig(batch_size=4, group_size=1, max_in_flight=64, max_staleness="auto", beyond_bound="wait")
    slow = SimulatedRun(config, Workload(sigma=1.2), steps=80, seed=1).run()
    fast = SimulatedRun(config, Workload(sigma=0.0, median_tokens=1.0), steps=80, seed=1).run()
    assert slow.max_staleness == 8
    assert fast.max_staleness == 2  # nothing was at hand when the first batch was taken


def test_a_number_in_flight_that_follows_the_engines_leaves_none_waiting_and_neither_empty() -> None:
    """Engines for 24 completions, of one token a second and 64 each: auto comes to rest near to what has room, and is
    quicker than too few groups and has younger tokens than too many."""

    def played(number: int | str, most: int = 256) -> tuple[SimulationReport, Sequence[BoundChange]]:
        values = {"batch_size": 8, "group_size": 4, "max_staleness": 8, "max_in_flight": number, "max_in_flight_min": 2}
        config = RolloutConfig.model_validate(values | {"max_in_flight_max": most})
        workload = Workload(sigma=0.4, median_tokens=64, seconds_per_token=1.0, train_seconds=8.0)
        run = SimulatedRun(config, workload, 60, seed=1, limits=EngineLimits(count=2, slots=12), warm=20)
        return run.run(), run.accounts.changes

    few, many, auto = (played(number) for number in (2, 64, "auto"))
    assert auto[0].seconds < few[0].seconds / 1.5
    assert auto[0].mean_staleness < many[0].mean_staleness
    assert all(change.name == "max_in_flight" for change in auto[1])
    assert 4 <= auto[0].max_in_flight <= 9
    assert played("auto", most=4)[0].max_in_flight == 4
    assert (few[0].max_in_flight, few[1]) == (2, [])


@given(
    config=configs(any_policy).filter(lambda c: c.group_size > 1 or c.filter == "none"),
    workload=workloads,
    seed=st.integers(0, 999),
)
def test_every_trajectory_is_in_exactly_one_state(config: RolloutConfig, workload: Workload, seed: int) -> None:
    run = SimulatedRun(config, workload, steps=15, seed=seed)
    run.run()
    balance, accounts = run.accounts.balance, run.accounts
    assert accounts.issued == sum(balance.values())
    assert balance[State.TRAINED] <= 16 * config.batch_size * config.group_size
    assert balance[State.IN_FLIGHT] == run.controller.in_flight * config.group_size
    untrained = run.controller.counted - 15 * config.batch_size
    assert untrained <= (config.staleness_bounds[1] + 1) * config.batch_size


def test_the_papers_rule_alone_lets_a_straggler_be_trained_far_past_the_bound() -> None:
    config = RolloutConfig(batch_size=16, group_size=1, max_in_flight=64, max_staleness=4, beyond_bound="train")
    assert SimulatedRun(config, Workload(sigma=1.2), steps=200, seed=1).run().worst_staleness > 3 * 4


@pytest.mark.parametrize("beyond_bound", ["train", "wait", "mask", "expire"])
def test_staleness_zero_is_synchronous_under_every_policy(beyond_bound: BeyondBound) -> None:
    config = RolloutConfig(batch_size=4, group_size=2, max_staleness=0, beyond_bound=beyond_bound)
    report = SimulatedRun(config, Workload(sigma=1.0, failure_rate=0.1), steps=30, seed=2).run()
    assert set(report.staleness) == {0}
    assert report.masked.total() == 0


def test_the_same_seed_gives_the_same_run() -> None:
    config = RolloutConfig(batch_size=4, group_size=2, max_staleness=3, beyond_bound="expire")
    runs = [SimulatedRun(config, Workload(sigma=1.5), steps=40, seed=7).run() for _ in range(2)]
    assert runs[0] == runs[1]


def test_a_report_after_warm_steps_counts_what_expired_in_the_later_ones() -> None:
    config = RolloutConfig(batch_size=4, group_size=1, max_in_flight=32, max_staleness=1, beyond_bound="expire")

    def expired(warm: int) -> int:
        return SimulatedRun(config, Workload(sigma=1.5), steps=100, seed=3, warm=warm).run().expired.total()

    assert expired(0) > 8 * expired(99)


def test_rounding_gives_no_token_a_version_before_its_admission() -> None:
    """A load and the end of a completion fall together, and their seconds are no sums of powers of two."""
    config = RolloutConfig(batch_size=1, group_size=1, max_in_flight=1, max_staleness=1, beyond_bound="wait")
    workload = Workload(sigma=0.0, median_tokens=2.0, train_seconds=0.024172084159796218, load_seconds=0.5)
    assert SimulatedRun(config, workload, steps=300, seed=0).run().worst_staleness <= 1
