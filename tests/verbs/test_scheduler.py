"""`stretto.Scheduler` and `stretto.Ledger`, without an engine and a trainer, and without torch.

- No token is trained that is older than the bound, whatever the order in which groups end; nothing starts beyond it.
- A scheduler that was killed goes on: batches behind the trainer come again as they were, then what nobody has trained;
  no trajectory is trained twice.
- Both can be waited for in coroutines.
"""

import asyncio
import random
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import stretto
from stretto.core.records import Batch
from stretto.store.ending import Condition, condition

ROOT = Path(__file__).parents[2]
PROMPTS = [(number, 3) for number in range(2, 12)]
BOUNDS: dict[str, Any] = {"batch_size": 2, "group_size": 2, "max_in_flight": 6, "max_staleness": 2}


def said(version: int, tokens: int = 2) -> stretto.TextCompletion:
    return stretto.TextCompletion("ab", (4,) * tokens, (-0.5,) * tokens, "stop", (version,) * tokens)


def trajectories(batch: Batch) -> list[str]:
    return [one.id for group in batch.groups for one in group.trajectories]


def loop(scheduler: stretto.Scheduler, steps: int, draw: random.Random) -> list[Batch]:
    """Groups that end in any order; each token is by the version at which its group began, or by the newest."""
    open_, batches = list[stretto.Ticket](), list[Batch]()
    while scheduler.version < steps:
        open_ += iter(scheduler.admit, None)
        if open_:
            ticket = open_.pop(draw.randrange(len(open_)))
            began = min(ticket.admitted_version, scheduler.version)
            answers = [said(draw.choice((began, scheduler.version))) for _ in ticket.seeds]
            scheduler.finish(ticket, answers, [draw.random() for _ in ticket.seeds])
        if (batch := scheduler.take()) is not None:
            batches.append(batch)
            scheduler.advance(batch.version + 1, {"loss": 0.5})
    return batches


@pytest.mark.parametrize("policy", ["wait", "mask", "expire"])
def test_no_token_is_trained_beyond_the_bound(policy: str) -> None:
    batches = loop(stretto.Scheduler(PROMPTS, beyond_bound=policy, **BOUNDS), 40, random.Random(1))
    assert [batch.version for batch in batches] == list(range(40))
    ages = Counter(
        batch.version - version
        for batch in batches
        for group in batch.groups
        for one in group.trajectories
        for version in one.versions
        if version >= batch.oldest_of(group.id)
    )
    assert min(ages) >= 0
    assert 0 < max(ages) <= 2


@pytest.mark.parametrize("policy", ["wait", "mask", "expire"])
def test_a_group_without_a_token_is_as_old_as_its_admission(policy: str) -> None:
    """A program of agents, say, that has said nothing: nothing is stale, and the loop goes on."""
    bounds = {**BOUNDS, "batch_size": 1, "max_in_flight": 1, "max_staleness": 0}
    scheduler = stretto.Scheduler(PROMPTS, beyond_bound=policy, **bounds)
    for version in range(3):
        ticket = scheduler.admit()
        assert ticket is not None
        scheduler.finish(ticket, [said(version, tokens=0)] * 2, [1.0, 0.0])
        assert scheduler.take() is not None
        scheduler.advance(version + 1)


def test_nothing_starts_beyond_the_bound() -> None:
    scheduler = stretto.Scheduler(PROMPTS, batch_size=2, group_size=1, max_in_flight=100, max_staleness=1)
    tickets = list(iter(scheduler.admit, None))
    assert len(tickets) == scheduler.in_flight == 4  # equation 3: (0 + 1 + 1) * 2
    assert scheduler.take() is None
    for ticket in tickets[:2]:
        scheduler.finish(ticket, [said(0)], [1.0])
    assert scheduler.buffered == 2
    assert scheduler.take() is not None
    assert scheduler.admit() is None
    scheduler.advance(1)
    assert len(list(iter(scheduler.admit, None))) == 2


def test_a_killed_scheduler_trains_nothing_twice(tmp_path: Path) -> None:
    with stretto.Ledger(tmp_path) as ledger:
        scheduler = stretto.Scheduler(PROMPTS, ledger=ledger, seed=3, **BOUNDS)
        first = loop(scheduler, 7, random.Random(2))
        in_flight = {ticket.group_id: ticket.seeds for ticket in scheduler._controller.tickets}
        assert in_flight
    with stretto.Ledger(tmp_path) as ledger:  # the trainer's newest checkpoint is that of version 4
        scheduler = stretto.Scheduler(PROMPTS, ledger=ledger, seed=3, version=4, **BOUNDS)
        assert scheduler.admit() is None
        for expected in first[4:]:
            batch = scheduler.take()
            assert batch is not None
            assert scheduler.take() is batch
            assert [group.trajectories for group in batch.groups] == [group.trajectories for group in expected.groups]
            scheduler.advance(batch.version + 1)
        again = scheduler.admit()
        assert again is not None
        assert again.seeds == in_flight[again.group_id]
        scheduler.lose(again, "this test has no engine")
        more = loop(scheduler, 15, random.Random(4))
        trained = [name for batch in [*first, *more] for name in trajectories(batch)]
        assert len(trained) == len(set(trained)) == ledger.balance().trained == 15 * 2 * 2
        assert [batch.step for batch in ledger.batches(0)] == list(range(1, 16))


