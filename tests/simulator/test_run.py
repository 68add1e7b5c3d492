"""Promises of a whole run on the virtual clock, with the real admission, filter, buffer and batches:

- **the bound**: under "wait", "mask" and "expire" no token older than max_staleness is ever trained on, whatever the
  durations, failures and filters; under "train" (the paper's rule) this does not hold;
- **no standstill**: every run reaches its last step;
- **the accounting law**: issued = trained + filtered + expired + failed + buffered + in flight;
- the same seed gives the same run.
"""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.core.records import State
from stretto.rollout.config import BeyondBound, RolloutConfig
from stretto.simulator.run import SimulatedRun
from stretto.simulator.workload import Workload

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


@settings(max_examples=150, deadline=None)
@given(
    config=configs(bounded).filter(lambda c: c.group_size > 1 or c.filter == "none"),
    workload=workloads,
    seed=st.integers(0, 999),
)
def test_no_token_older_than_the_bound_is_trained_on(config: RolloutConfig, workload: Workload, seed: int) -> None:
    report = SimulatedRun(config, workload, steps=25, seed=seed).run()
    assert report.steps == 25
    assert report.worst_staleness <= config.max_staleness


@settings(max_examples=100, deadline=None)
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
    assert untrained <= (config.max_staleness + 1) * config.batch_size


def test_the_papers_rule_alone_lets_a_straggler_be_trained_far_past_the_bound() -> None:
    config = RolloutConfig(batch_size=16, group_size=1, max_in_flight=64, max_staleness=4, beyond_bound="train")
    report = SimulatedRun(config, Workload(sigma=1.2), steps=200, seed=1).run()
    assert report.worst_staleness > 3 * 4


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


def test_rounding_gives_no_token_a_version_before_its_admission() -> None:
    """A load and the end of a completion fall together, and their seconds are no sums of powers of two."""
    config = RolloutConfig(batch_size=1, group_size=1, max_in_flight=1, max_staleness=1, beyond_bound="wait")
    workload = Workload(sigma=0.0, median_tokens=2.0, train_seconds=0.024172084159796218, load_seconds=0.5)
    assert SimulatedRun(config, workload, steps=300, seed=0).run().worst_staleness <= 1
