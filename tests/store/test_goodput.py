"""The goodput budget: every token and every second has one category.

Promises: tokens add up exactly to what was sampled and recomputed; the seconds of each role add up to the wall time;
idleness has its reasons; the ledger counts as its file does, through every change of state and after a restart.
"""

from contextlib import closing
from pathlib import Path

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from stretto.core.records import Prompt, State
from stretto.store.config import StoreConfig
from stretto.store.ledger.ledger import Ledger
from stretto.store.totals import CATEGORIES, IDLE, OTHERS, OnRecord, Totals, core_budget, goodput, tokens_by_category
from stretto_report.reading.inspection import role_times
from tests.store.make import Make

COUNT = st.integers(0, 10**6)
SECONDS = st.floats(0.0, 1e5)
SPANS = st.sampled_from(["generate", "recompute", "load", "proximal", "update", "again", "publish", "checkpoint"])


def test_every_token_of_a_run_worked_by_hand_has_its_category() -> None:
    """100 sampled: 75 on record, 20 aborted, 5 in flight. Of ten aborted trajectories eight had expired."""
    on_record = OnRecord(
        trained=40, masked=10, buffered=8, filtered=7, expired=6, failed=4, expired_unjudged=8, failed_unjudged=2
    )
    totals = Totals(max_staleness=None, generated=100, stopped=20, recomputed=30, evaluated=11)
    assert tokens_by_category(totals, on_record) == {
        "trained": 40,
        "generated_and_waiting": 8 + 5,
        "masked": 10,
        "expired": 6 + 16,
        "filtered": 7,
        "recomputed": 30,
        "failed": 4 + 4,
        "idle": 0,
    }


def test_every_second_of_a_run_worked_by_hand_has_its_category_and_idleness_its_reason() -> None:
    """A run of 100 s: 20 s until the first prompt, 70 s of training, 10 s after it."""
    found = goodput(
        Totals(
            max_staleness=None,
            generated=80,
            recomputed=5,
            evaluated=20,
            generated_by={"engine-0": 80},
            wall_seconds=100.0,
            starting_seconds=20.0,
            rl_seconds=70.0,
            busy={"engine-0": 60.0, "trainer": 40.0, "rewards": 8.0},
            activities={
                "engine-0": {"generate": 100.0, "recompute": 10.0, "load": 10.0},  # twice what was work: they overlap
                "trainer": {"proximal": 4.0, "update": 24.0, "again": 6.0, "publish": 5.0, "checkpoint": 1.0},
            },
        ),
        OnRecord(trained=60, masked=20),
    )
    engine, trainer, rewards = (found.roles[role] for role in ("engine-0", "trainer", "rewards"))
    # 50 s of steps without a recomputed completion: a fifth of the tokens were for evaluations, 40 s were for training
    assert (engine["trained"], engine["masked"], engine["recomputed"]) == pytest.approx((30.0, 10.0, 5.0))
    assert found.idle["engine-0"] == pytest.approx(
        {"admission": 10.0, "ending": 10.0, "evaluation": 10.0, "loading": 5.0, "starting": 20.0}
    )
    assert (trainer["trained"], trainer["masked"], trainer["recomputed"]) == pytest.approx((21.0, 7.0, 6.0))
    assert found.idle["trainer"] == pytest.approx(
        {"batch": 30.0, "checkpointing": 1.0, "ending": 10.0, "publishing": 5.0, "starting": 20.0}
    )
    assert (rewards["trained"], rewards["masked"], rewards["idle"]) == pytest.approx((6.0, 2.0, 92.0))
    assert found.budget["trained"].seconds == pytest.approx(30.0 + 21.0 + 6.0)


def test_the_time_of_cores_goes_to_trained_tokens_by_what_engines_and_trainer_did() -> None:
    totals = Totals(
        max_staleness=None,
        generated=80,
        evaluated=20,
        generated_by={"engine-0": 80},
        activities={"engine-0": {"generate": 50.0, "recompute": 5.0, "load": 3.0}, "trainer": {"update": 1.0}},
        beside={"engine-0": {"load": 2.0}},
        cores={"engine-0": 12.0, "trainer": 8.0, "rewards": 2.0, IDLE: 10.0, OTHERS: 0.0},
    )
    assert core_budget(totals, OnRecord(trained=60, masked=20)) == pytest.approx(
        {"trained": 12, "masked": 4, "recomputed": 1, "loading": 1, "evaluation": 2, "rewards": 2, IDLE: 10}
    )
    assert core_budget(Totals(max_staleness=None, busy={"trainer": 1.0}), OnRecord()) == {}  # of an earlier version


