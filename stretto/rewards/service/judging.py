"""One call of a reward function becomes one verdict, whatever the function does."""

from __future__ import annotations

import math

from stretto.core.records import Outcome, Verdict
from stretto.rewards.functions import RewardFunction, Undecided
from stretto.rewards.service.wire import ScoreItem, Worth

_REASON_LIMIT = 300  # characters; a user's exception may carry a whole document


def judge(function: RewardFunction, item: ScoreItem, worth: Worth) -> Verdict:
    """Call `function` on one answer; everything that is no verdict is undecided, with the reason."""
    try:
        value: object = function(item.prompt, item.completion, item.answer)
    except Undecided as error:
        return undecided(str(error))
    # User code: not even SystemExit or KeyboardInterrupt raised in it may end the worker.
    except BaseException as error:
        return undecided(f"the reward raised {_described(error)}")
    return verdict_of(value, worth)


def verdict_of(value: object, worth: Worth) -> Verdict:
    """The verdict for what a reward function returned: a bool, or a number that is the reward itself."""
    if isinstance(value, bool):
        return worth.verdict_right if value else worth.verdict_wrong
    if not isinstance(value, int | float):
        return undecided(f"the reward returned {type(value).__name__}, not a number or a bool")
    try:
        reward = float(value)
    except OverflowError:
        return undecided("the reward returned an integer beyond any float")
    if not math.isfinite(reward):
        return undecided(f"the reward returned {reward}")
    return Verdict(outcome=Outcome.RIGHT if reward > worth.threshold else Outcome.WRONG, reward=reward)


def undecided(reason: str) -> Verdict:
    """No verdict: the answer will be failed with this reason, never scored zero."""
    return Verdict(outcome=Outcome.UNDECIDED, reward=None, reason=reason[:_REASON_LIMIT])


def _described(error: BaseException) -> str:
    try:
        text = str(error)
    # Even an exception's own __str__ is user code.
    except BaseException:
        text = "(its message cannot be shown)"
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
