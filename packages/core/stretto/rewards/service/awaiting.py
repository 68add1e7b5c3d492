"""Adapter for asynchronous reward functions: called like any other, one completion after the other."""

from __future__ import annotations

import asyncio
import functools
import inspect
import weakref
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from stretto.rewards.functions import RewardFunction

_MACHINERY = (str(Path(asyncio.__file__).parent), __file__)


class _Awaited:
    """Runs the coroutine on an event loop that lives as long as the reward, so that its HTTP clients stay connected."""

    def __init__(self, function: Callable[..., Coroutine[Any, Any, float | bool]]) -> None:
        self._function, self._runner = function, asyncio.Runner()
        functools.update_wrapper(self, function)  # its signature
        weakref.finalize(self, self._runner.close)

    def __call__(self, prompt: str, completion: str, answer: str, /, **fields: Any) -> float | bool:
        return self._runner.run(self._function(prompt, completion, answer, **fields))


def awaited(function: RewardFunction) -> RewardFunction:
    """The function itself, or a synchronous wrapper if it is asynchronous."""
    # Asking for `type(...)`: an instance's own attribute would not be what a call runs.
    call = getattr(type(function), "__call__", None)  # noqa: B004
    inner = function.func if isinstance(function, functools.partial) else function
    return _Awaited(function) if any(map(inspect.iscoroutinefunction, (inner, call))) else function  # type: ignore[arg-type]


def is_machinery(file: str) -> bool:
    """Whether `file` is a stack frame of the wrapper or of asyncio, not of the user's code."""
    return file.startswith(_MACHINERY)
