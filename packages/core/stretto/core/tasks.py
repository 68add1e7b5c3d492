"""Helpers for concurrent tasks that end together."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Future
from typing import Any, NoReturn, TypeVar

T = TypeVar("T")


async def run_beside(watch: Coroutine[Any, Any, NoReturn], work: Awaitable[T]) -> T:
    """Await `work` while `watch` runs beside it; returns the result of `work` or raises its error. If `watch` fails
    first, its error is raised. The other one is then cancelled and awaited."""
    task, watcher = asyncio.ensure_future(work), asyncio.ensure_future(watch)
    try:
        await asyncio.wait([task, watcher], return_when=asyncio.FIRST_COMPLETED)
        return await (task if task.done() else watcher)
    finally:
        await cancel_and_wait([task, watcher])


async def first_of(*futures: asyncio.Future[Any]) -> None:
    """Wait until one of the futures is done, and return nothing; no future is cancelled, and no error is raised. There
    is no timeout: the caller must set one."""
    await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)


async def cancel_and_wait(tasks: list[asyncio.Future[Any]]) -> None:
    """Cancel tasks and wait until they have ended; results and errors are dropped."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def gather_or_cancel(*coroutines: Coroutine[Any, Any, T]) -> list[T]:
    """Run the coroutines concurrently; returns their results in order. The first failure cancels the others and is
    raised unchanged."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    if not tasks:
        return []
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        for task in done:
            await task
        return [task.result() for task in tasks]
    finally:
        await cancel_and_wait([*tasks])


async def to_the_end(work: Coroutine[Any, Any, T]) -> T:
    """Await `work` and return its result. If the caller is cancelled meanwhile, CancelledError is raised only after
    `work` is done; an error of `work` is dropped then."""
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        if not task.cancelled():
            task.exception()  # looked at, or the event loop would print it
        raise


async def gather_to_the_end(*coroutines: Coroutine[Any, Any, Any]) -> None:
    """Run all coroutines concurrently to their end, then raise the first failure (in the order given) unchanged."""
    for end in await asyncio.gather(*coroutines, return_exceptions=True):
        if isinstance(end, BaseException):
            raise end


async def each_to_the_end(*steps: Callable[[], Awaitable[object]]) -> None:
    """Take all steps one after the other, each also if one before it failed; then raise the first failure unchanged."""
    first: BaseException | None = None
    for step in steps:
        try:
            await step()
        except BaseException as error:  # cancellation too: an end is not left half done
            first = first or error
    if first is not None:
        raise first


def in_daemon_thread(work: Callable[[], T], name: str) -> Future[T]:
    """Run `work` in a new thread, called `name`; returns the future of its result. Unlike that of `asyncio.to_thread`,
    the thread is not awaited by an event loop that closes, and dies with the process."""
    future = Future[T]()
    future.set_running_or_notify_cancel()  # from now on nobody can cancel it

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # the caller gets it, whatever it is
            future.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future


class NamedTasks:
    """Named tasks watched together; tasks may come and go meanwhile.

    Example::

        tasks = NamedTasks()
        tasks.add("engine-0", supervise(engine))
        await tasks.watch()              # until one of them fails
    """

    def __init__(self) -> None:
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._changed = asyncio.Event()

    @property
    def names(self) -> frozenset[str]:
        """Names of the tasks."""
        return frozenset(self._tasks)

    def add(self, name: str, work: Coroutine[Any, Any, None]) -> None:
        """Start `work` as a task, which `watch` then watches; an earlier one of this name must have ended or been
        dropped."""
        self._tasks[name] = asyncio.create_task(work, name=name)
        self._changed.set()

    def drop(self, name: str) -> None:
        """Stop watching a task, and cancel it unless it is the calling task itself. Unknown names are ignored."""
        task = self._tasks.pop(name, None)
        if task is not None and task is not asyncio.current_task():
            task.cancel()
        self._changed.set()

    async def watch(self) -> NoReturn:
        """Wait until a task fails, and raise its error unchanged. Tasks that end without an error, or are cancelled,
        are dropped; without any task it waits for ever. There is no timeout: the caller must set one."""
        while True:
            self._changed.clear()
            change = asyncio.ensure_future(self._changed.wait())
            try:
                await asyncio.wait([change, *self._tasks.values()], return_when=asyncio.FIRST_COMPLETED)
            finally:
                await cancel_and_wait([change])
            for name, task in [*self._tasks.items()]:
                if task.done():
                    del self._tasks[name]
                    if not task.cancelled():
                        task.result()

    async def close(self) -> None:
        """Cancel all tasks, and wait until they have ended; their errors are dropped."""
        await cancel_and_wait([*self._tasks.values()])
        self._tasks.clear()
