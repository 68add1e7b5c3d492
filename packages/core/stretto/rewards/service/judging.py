"""Call of a reward function, and conversion of its result or failure to a verdict."""

from __future__ import annotations

import inspect
import traceback
from typing import Any

from stretto.core.records import Outcome, Verdict
from stretto.core.states import why_no_reward
from stretto.rewards.functions import RewardFunction, Undecided
from stretto.rewards.service.awaiting import is_machinery
from stretto.rewards.service.wire import ScoreItem, Worth

_REASON_LIMIT = 300  # characters; a user's exception may carry a whole document


def judge(function: RewardFunction, item: ScoreItem, worth: Worth) -> Verdict:
    """Call `function` on one completion; returns the verdict. An exception or an invalid result gives an undecided
    verdict with the reason. `worth`: rewards of right and wrong."""
    try:
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
    """Make an undecided verdict: no reward, and the reason, cut to 300 characters."""
    return Verdict(outcome=Outcome.UNDECIDED, reward=None, reason=reason[:_REASON_LIMIT])


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
