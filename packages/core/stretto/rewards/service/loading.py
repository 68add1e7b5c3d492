"""Loading of a reward function by name. An asynchronous one gets a synchronous wrapper, in which each call runs to its
end.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import json
import weakref
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from stretto.core.errors import Problem, RecipeError, RewardFunctionError
from stretto.doors.loading import is_generator, load, why_not_called
from stretto.rewards.built_in import BUILT_IN
from stretto.rewards.functions import RewardFunction
from stretto_verify.verdicts import SandboxRefused

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


PLACE = "rewards.function"
_CONTRACT = "a reward is called as function(prompt, completion, answer) and returns a number or a bool"


def load_reward(name: str, settings: str = "{}", place: str = PLACE) -> RewardFunction:
    """Load the reward `name`: a built-in, or ``package.module:function`` from the import path. An asynchronous function
    is returned in a synchronous wrapper. `settings`: the built-in's section of the recipe, as JSON. `place`: the
    recipe's key, for messages.

    Raises:
        RewardFunctionError: the name is unknown; the module cannot be imported; the object is not callable with three
            arguments, or is a generator; or a built-in does not work on this machine.
    """
    try:
        found = load(name, place, "reward", {kind: one.function for kind, one in BUILT_IN.items()})
    except RecipeError as error:
        raise RewardFunctionError(error.problems) from error
    built_in = BUILT_IN.get(name)
    if built_in is not None and built_in.configured and callable(found):
        try:
            found = found(settings)
        except SandboxRefused as refusal:
            raise _refused(f"rewards.{name}", refusal.found, refusal.remedy) from refusal
    return _checked(place, name, found)


def _checked(place: str, name: str, found: object) -> RewardFunction:
    further = _further(found) if callable(found) else ()
    if why := why_not_called(found, name, ("prompt", "completion", "answer"), further):
        raise _refused(place, why, _CONTRACT)
    function: RewardFunction = found  # type: ignore[assignment]  # it is callable, as was asked above
    if is_generator(function):
        raise _refused(place, f"{name!r} is a generator", f"{_CONTRACT}, by 'return' and not by 'yield'")
    return awaited(function)


def fields_taken(function: Callable[..., object], row: str) -> dict[str, Any]:
    """Keyword arguments for a reward function: the fields of a row that its further parameters name, or all fields if
    it has ``**fields``. `row`: JSON object, or ""."""
    if not row:
        return {}
    fields: dict[str, Any] = json.loads(row)
    try:
        takes_all = any(p.kind is p.VAR_KEYWORD for p in inspect.signature(function).parameters.values())
        return fields if takes_all else {name: fields[name] for name in _further(function) if name in fields}
    except ValueError:  # written in C, without a signature
        return {}


def why_lacking(function: Callable[..., object], row: str) -> str:
    """Return which required parameters of a reward function the row has no field for, with the fields that it has; ""
    if it lacks none. `row`: JSON object, or ""."""
    fields: dict[str, Any] = json.loads(row) if row else {}
    try:
        parameters = inspect.signature(function).parameters
        named = [name for name in _further(function) if parameters[name].default is inspect.Parameter.empty]
    except ValueError:  # written in C, without a signature
        return ""
    lacking = ", ".join(repr(name) for name in named if name not in fields)
    has = "the further fields " + ", ".join(map(repr, fields)) if fields else "no further fields"
    return f"the reward takes {lacking}, and the row has {has}" if lacking else ""


def _further(found: Callable[..., object]) -> list[str]:
    """Names of the parameters beyond prompt, completion and answer."""
    parameters = list(inspect.signature(found).parameters.values())
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    first = [parameter.name for parameter in parameters if parameter.kind in positional][:3]
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return [p.name for p in parameters if p.kind in named and p.name not in (*first, "prompt", "completion", "answer")]


def _refused(place: str, found: str, remedy: str) -> RewardFunctionError:
    return RewardFunctionError([Problem(place, found, remedy)])