@example(  # the least number of all: a product with it is rounded to a multiple
    (0, 0, 0, 0), OnRecord(), (0.0, 1.5, 0.0), {"engine-0": 2.0}, {"engine-0": {"generate": 5e-324}}
)
@example(  # a share of all, whose product and quotient are rounded
    (0, 0, 0, 109), OnRecord(), (0.0, 1.0, 0.0), {"engine-0": 1.0}, {"engine-0": {"generate": 1.0, "recompute": 7.5}}
)
@given(
    produced=st.tuples(COUNT, COUNT, COUNT, COUNT),
    on_record=st.builds(OnRecord, COUNT, COUNT, COUNT, COUNT, COUNT, COUNT, st.integers(0, 99), st.integers(0, 99)),
    wall=st.tuples(SECONDS, SECONDS, SECONDS),
    busy=st.dictionaries(st.sampled_from(["engine-0", "engine-1", "trainer", "rewards", "conductor"]), SECONDS),
    activities=st.dictionaries(st.sampled_from(["engine-0", "trainer"]), st.dictionaries(SPANS, SECONDS)),
)
def test_every_budget_adds_up(
    produced: tuple[int, int, int, int],
    on_record: OnRecord,
    wall: tuple[float, float, float],
    busy: dict[str, float],
    activities: dict[str, dict[str, float]],
) -> None:
    starting, rl, ending = wall
    generated, stopped, recomputed, evaluated = produced
    totals = Totals(
        max_staleness=None,
        generated=generated,
        stopped=stopped,
        recomputed=recomputed,
        evaluated=evaluated,
        generated_by={"engine-0": 0, "engine-1": 0},
        wall_seconds=starting + rl + ending,
        starting_seconds=starting,
        rl_seconds=rl,
        busy=busy,
        activities=activities,
    )
    found = goodput(totals, on_record)
    assert tuple(found.budget) == CATEGORIES
    tokens = [category.tokens for category in found.budget.values()]
    assert min(tokens) >= 0
    assert sum(tokens) == max(generated, on_record.tokens) + recomputed
    for role in busy:
        assert min(found.roles[role].values()) >= 0
        assert sum(found.roles[role].values()) == pytest.approx(totals.wall_seconds)
        assert found.roles[role]["idle"] == pytest.approx(sum(found.idle[role].values()))
    total = sum(category.seconds for category in found.budget.values())
    assert total == pytest.approx(totals.wall_seconds * len(busy))
    cores = core_budget(msgspec.structs.replace(totals, cores=busy | {IDLE: ending}), on_record)
    assert sum(cores.values()) == pytest.approx(sum(busy.values()) + ending)


def test_the_ledger_counts_tokens_as_its_file_does_also_after_a_restart(tmp_path: Path) -> None:
    make, prompt = Make(), Prompt(id="17", token_ids=(1,), text="", answer="")
    trained = make.group("0.1.0", make.trajectory("0.1.0", 0, (0, 0, 1)), make.trajectory("0.1.0", 1, (0, 2)))
    late = make.group("0.2.0", make.trajectory("0.2.0", 0, (0,) * 7))
    with closing(Ledger(tmp_path / "ledger.sqlite", StoreConfig())) as ledger:
        for group, members in (("0.1.0", 2), ("0.2.0", 1), ("0.3.0", 4), ("0.4.0", 1)):
            ledger.issue(group, prompt, members, 0)
        ledger.buffer(trained)
        ledger.buffer(late)
        ledger.settle("0.3.0/0", State.FILTERED, "all right", make.trajectory("0.3.0", 0, (0,) * 5))
        ledger.settle("0.3.0/1", State.EXPIRED, "too old")
        ledger.settle("0.3.0/2", State.FAILED, "lost")
        ledger.commit_batch(make.batch(1, trained, version=2, oldest_trainable=1))  # three tokens of version 0
        waiting = OnRecord(trained=2, masked=3, buffered=7, filtered=5, expired_unjudged=1, failed_unjudged=1)
        assert ledger.on_record == waiting
    with closing(Ledger(tmp_path / "ledger.sqlite", StoreConfig())) as ledger:
        assert ledger.on_record == waiting
        ledger.settle("0.2.0/0", State.EXPIRED, "too old")
        ended = OnRecord(trained=2, masked=3, filtered=5, expired=7, expired_unjudged=1, failed_unjudged=1)
        assert ledger.on_record == ended
    with closing(Ledger(tmp_path / "ledger.sqlite", StoreConfig())) as ledger:
        assert ledger.on_record == ended


def test_each_role_is_by_itself_and_the_start_counts_for_none() -> None:
    """Of a run of 100 s, 60 of them before the training: the trainer works 30 of 40 s, an engine 36, the workers 2."""
    roles = {
        "conductor": {"trained": 1.0, "idle": 99.0},
        "rewards": {"trained": 2.0, "idle": 98.0},
        "trainer": {"trained": 28.0, "masked": 2.0, "idle": 70.0},
        "engine-0": {"trained": 30.0, "recomputed": 6.0, "idle": 64.0},
    }
    idle = {
        "conductor": {"starting": 60.0, "ending": 0.0, "events": 39.0},
        "rewards": {"starting": 60.0, "ending": 0.0, "completions": 38.0},
        "trainer": {"starting": 60.0, "ending": 0.0, "batch": 8.0, "publishing": 2.0},
        "engine-0": {"starting": 60.0, "ending": 0.0, "loading": 4.0},
    }
    times = role_times(roles, idle)
    assert [(time.role, time.working) for time in times] == [
        ("engine-0", 0.9),
        ("trainer", 0.75),
        ("conductor", 0.025),
        ("rewards", 0.05),
    ]
    assert (times[1].waiting, times[1].outside) == ({"batch": 0.2, "publishing": 0.05}, {"starting": 60.0})
    assert role_times({"trainer": {"idle": 5.0}}, {"trainer": {"starting": 5.0}})[0].working is None
