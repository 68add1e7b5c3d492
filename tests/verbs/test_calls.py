"""Promises of `stretto.Ledger.call`, the calls of tools in a loop of one's own:

- After a kill the loop makes its calls again, and each that had ended is answered from the record, in its order, with
  no second effect.
- A call that was cut short is not made a second time, unless it is repeatable; nor is one after it.
- Calls of several answers go on side by side. A ticket that is no longer in flight leaves no record.
- Mistakes are named."""

import os
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from threading import Barrier

import pytest

import stretto
from stretto.core.errors import CallInterrupted

FORKED = get_context("fork")
Converse = Callable[[stretto.Ledger, stretto.Ticket, Path], None]


def ticket_of(ledger: stretto.Ledger) -> stretto.Ticket:
    found = stretto.Scheduler([(2, 3, 4)], batch_size=1, group_size=2, ledger=ledger).admit()
    assert found is not None
    return found


def effect(done: Path, reply: str) -> Callable[[], str]:
    """A tool that is seen to be called: a line of the file for each time."""

    def run() -> str:
        with done.open("a") as file:
            file.write(f"{reply}\n")
        return reply

    return run


def killed_while(folder: Path, done: Path, converse: Converse) -> None:
    """A process that makes calls, until one of them kills it."""

    def live() -> None:
        with stretto.Ledger(folder) as ledger:
            converse(ledger, ticket_of(ledger), done)

    process = FORKED.Process(target=live)
    process.start()
    process.join(60)
    assert process.exitcode == -signal.SIGKILL


def die() -> str:
    os.kill(os.getpid(), signal.SIGKILL)
    return "never"


def test_after_a_kill_calls_that_had_ended_are_answered_from_the_record(tmp_path: Path) -> None:
    def converse(ledger: stretto.Ledger, ticket: stretto.Ticket, done: Path) -> None:
        for reply in ("one", "two"):
            ledger.call((ticket, 0), "draw", effect(done, reply))
        ledger.call((ticket, 1), "draw", effect(done, "another answer's"))
        die()

    folder, done = tmp_path / "loop", tmp_path / "done"
    killed_while(folder, done, converse)
    with stretto.Ledger(folder) as ledger:
        ticket = ticket_of(ledger)
        again = [ledger.call((ticket, 0), "draw", effect(done, reply)) for reply in ("three", "four", "five")]
        assert again == ["one", "two", "five"]
        assert ledger.call((ticket, 1), "draw", effect(done, "six")) == "another answer's"
    assert done.read_text().split("\n")[:-1] == ["one", "two", "another answer's", "five"]


def test_a_call_that_was_cut_short_is_not_made_a_second_time(tmp_path: Path) -> None:
    def converse(ledger: stretto.Ledger, ticket: stretto.Ticket, done: Path) -> None:
        ledger.call((ticket, 0), "look", effect(done, "7"))
        ledger.call((ticket, 0), "pay", lambda: effect(done, "paid")() + die())

    folder, done = tmp_path / "loop", tmp_path / "done"
    killed_while(folder, done, converse)
    with stretto.Ledger(folder) as ledger:
        ticket = ticket_of(ledger)
        assert ledger.call((ticket, 0), "look", effect(done, "8")) == "7"
        for asked in ("pay", "pay twice"):
            with pytest.raises(CallInterrupted, match=r"pay.* was cut short, and is not made a second time"):
                ledger.call((ticket, 0), asked, effect(done, "paid again"))
        assert ledger.call((ticket, 1), "pay", effect(done, "another's")) == "another's"
    assert done.read_text().split() == ["7", "paid", "another's"]


def test_a_repeatable_call_that_was_cut_short_is_made_again(tmp_path: Path) -> None:
    def converse(ledger: stretto.Ledger, ticket: stretto.Ticket, done: Path) -> None:
        ledger.call((ticket, 0), "add", effect(done, "7"), repeatable=True)
        ledger.flush()
        ledger.call((ticket, 0), "add", die, repeatable=True)

    folder, done = tmp_path / "loop", tmp_path / "done"
    killed_while(folder, done, converse)
    with stretto.Ledger(folder) as ledger:
        ticket = ticket_of(ledger)
        found = [ledger.call((ticket, 0), "add", effect(done, reply), repeatable=True) for reply in ("8", "9")]
    assert (found, done.read_text().split()) == (["7", "9"], ["7", "9"])


def test_calls_go_on_side_by_side_and_those_of_a_lost_ticket_leave_no_record(tmp_path: Path) -> None:
    both = Barrier(2, timeout=30)
    with stretto.Ledger(tmp_path) as ledger, ThreadPoolExecutor(2) as threads:
        scheduler = stretto.Scheduler([(2, 3, 4)], batch_size=1, group_size=2, ledger=ledger)
        ticket = scheduler.admit()
        assert ticket is not None
        found = threads.map(lambda member: ledger.call((ticket, member), "wait", lambda: f"{both.wait() >= 0}"), (0, 1))
        assert list(found) == ["True", "True"]

        def lost() -> str:
            scheduler.lose(ticket, "nobody waits for it")
            return "late"

        assert ledger.call((ticket, 0), "lose", lost) == "late"
        assert ledger.call((ticket, 0), "after", lambda: "free") == "free"
        assert (ledger.balance().failed, ledger.balance().in_flight) == (2, 0)


def test_a_failing_call_is_raised_and_mistakes_are_named(tmp_path: Path) -> None:
    with stretto.Ledger(tmp_path) as ledger:
        ticket = ticket_of(ledger)
        with pytest.raises(ZeroDivisionError):
            ledger.call((ticket, 0), "divide", lambda: str(1 / 0))
        assert ledger.call((ticket, 0), "divide", lambda: "2") == "2"
        with pytest.raises(stretto.DataError, match=r"call: turn: .*; give a ticket and the number of one of its"):
            ledger.call((ticket, 2), "divide", lambda: "2")
        with pytest.raises(stretto.DataError, match=r"call: run: reply: 2.*; give a text"):
            ledger.call((ticket, 0), "count", lambda: 2)  # type: ignore[arg-type,return-value]
    with pytest.raises(stretto.RunFolderError, match="the ledger is closed"):
        ledger.call((ticket, 0), "divide", lambda: "2")
