"""Call of a reward function, or of several whose weighted sum is one verdict, and conversion of a result or failure to
a verdict.
"""

from __future__ import annotations

import inspect
import os
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

from stretto.core.records import Outcome, Verdict
from stretto.core.states import why_no_reward
from stretto.rewards.built_in import BUILT_IN
from stretto.rewards.functions import RewardFunction, Undecided
from stretto.rewards.service.loading import fields_taken, is_machinery, load_reward, why_lacking
from stretto.rewards.service.wire import PartSettings, ScoreItem, Worth

_REASON_LIMIT = 300  # characters; a user's exception may carry a whole document


def judge(function: RewardFunction, item: ScoreItem, worth: Worth) -> Verdict:
    """Call `function` on one completion; returns the verdict. An exception or an invalid result gives an undecided
    verdict with the reason. `worth`: rewards of right and wrong."""
    try:
        with forks_end():
            value = _plain(function(item.prompt, item.completion, item.answer))
    except Undecided as error:
        return undecided(str(error))
    # User code: not even SystemExit or KeyboardInterrupt raised in it may end the worker.
    except BaseException as error:
        return undecided(f"the reward raised {_described(error)}")
    verdict = verdict_of(value, worth)
    if (
        verdict.outcome is Outcome.UNDECIDED
        and (code := getattr(inspect.unwrap(function), "__code__", None)) is not None
    ):
        return undecided(f"{verdict.reason} ({code.co_filename}:{code.co_firstlineno})")
    return verdict


def verdict_of(value: object, worth: Worth) -> Verdict:
    """Verdict for the value that a reward returned: a bool, or a number that is the reward itself. Any other value, and
    a number that is not finite or beyond ±1e6, is undecided."""
    if isinstance(value, bool):
        return worth.verdict_right if value else worth.verdict_wrong
    if not isinstance(value, int | float):
        return undecided(f"the reward returned {type(value).__name__}, not a number or a bool")
    if why := why_no_reward(value):
        return undecided(f"the reward returned {why}")
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
    """The text with its lone surrogates escaped, which no wire and no file can carry."""
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
        """Whether the part applies to the source of the item."""
        return not self.settings.sources or item.source in self.settings.sources

    def verdict(self, item: ScoreItem, worth: Worth) -> Verdict:
        """Verdict of this part alone; the function also gets the fields of the row that it has parameters for. If it is
        undecided and the row lacks a required field, the reason names that."""
        fields = fields_taken(self.function, item.fields)
        verdict = judge(partial(self.function, **fields) if fields else self.function, item, worth)
        if verdict.outcome is Outcome.UNDECIDED and (why := why_lacking(self.function, item.fields)):
            return undecided(why)
        return verdict


def loaded(parts: Sequence[PartSettings]) -> tuple[LoadedPart, ...]:
    """Load the functions of all parts.

    Raises:
        RewardFunctionError: one cannot be loaded, or is not callable as a reward.
    """
    return tuple([LoadedPart(part, load_reward(part.function, part.settings, part.place)) for part in parts])


def facts_of(parts: Sequence[LoadedPart]) -> dict[str, str]:
    """Facts by name for the run's record (sandbox level, say), from the `facts` of built-in rewards that have them."""
    found: dict[str, str] = {}
    for part in parts:
        found |= getattr(part.function, "facts", {}) if part.settings.function in BUILT_IN else {}
    return found


def judge_all(parts: Sequence[LoadedPart], item: ScoreItem, worth: Worth) -> Verdict:
    """Verdict of all parts that apply to the item's source; they are called in order.

    The reward is the sum of weight times value. The first part says whether the completion is right. One undecided part
    makes the whole verdict undecided, and later parts are not called. It is undecided too if no part applies, or if the
    sum is beyond ±1e6.
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
