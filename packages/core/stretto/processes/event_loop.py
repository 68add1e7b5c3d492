"""Event loop of conductors and servers: uvloop's, or asyncio's where there is no uvloop."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

try:
    from uvloop import new_event_loop as _new_event_loop
except ImportError:  # the platform has none, or it is not installed
    from asyncio import new_event_loop as _new_event_loop  # type: ignore[assignment]

Result = TypeVar("Result")

made = False  #: whether this process has made a loop here


def new_event_loop() -> asyncio.AbstractEventLoop:
    """Make a new event loop. A process that has made one cannot become a fork server: uvloop holds two descriptors, and
    closes their numbers in each forked process, whatever the fork server has opened there."""
    global made
    made = True
    return _new_event_loop()


async def send(writer: asyncio.StreamWriter, data: bytes | bytearray | memoryview) -> None:
    """Write to a stream, and wait while its peer does not read. Raises ConnectionError if the connection is closed."""
    if writer.is_closing():  # asyncio drops what is written then, and uvloop raises RuntimeError
        raise ConnectionResetError("the connection is closed")
    writer.write(data)
    await writer.drain()


def run(main: Coroutine[Any, Any, Result]) -> Result:
    """Run a coroutine to its end in a new event loop; returns its result or raises its error."""
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        return runner.run(main)
