"""Signals as requests, and the three ways of doing things together."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import asynccontextmanager
from typing import Any, NoReturn, TypeVar

import pytest

from stretto.core.errors import EngineLost
from stretto.core.tasks import gather_or_cancel, run_beside
from stretto.processes.stopping import ONCE, StopSignal, until_cut_short
from tests.launch.running import default_dispositions

T = TypeVar("T")
LOST = EngineLost("engine-0", "is gone")


@pytest.fixture(autouse=True)
def _signals() -> Iterator[None]:
    with default_dispositions():
        yield


class Sleeper:
    """Work without an end that tells whether it was put away."""

    def __init__(self) -> None:
        self.cancelled = False

    async def sleep(self) -> NoReturn:
        try:
            while True:
                await asyncio.sleep(60)
        finally:
            self.cancelled = True


async def after(seconds: float, value: T) -> T:
    await asyncio.sleep(seconds)
    return value


async def lost() -> NoReturn:
    await asyncio.sleep(0)
    raise LOST


@asynccontextmanager
async def signalled(number: signal.Signals) -> AsyncIterator[StopSignal]:
    """A request that a signal makes while the block runs."""
    stopped = StopSignal()
    asyncio.get_running_loop().call_later(0.02, os.kill, os.getpid(), number)
    yield stopped


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
async def test_a_signal_is_a_request_and_ends_what_waits(number: signal.Signals, code: int) -> None:
    sleeper = Sleeper()
    waits: Coroutine[Any, Any, object] = sleeper.sleep()
    async with signalled(number) as stopped:
        assert (stopped.requested, stopped.exit_code) == (False, 0)
        assert await stopped.unless(waits) is None
    assert (stopped.exit_code, sleeper.cancelled) == (code, True)


async def test_a_signal_that_is_ignored_from_the_start_stays_ignored() -> None:
    """By `nohup`, say."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    async with signalled(signal.SIGHUP) as stopped:
        assert await stopped.unless(after(0.1, "went on")) == "went on"
    assert not stopped.requested


async def test_work_that_is_done_first_keeps_its_result() -> None:
    assert await StopSignal().unless(after(0.01, "done")) == "done"


async def test_whoever_asks_to_be_called_is_called_once_at_once_if_need_be() -> None:
    calls: list[str] = []
    async with signalled(signal.SIGTERM) as stopped:
        stopped.call(lambda: calls.append("before"))
        await stopped.unless(Sleeper().sleep())
        stopped.call(lambda: calls.append("after"))
    assert calls == ["before", "after"]


def test_a_signal_that_comes_twice_at_once_is_one_request() -> None:
    """As `timeout` sends it; another signal is a second request."""

    async def main(second: signal.Signals) -> int:
        async with signalled(signal.SIGTERM) as stopped:
            await stopped.unless(Sleeper().sleep())
            os.kill(os.getpid(), second)
            await asyncio.sleep(2 * ONCE)
            return stopped.exit_code

    assert asyncio.run(main(signal.SIGTERM)) == 143
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(main(signal.SIGINT))


def test_a_second_signal_ends_a_command_with_its_code_and_nothing_more() -> None:
    async def main() -> None:
        async with signalled(signal.SIGTERM) as stopped:
            await stopped.unless(Sleeper().sleep())
            await asyncio.sleep(2 * ONCE)
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.sleep(5)

    with pytest.raises(SystemExit) as end:
        until_cut_short(main())
    assert end.value.code == 130
    assert until_cut_short(after(0.0, 7)) == 7


async def test_the_first_failure_of_many_puts_the_others_away() -> None:
    sleeper = Sleeper()
    with pytest.raises(EngineLost):
        await gather_or_cancel(sleeper.sleep(), lost(), sleeper.sleep())
    assert sleeper.cancelled


async def test_many_that_end_well_end_together() -> None:
    assert await gather_or_cancel(after(0.01, 1), after(0.0, 2)) == [1, 2]


async def test_a_watch_goes_on_beside_the_work_and_its_failure_counts() -> None:
    sleeper = Sleeper()
    assert await run_beside(sleeper.sleep(), after(0.01, "done")) == "done"
    assert sleeper.cancelled
    with pytest.raises(EngineLost):
        await run_beside(lost(), Sleeper().sleep())
