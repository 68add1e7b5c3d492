"""Tasks that run side by side, and how they end together."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Coroutine
from typing import Any, NoReturn, TypeVar

T = TypeVar("T")


async def run_beside(watch: Coroutine[Any, Any, NoReturn], work: Awaitable[T]) -> T:
    """The result of `work`, or the error of `watch`, which runs beside it."""
    task, watcher = asyncio.ensure_future(work), asyncio.ensure_future(watch)
    try:
        await asyncio.wait([task, watcher], return_when=asyncio.FIRST_COMPLETED)
        return await (task if task.done() else watcher)
    finally:
        await cancel_and_wait([task, watcher])


async def cancel_and_wait(tasks: list[asyncio.Future[Any]]) -> None:
    """Cancel tasks and wait until they have ended; their results and errors are dropped."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def gather_or_cancel(*coroutines: Coroutine[Any, Any, T]) -> list[T]:
    """The results of all of them; the first failure cancels the others and is raised as it is."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        for task in done:
            await task
        return [task.result() for task in tasks]
    finally:
        await cancel_and_wait([*tasks])


async def gather_to_the_end(*coroutines: Coroutine[Any, Any, Any]) -> None:
    """Run all of them to their end, then raise the first failure as it is."""
    for end in await asyncio.gather(*coroutines, return_exceptions=True):
        if isinstance(end, BaseException):
            raise end
