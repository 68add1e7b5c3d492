"""Loading of a reward function by name, its call, and the conversion of a result or failure to a verdict; of several
rewards, the weighted sum is one verdict. An asynchronous function gets a synchronous wrapper, in which each call runs
to its end.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import json
import os
import sys
import traceback
import weakref
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from stretto.core.errors import Problem, RecipeError, RewardFunctionError, nearest
from stretto.core.records import Outcome, Verdict
from stretto.core.states import misfit, why_no_reward
from stretto.doors.loading import is_generator, load, why_not_called
from stretto.rewards.built_in import BUILT_IN
from stretto.rewards.functions import RewardFunction, Undecided
from stretto.rewards.service.wire import PartSettings, ScoreItem, Worth
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
    """Return `function` itself, or, if it is asynchronous, a synchronous wrapper of it with the same signature."""
    # A call runs the type's `__call__`, not an attribute of the instance.
    call = getattr(type(function), "__call__", None)  # noqa: B004
    inner = function.func if isinstance(function, functools.partial) else function
    return _Awaited(function) if any(map(inspect.iscoroutinefunction, (inner, call))) else function  # type: ignore[arg-type]


def is_machinery(file: str) -> bool:
    """Whether `file`, the file of a stack frame, is this module or part of asyncio, not the user's code."""
    return file.startswith(_MACHINERY)


PLACE = "rewards.function"
_CONTRACT = (
    "a reward is called for one completion, as function(prompt, completion, answer), and returns a number or a bool"
)


def load_reward(name: str, settings: str = "{}", place: str = PLACE) -> RewardFunction:
    """Load the reward `name`: a built-in, or ``package.module:function`` from the import path. An asynchronous function
    is returned in a synchronous wrapper. `settings`: the built-in's section of the recipe, as JSON; other rewards do
    not get it. `place`: the recipe's key that names the function, for messages.

    Raises:
        RewardFunctionError: the name is unknown; the module cannot be imported; the object is not callable with prompt,
            completion and answer, or is a generator; or a built-in does not work on this machine.
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
    """Return the keyword arguments for a reward function: the fields of a row that its further parameters name, or, if
    it has ``**fields``, all fields but those with the names of its first three parameters. Empty for a function written
    in C without a signature. `row`: its fields as a JSON object; "": none."""
    if not row:
        return {}
    fields: dict[str, Any] = json.loads(row)
    try:
        parameters, further = inspect.signature(function).parameters.values(), _further(function)
    except ValueError:  # written in C, without a signature
        return {}
    if not any(p.kind is p.VAR_KEYWORD for p in parameters):
        return {name: fields[name] for name in further if name in fields}
    first = {p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD} - set(further)  # called by position
    return {name: value for name, value in fields.items() if name not in first}


def why_lacking(function: Callable[..., object], row: str) -> str:
    """Return a sentence that names the required parameters of a reward function for which the row has no field, and the
    row's fields, or the one with the most similar name; "" if none is missing or the function has no signature. `row`:
    its fields as a JSON object."""
    fields: dict[str, Any] = json.loads(row) if row else {}
    try:
        parameters = inspect.signature(function).parameters
        named = [name for name in _further(function) if parameters[name].default is inspect.Parameter.empty]
    except ValueError:  # written in C, without a signature
        return ""
    lacking = [name for name in named if name not in fields]
    has = "the further fields " + ", ".join(map(repr, fields)) if fields else "no further fields"
    near = [one for one in (nearest(name, fields) for name in lacking) if one.startswith("did")]
    told = "; ".join([f"the reward takes {', '.join(map(repr, lacking))}, and the row has {has}", *near])
    return told if lacking else ""


def _further(found: Callable[..., object]) -> list[str]:
    """Names of the parameters beyond prompt, completion and answer. The first three positional parameters count as
    these, whatever their names are."""
    parameters = list(inspect.signature(found).parameters.values())
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    first = [parameter.name for parameter in parameters if parameter.kind in positional][:3]
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return [p.name for p in parameters if p.kind in named and p.name not in (*first, "prompt", "completion", "answer")]


def _refused(place: str, found: str, remedy: str) -> RewardFunctionError:
    return RewardFunctionError([Problem(place, found, remedy)])


_REASON_LIMIT = 300  # characters; a user's exception may carry a whole document


def judge(function: RewardFunction, item: ScoreItem, worth: Worth, name: str = "") -> Verdict:
    """Call `function` on one completion; returns the verdict. Any exception (SystemExit too) or an invalid result gives
    an undecided verdict with the reason. `worth`: rewards of right and wrong. `name`: of the reward, for the reason."""
    try:
        with forks_end():
            value = _plain(function(item.prompt, item.completion, item.answer))
    except Undecided as error:
        return undecided(str(error))
    # User code: not even SystemExit or KeyboardInterrupt raised in it may end the worker.
    except BaseException as error:
        return undecided(f"the reward raised {_described(error)}")
    verdict = verdict_of(value, worth, f"the reward {name}".rstrip())
    if verdict.outcome is not Outcome.UNDECIDED:
        return verdict
    code = getattr(inspect.unwrap(function), "__code__", None)
    return verdict if code is None else undecided(f"{verdict.reason} ({code.co_filename}:{code.co_firstlineno})")


def verdict_of(value: object, worth: Worth, what: str = "the reward") -> Verdict:
    """Return the verdict for the value that a reward returned. A bool is worth `worth.right` or `worth.wrong`; a number
    is the reward itself, and right if it is above `worth.threshold`. Any other value, and a number that is not finite
    or beyond ±1e6, is undecided; `what` returned it."""
    if isinstance(value, bool):
        return Verdict(Outcome.RIGHT, worth.right) if value else Verdict(Outcome.WRONG, worth.wrong)
    if not isinstance(value, int | float):
        return undecided(f"{what} returned {misfit(value, 'not a number or a bool')}")
    if why := why_no_reward(value):
        return undecided(f"{what} returned {why}")
    reward = float(value)
    return Verdict(outcome=Outcome.RIGHT if reward > worth.threshold else Outcome.WRONG, reward=reward)


def _plain(value: Any) -> object:
    """Convert a scalar or 0-d array of numpy or torch to a Python number; other values are returned unchanged."""
    return value.item() if getattr(value, "shape", None) == () else value


def undecided(reason: str) -> Verdict:
    """Make an undecided verdict: no reward, and the reason, cut to 300 characters. Lone surrogates, which no wire and
    no file can carry, are escaped."""
    return Verdict(outcome=Outcome.UNDECIDED, reward=None, reason=carried(reason[:_REASON_LIMIT])[:_REASON_LIMIT])


def carried(text: str) -> str:
    """Return the text with its lone surrogates escaped, which no wire and no file can carry."""
    return text.encode(errors="backslashreplace").decode()


@contextmanager
def forks_end() -> Iterator[None]:
    """Context manager around a user's code: a child that this code has forked ends where it leaves the block, by an
    error or not, with the exit code of an interpreter. It would otherwise go on as a second worker on the same wire."""
    worker = os.getpid()
    try:
        yield
    except BaseException as error:
        if os.getpid() != worker:
            _leave(error)
        raise
    if os.getpid() != worker:
        _leave(None)


def _leave(error: BaseException | None) -> NoReturn:
    code = int(error is not None)
    if isinstance(error, SystemExit):
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    elif error is not None:
        with suppress(BaseException):  # its text is user code
            traceback.print_exception(error)
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(code & 0xFF)


def _described(error: BaseException) -> str:
    try:
        text = str(error)
    # Even an exception's own __str__ is user code.
    except BaseException:
        text = "(its message cannot be shown)"
    kind = f"{type(error).__name__}{_place(error)}"
    return f"{kind}: {text}" if text else kind


def _place(error: BaseException) -> str:
    """Text `` in FILE:LINE`` for the innermost line of the reward's own file in the traceback; "" without one."""
    frames = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__)][1:]
    frames = [(file, line) for file, line in frames if not is_machinery(file)]
    own = [f" in {file}:{line}" for file, line in frames if file == frames[0][0]]
    return own[-1] if own else ""