def test_turns_that_were_given_are_no_part_of_what_was_sampled() -> None:
    scheduler = stretto.Scheduler([(2, 3)], batch_size=1, group_size=2, max_staleness=0)
    ticket = scheduler.admit()
    assert ticket is not None
    scheduler.finish(ticket, [[said(0), (7, 8, 9), said(0, tokens=1)], said(0)], [1.0, 0.0])
    batch = scheduler.take()
    assert batch is not None
    first, second = batch.groups[0].trajectories
    assert first.token_ids == (4, 4, 7, 8, 9, 4)
    assert [segment.sampled for segment in first.segments] == [True, False, True]
    assert len(first.versions) == 3
    assert second.reward == 0


async def test_coroutines_wait_for_tickets_and_batches() -> None:
    scheduler = stretto.Scheduler(PROMPTS, batch_size=2, group_size=1, max_staleness=1)

    async def generate() -> None:
        async for ticket in scheduler.tickets():
            await asyncio.sleep(0)
            scheduler.finish(ticket, [said(scheduler.version)], [1.0])

    generating = asyncio.create_task(generate())
    for version in range(5):
        assert (await asyncio.wait_for(scheduler.batch(), 5)).version == version
        scheduler.advance(version + 1)
    generating.cancel()


def test_a_scheduler_and_a_ledger_need_no_torch(tmp_path: Path) -> None:
    program = f"""
import sys, stretto
with stretto.Ledger({str(tmp_path)!r}) as ledger:
    scheduler = stretto.Scheduler([(2, 3)], batch_size=1, group_size=1, ledger=ledger)
    ticket = scheduler.admit()
    scheduler.finish(ticket, [stretto.TextCompletion("a", (4,), (-0.5,), "stop", (0,))], [1.0])
    print(len(scheduler.take().groups), "torch" in sys.modules, "transformers" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "1 False False\n"


OWN = ["seed", "group_size", "mark of the prompts", "standing", "bounds", "in_flight", "totals", "engines"]


@pytest.mark.parametrize("name", OWN)
def test_a_fact_of_the_ledger_cannot_be_replaced_and_the_loop_goes_on(tmp_path: Path, name: str) -> None:
    asked: dict[str, Any] = {"batch_size": 1, "group_size": 2, "max_staleness": "auto"}
    with stretto.Ledger(tmp_path) as ledger:
        ticket = stretto.Scheduler([(2, 3)], ledger=ledger, seed=7, **asked).admit()
        with pytest.raises(stretto.DataError, match=f"put: {name}: the ledger's own name"):
            ledger.put(name, "mine")
    with stretto.Ledger(tmp_path) as ledger:
        again = stretto.Scheduler([(2, 3)], ledger=ledger, seed=7, **asked).admit()
    assert ticket is not None
    assert again is not None
    assert again.seeds == ticket.seeds


def test_a_fact_of_a_loop_of_an_earlier_version_is_not_taken_for_the_ledgers_counts(tmp_path: Path) -> None:
    with stretto.Ledger(tmp_path) as ledger:
        ledger.put("counted", 5)
    with stretto.Ledger(tmp_path) as ledger:
        assert ledger.get("counted", int) == 5


def test_filters_that_refuse_every_group_are_told_as_in_a_run(caplog: pytest.LogCaptureFixture) -> None:
    scheduler = stretto.Scheduler(PROMPTS, filter="zero_variance", **BOUNDS)
    for _ in range(20):
        ticket = scheduler.admit()
        assert ticket is not None
        scheduler.finish(ticket, [said(0)] * 2, [1.0, 1.0])
    told = "groups were filtered since the last batch (most often zero_variance: all rewards are 1): see the filters of"
    assert caplog.messages == [f"{groups} {told} [rollout]" for groups in (8, 16)]


def test_readers_of_the_folder_see_how_a_loop_ended(tmp_path: Path) -> None:
    with stretto.Ledger(tmp_path) as ledger:
        assert condition(tmp_path) == Condition("running")
        with pytest.raises(stretto.DataError, match="put: ending: the ledger's own name"):
            ledger.put("ending", "mine")
    assert condition(tmp_path) == Condition("finished")
    with pytest.raises(ZeroDivisionError, match="by zero"), stretto.Ledger(tmp_path):
        _ = 1 / 0
    assert condition(tmp_path) == Condition("dead", "division by zero")
    with pytest.raises(KeyboardInterrupt), stretto.Ledger(tmp_path):
        raise KeyboardInterrupt
    assert condition(tmp_path) == Condition("stopped", "KeyboardInterrupt")
