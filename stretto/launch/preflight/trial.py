"""The trial of a reward before a run: gold answers are judged as completions. Are the verdicts right, in time, and the
same twice?"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

from stretto.conversation.thoughts import closed
from stretto.core.errors import Problem, RewardFunctionError, RoleError
from stretto.core.records import Outcome, Verdict
from stretto.launch.preflight.encoding import place_of
from stretto.rewards.built_in import BUILT_IN
from stretto.rewards.config import RewardsConfig
from stretto.rewards.service.loading import PLACE
from stretto.rewards.service.pool import TIMED_OUT, RewardPool
from stretto.rewards.service.wire import ScoreItem
from stretto.worlds.data.task import Question

_TRIED = 4
_TRIED_BUILT_IN = 64  # built-in rewards are quick
_PATIENCE = 10.0  # seconds for all calls together; one call may take as long


@dataclass(frozen=True)
class _Call:
    question: Question
    verdict: Verdict
    seconds: float


def try_reward(config: RewardsConfig, questions: Sequence[Question], patience: float = _PATIENCE) -> list[str]:
    """Warnings about the verdicts on the first gold answers, of each reward alone on those that it judges.

    Only the first reward of a source has to find gold answers right: the others may be about something else. Built-in
    rewards are tried on the gold answers of files only, since those of generated tasks are right. A reward of
    the user's own may depend on chance, or not on the gold answer, so it is warned about and not refused.

    Raises:
        RewardFunctionError: the workers do not start; no call returned a verdict in time; a built-in reward finds no
            gold answer right.
    """
    told: list[str] = []
    decided: set[str] = set()
    for part in config.parts:
        judged = [question for question in questions if not part.sources or question.source in part.sources]
        decides = [question for question in judged if question.source not in decided]
        told += _tried(config.alone(part), decides or judged, patience, decides=bool(decides))
        decided |= {question.source for question in judged}
    return told


def _tried(config: RewardsConfig, questions: Sequence[Question], patience: float, *, decides: bool) -> list[str]:
    built_in = config.function in BUILT_IN
    if built_in and BUILT_IN[config.function].configured:
        return []  # its gold answers are tests
    rows = [row for row in questions if row.place][:_TRIED_BUILT_IN] if built_in else questions[:_TRIED]
    if not rows:
        return []
    try:
        first, second = asyncio.run(_twice(config, rows, patience))
    except RoleError as error:
        if isinstance(error.__cause__, OSError):  # the machine's shortage, not the user's mistake
            raise
        raise RewardFunctionError([Problem(PLACE, str(error))]) from None
    limit, calls = config.seconds_per_completion, [*first, *second]
    if all(_is_lost(call, limit) for call in calls):
        raise RewardFunctionError([_lost(config, calls[-1], len(calls))])
    wrong = [call for call in first if call.verdict.outcome is Outcome.WRONG]
    warnings = [_lost(config, call, 1) for call in first if _is_lost(call, limit)]
    if decides and (len(wrong) == len(rows) or (wrong and built_in)):
        warnings.append(_wrong(config, wrong, len(rows)))
        if built_in and len(wrong) == len(rows):
            raise RewardFunctionError(warnings)
    return [str(problem) for problem in warnings] + _differing(config, first, second)


async def _twice(config: RewardsConfig, rows: Sequence[Question], patience: float) -> tuple[list[_Call], list[_Call]]:
    """The calls of two rounds of at least one call each; after `patience` seconds no further call begins."""
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
                [verdict] = await pool.score([ScoreItem(closed(row.text), row.answer, row.answer, row.fields)])
                calls.append(_Call(row, verdict, time.monotonic() - start))
    return first, second


def _is_lost(call: _Call, limit: float) -> bool:
    return call.verdict.outcome is Outcome.UNDECIDED or call.seconds > limit


def _lost(config: RewardsConfig, call: _Call, count: int) -> Problem:
    """The problem of `count` calls without a verdict in time, of which `call` is the last."""
    which = f"the gold answer of {place_of(call.question)}, judged as a completion"
    if call.verdict.outcome is Outcome.UNDECIDED and not call.verdict.reason.startswith(TIMED_OUT):
        times = f"in any of {count} calls" if count > 1 else "in one call"
        found = f"{config.function!r} returned no verdict {times}, on {which}: {call.verdict.reason}"
        return Problem(PLACE, found, "undecided completions are never trained on")
    done = "took" if call.verdict.outcome is not Outcome.UNDECIDED else "was not done after"
    found = (
        f"{config.function!r} {done} {call.seconds:.1f} s on {which}, and may take {config.seconds_per_completion:g} s"
    )
    enough = math.ceil(3 * call.seconds)
    return Problem(PLACE, found, f"slower verdicts are undecided; rewards.timeout={enough} would allow more")


def _wrong(config: RewardsConfig, wrong: Sequence[_Call], count: int) -> Problem:
    shown = wrong[0].question
    found = (
        f"{config.function!r} finds {len(wrong)} of the first {count} gold answers wrong, judged as completions: "
        f"{shown.answer[-60:]!r} of {place_of(shown)}"
    )
    return Problem(PLACE, found, "the gold answers must have the form that the reward reads (docs/rewards.md)")


def _differing(config: RewardsConfig, first: Sequence[_Call], second: Sequence[_Call]) -> list[str]:
    return [
        f"the reward {config.function!r} judges one completion of {place_of(one.question)} in two ways: "
        f"{_shown(one.verdict)}, then {_shown(other.verdict)}"
        for one, other in zip(first, second, strict=False)
        if one.verdict != other.verdict
    ]


def _shown(verdict: Verdict) -> str:
    return verdict.reason or f"{verdict.outcome.value} ({verdict.reward:g})"