@dataclass(frozen=True)
class LoadedPart:
    """One reward of the sum: its settings, and its loaded function."""

    settings: PartSettings
    function: RewardFunction

    def judges(self, item: ScoreItem) -> bool:
        """Whether the part judges completions of the item's source."""
        return not self.settings.sources or item.source in self.settings.sources

    def verdict(self, item: ScoreItem, worth: Worth) -> Verdict:
        """Judge the item by this part alone, whatever its source, before the weight; the function also gets the fields
        of the row that it has parameters for. If the verdict is undecided and the row lacks a required field, the
        reason names this field."""
        fields = fields_taken(self.function, item.fields)
        called = partial(self.function, **fields) if fields else self.function
        verdict = judge(called, item, worth, self.settings.function)
        if verdict.outcome is Outcome.UNDECIDED and (why := why_lacking(self.function, item.fields)):
            return undecided(why)
        return verdict


def loaded(parts: Sequence[PartSettings]) -> tuple[LoadedPart, ...]:
    """Load the functions of all parts. Raises RewardFunctionError if one cannot be loaded."""
    return tuple([LoadedPart(part, load_reward(part.function, part.settings, part.place)) for part in parts])


def taken_by(parts: Sequence[LoadedPart]) -> tuple[str, ...] | None:
    """Names of the further fields of a row that users' functions among the parts take; None: all, as one has
    ``**fields``."""
    taken = dict[str, None]()
    for function in (part.function for part in parts if part.settings.function not in BUILT_IN):
        try:
            if any(p.kind is p.VAR_KEYWORD for p in inspect.signature(function).parameters.values()):
                return None
            taken |= dict.fromkeys(_further(function))
        except ValueError:  # written in C, without a signature
            continue
    return tuple(taken)


def facts_of(parts: Sequence[LoadedPart]) -> dict[str, str]:
    """Return facts by name for the run's record (sandbox level, say): the attribute `facts` of the built-in rewards
    that have one. Empty for users' functions."""
    found: dict[str, str] = {}
    for part in parts:
        found |= getattr(part.function, "facts", {}) if part.settings.function in BUILT_IN else {}
    return found


def judge_all(parts: Sequence[LoadedPart], item: ScoreItem, worth: Worth) -> Verdict:
    """Judge the item by all parts for its source, in order, and return one verdict.

    The reward is the sum of weight times value. The first of these parts says whether the completion is right. One
    undecided part makes the whole verdict undecided, and later parts are not called. It is undecided too if no part
    judges the source, or if the sum is beyond ±1e6.
    """
    outcome: Outcome | None = None
    reward, rewards = 0.0, dict[str, float]()
    for part in parts:
        if not part.judges(item):
            continue
        verdict, name = part.verdict(item, worth), part.settings.name
        if verdict.reward is None:
            return undecided(f"{name}: {verdict.reason}" if name else verdict.reason)
        outcome = outcome or verdict.outcome
        reward += part.settings.weight * verdict.reward
        if name:
            rewards[name] = verdict.reward
    if outcome is None:
        return undecided(f"no reward judges the completions of source {item.source!r}")
    if why := why_no_reward(reward):
        return undecided(f"the sum of the rewards is {why}")
    return Verdict(outcome=outcome, reward=reward, rewards=rewards)
