"""The thread that engines of one's own loops sample in.

- When its process ends, nothing in it still waits: every coroutine is cancelled, and runs to its end.
- Its event loop is closed then. What is started later, by a finalizer, is cancelled.
"""

import asyncio
import inspect
import threading

from stretto_verbs.background import Background


def test_at_the_end_each_coroutine_is_cancelled_and_runs_to_its_end() -> None:
    thread, ended, waiting = Background(), list[int](), threading.Semaphore(0)

    async def wait(number: int) -> None:
        waiting.release()
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            ended.append(number)

    for _ in [thread.start(wait(number)) for number in range(3)]:
        assert waiting.acquire(timeout=10)
    thread._end()
    assert sorted(ended) == [0, 1, 2]
    assert asyncio.all_tasks(thread.loop) == set()
    assert thread.loop.is_closed()


def test_what_is_started_after_the_end_is_cancelled_and_its_coroutine_closed() -> None:
    thread = Background()
    thread._end()
    thread._end()  # again, as the exit of this process will
    late = asyncio.sleep(0)
    assert thread.start(late).cancelled()
    assert inspect.getcoroutinestate(late) == inspect.CORO_CLOSED
