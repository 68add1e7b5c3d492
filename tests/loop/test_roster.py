"""The roster of engines: one row for each name, with the step of its coming and going; a resumed run adds to it."""

from __future__ import annotations

from stretto.loop.engines.roster import Roster
from stretto.store.totals import Membership

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
