"""Event loop of servers (uvloop)."""

from __future__ import annotations

from asyncio import AbstractEventLoop
from collections.abc import Coroutine
from typing import Any, TypeVar

import uvloop

Result = TypeVar("Result")


def new_event_loop() -> AbstractEventLoop:
    """Create an event loop that is not running."""
    return uvloop.new_event_loop()


def run(main: Coroutine[Any, Any, Result]) -> Result:
    """Same as `asyncio.run`, with the event loop of servers."""
    return uvloop.run(main)
