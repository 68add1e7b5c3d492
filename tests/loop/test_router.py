"""Least-loaded routing: the engine with the fewest completions in flight gets the next group, one that is down none.

The roster of engines: one row for each name, with the step of its coming and going; a resumed run adds to it.
"""

from hypothesis import given
from hypothesis import strategies as st

from stretto.loop.engines.roster import Roster
from stretto.loop.engines.router import Router
from stretto.store.totals import Membership


def test_nobody_up_means_nobody_gets_it() -> None:
    router = Router([])
    assert router.start(8) is None
    router.join("engine-0")
    assert router.start(8) == "engine-0"
    router.leave("engine-0")
    assert router.start(8) is None
    assert router.up == frozenset()


def test_an_engine_that_comes_back_still_owes_what_it_had() -> None:
    router = Router(["engine-0", "engine-1"])
    assert router.start(8) == "engine-0"
    router.leave("engine-0")
    router.join("engine-0")
    assert router.start(4) == "engine-1"
    router.finish("engine-0", 8)
    assert router.start(8) == "engine-0"


@given(sizes=st.lists(st.integers(1, 16), min_size=1, max_size=50), engines=st.integers(1, 4))
def test_loads_never_differ_by_more_than_one_group(sizes: list[int], engines: int) -> None:
    router = Router([f"engine-{number}" for number in range(engines)])
    loads = dict.fromkeys(sorted(router.up), 0)
    for size in sizes:
        name = router.start(size)
        assert name is not None
        loads[name] += size
        assert max(loads.values()) - min(loads.values()) <= max(sizes)


KILLED = "was killed by SIGKILL"


def test_an_engine_that_is_replaced_keeps_its_row_and_the_reason() -> None:
    roster = Roster()
    roster.serves("engine-0", "native", "here", 0)
    roster.step = 4
    roster.serves("engine-0", "native", "here", 4)
    roster.left("engine-0", KILLED)
    assert roster.rows() == [Membership("engine-0", "native", "here", 4, 0, left_step=4, reason=KILLED)]
    roster.step = 5
    roster.serves("engine-0", "native", "here", 5)
    assert roster.rows() == [Membership("engine-0", "native", "here", 5, 0, left_step=None, reason=KILLED)]


def test_an_engine_that_joins_in_mid_run_and_leaves_for_good_has_both_steps() -> None:
    roster = Roster()
    roster.serves("engine-0", "native", "here", 0)
    roster.step = 3
    roster.serves("spot", "native", "there", 3)
    roster.step = 7
    roster.left("spot", "its lease ended")
    roster.left("spot", "its connection broke")  # the first reason stands
    assert roster.rows()[1] == Membership("spot", "native", "there", 3, 3, left_step=7, reason="its lease ended")


def test_an_engine_that_never_served_is_not_on_the_roster() -> None:
    roster = Roster()
    roster.left("engine-0", KILLED)
    assert roster.rows() == []


def test_a_resumed_run_goes_on_with_the_rows_and_says_who_did_not_come_back() -> None:
    earlier = [Membership("engine-0", "native", "old", 5, 0), Membership("spot", "native", "there", 2, 1, 2, "lost")]
    roster = Roster()
    roster.serves("engine-0", "native", "new", 5)  # the engines start before the ledger is read
    roster.restore([*earlier, Membership("engine-1", "native", "old", 5, 0)], step=5)
    resumed = "the run ended, and was resumed"
    assert roster.rows() == [
        Membership("engine-0", "native", "new", 5, 0, None, resumed),
        Membership("engine-1", "native", "old", 5, 0, 5, resumed),
        Membership("spot", "native", "there", 2, 1, 2, "lost"),
    ]
