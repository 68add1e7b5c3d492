"""Synchronous wrapper of asynchronous reward functions; each call runs to its end."""

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
    """Runs each call's coroutine on one event loop, which lives as long as this object, so that HTTP clients of the
    reward stay connected."""

    def __init__(self, function: Callable[..., Coroutine[Any, Any, float | bool]]) -> None:
        self._function, self._runner = function, asyncio.Runner()
        functools.update_wrapper(self, function)  # its signature
        weakref.finalize(self, self._runner.close)

    def __call__(self, prompt: str, completion: str, answer: str, /, **fields: Any) -> float | bool:
        return self._runner.run(self._function(prompt, completion, answer, **fields))


def awaited(function: RewardFunction) -> RewardFunction:
    """Return the function itself, or, if it is asynchronous, a synchronous wrapper of it."""
    # A call runs the type's `__call__`, not an attribute of the instance.
    call = getattr(type(function), "__call__", None)  # noqa: B004
    inner = function.func if isinstance(function, functools.partial) else function
    return _Awaited(function) if any(map(inspect.iscoroutinefunction, (inner, call))) else function  # type: ignore[arg-type]


def is_machinery(file: str) -> bool:
    """Whether `file`, the file of a stack frame, is this module or part of asyncio, not the user's code."""
    return file.startswith(_MACHINERY)
