"""Event loop of servers (uvloop)."""

from __future__ import annotations

from asyncio import AbstractEventLoop
from collections.abc import Coroutine
from typing import Any, TypeVar

import uvloop

Result = TypeVar("Result")


def new_event_loop() -> AbstractEventLoop:
    """Create an event loop of uvloop; it is not running."""
    return uvloop.new_event_loop()


def run(main: Coroutine[Any, Any, Result]) -> Result:
    """Run a coroutine to its end in a new event loop of uvloop; returns its result or raises its error."""
    return uvloop.run(main)
