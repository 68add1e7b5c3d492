"""A reward is tried before a run, on gold answers given as completions: does it judge them, in time, as right, and the
same one twice in the same way?"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

from stretto.core.errors import Problem, RewardFunctionError, RoleError
from stretto.core.records import Outcome, Verdict
from stretto.rewards.built_in import BUILT_IN
from stretto.rewards.config import RewardsConfig
from stretto.rewards.service.loading import PLACE
from stretto.rewards.service.pool import TIMED_OUT, RewardPool
from stretto.rewards.service.wire import ScoreItem
from stretto.worlds.data.task import Question

_TRIED = 4
_TRIED_BUILT_IN = 64  # which are quick
_PATIENCE = 10.0  # seconds of all calls together, or one of them


@dataclass(frozen=True)
class _Call:
    question: Question
    verdict: Verdict
    seconds: float


def try_reward(config: RewardsConfig, questions: Sequence[Question], patience: float = _PATIENCE) -> list[str]:
    """Sentences about what the reward said of the first gold answers that is worth a warning.

    Of rewards that come with stretto only the gold answers of a file are tried, since those of a generated task are
    right. A reward of the user's own may judge by chance, or something else than the gold answer: it is told, not
    refused.

    Raises:
        RewardFunctionError: the workers do not start; no call came to a verdict in time; a reward that comes with
            stretto finds no gold answer right.
    """
    built_in = config.function in BUILT_IN
    if built_in and BUILT_IN[config.function].configured:
        return []  # its gold answers are tests
    rows = [row for row in questions if row.place][:_TRIED_BUILT_IN] if built_in else questions[:_TRIED]
    if not rows:
        return []
    try:
        first, second = asyncio.run(_twice(config, rows, patience))
    except RoleError as error:
        raise RewardFunctionError([Problem(PLACE, str(error))]) from None
    limit, calls = config.seconds_per_completion, [*first, *second]
    if all(_is_lost(call, limit) for call in calls):
        raise RewardFunctionError([_lost(config, calls[-1], len(calls))])
    wrong = [call for call in first if call.verdict.outcome is Outcome.WRONG]
    told = [_lost(config, call, 1) for call in first if _is_lost(call, limit)]
    if len(wrong) == len(rows) or (wrong and built_in):
        told.append(_nothing_right(config, wrong, len(rows)))
        if built_in and len(wrong) == len(rows):
            raise RewardFunctionError(told)
    return [str(problem) for problem in told] + _differing(config, first, second)


async def _twice(config: RewardsConfig, rows: Sequence[Question], patience: float) -> tuple[list[_Call], list[_Call]]:
    """The calls of two rounds; each has one call at least, and no other begins when the patience is spent."""
    patient = {
        "workers": 1,
        "max_consecutive_undecided": 1 << 20,
        "timeout": max(config.seconds_per_completion, patience),
    }
    began = time.monotonic()
    first: list[_Call] = []
    second: list[_Call] = []
    async with RewardPool(config.model_copy(update=patient)) as pool:
        for calls in (first, second):
            for row in rows:
                if calls and time.monotonic() - began > patience:
                    break
                start = time.monotonic()
                [verdict] = await pool.score([ScoreItem(row.text, row.answer, row.answer, row.fields)])
                calls.append(_Call(row, verdict, time.monotonic() - start))
    return first, second


def _is_lost(call: _Call, limit: float) -> bool:
    return call.verdict.outcome is Outcome.UNDECIDED or call.seconds > limit


def _lost(config: RewardsConfig, call: _Call, count: int) -> Problem:
    """`count` calls came to no verdict in time; the last of them is told."""
    which = f"the gold answer of {_place(call.question)}, given as the completion"
    if call.verdict.outcome is Outcome.UNDECIDED and not call.verdict.reason.startswith(TIMED_OUT):
        times = f"in any of {count} calls" if count > 1 else "in one call"
        found = f"{config.function!r} came to no verdict {times}, on {which}: {call.verdict.reason}"
        return Problem(PLACE, found, "such completions are never trained on")
    done = "took" if call.verdict.outcome is not Outcome.UNDECIDED else "was not done after"
    found = (
        f"{config.function!r} {done} {call.seconds:.1f} s on {which}, and may take {config.seconds_per_completion:g} s"
    )
    enough = math.ceil(3 * call.seconds)
    return Problem(PLACE, found, f"slower verdicts are undecided; rewards.timeout={enough} would allow more")


def _nothing_right(config: RewardsConfig, wrong: Sequence[_Call], count: int) -> Problem:
    shown = wrong[0].question
    found = (
        f"{config.function!r} finds {len(wrong)} of the first {count} gold answers wrong, given as the completion: "
        f"{shown.answer[-60:]!r} of {_place(shown)}"
    )
    return Problem(PLACE, found, "a reward and the gold answers must be of one form (docs/rewards.md)")


def _differing(config: RewardsConfig, first: Sequence[_Call], second: Sequence[_Call]) -> list[str]:
    return [
        f"the reward {config.function!r} judges the same answer to {_place(one.question)} in two ways: "
        f"{_told(one.verdict)}, then {_told(other.verdict)}"
        for one, other in zip(first, second, strict=False)
        if one.verdict != other.verdict
    ]


def _told(verdict: Verdict) -> str:
    return verdict.reason or f"{verdict.outcome.value} ({verdict.reward:g})"


def _place(question: Question) -> str:
    return question.place or f"question {question.id}"
