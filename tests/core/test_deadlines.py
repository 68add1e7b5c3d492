"""Promises of a deadline: it names owner, wait and seconds; it swallows neither errors nor cancellations. And of work
that goes on to its end after its caller was cancelled.
"""

import asyncio
import gc

import pytest

from stretto.core.deadlines import deadline
from stretto.core.errors import DeadlineExceeded
from stretto.core.tasks import to_the_end


def test_a_wait_that_is_too_long_ends_with_its_owner_and_its_name() -> None:
    async def wait() -> None:
        async with deadline("conductor", "engine-0 to load version 7", 0.01):
            await asyncio.sleep(5)

    with pytest.raises(DeadlineExceeded, match=r"conductor waited 0\.01 s for engine-0 to load version 7"):
        asyncio.run(wait())


def test_a_timeout_inside_that_is_not_this_deadlines_passes_through() -> None:
    async def wait() -> None:
        async with deadline("conductor", "something", 5):
            raise TimeoutError("another clock")

    with pytest.raises(TimeoutError, match="another clock"):
        asyncio.run(wait())


async def test_a_cancellation_from_outside_stays_a_cancellation() -> None:
    async def wait() -> None:
        async with deadline("conductor", "something", 5):
            await asyncio.sleep(5)

    task = asyncio.create_task(wait())
    await asyncio.sleep(0.01)
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled()


async def test_work_that_outlives_its_caller_fails_without_a_word() -> None:
    said, started = list[object](), asyncio.Event()
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: said.append(context))

    async def work() -> None:
        started.set()
        await asyncio.sleep(0.01)
        raise ValueError

    caller = asyncio.create_task(to_the_end(work()))
    await started.wait()
    caller.cancel()
    await asyncio.wait([caller])
    assert caller.cancelled()
    del caller
    gc.collect()
    assert said == []
