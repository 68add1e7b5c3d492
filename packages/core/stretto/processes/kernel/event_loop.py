"""The event loop of servers."""

from __future__ import annotations

from asyncio import AbstractEventLoop
from collections.abc import Coroutine
from typing import Any, TypeVar

import uvloop

Result = TypeVar("Result")


def new_event_loop() -> AbstractEventLoop:
    """A loop that nobody runs yet."""
    return uvloop.new_event_loop()


def run(main: Coroutine[Any, Any, Result]) -> Result:
    """As `asyncio.run`, by the loop of servers."""
    return uvloop.run(main)
