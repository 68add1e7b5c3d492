"""``stretto score``: completions of a JSONL file, judged line by line with the workers or the sandbox of a run. All
lines are checked before the first completion is judged.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import threading
import time
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

import msgspec

from stretto.core.errors import UNREADABLE, DataError, Problem, RewardFunctionError, several
from stretto.core.records import Outcome, Verdict
from stretto.rewards.config import RewardsConfig
from stretto.rewards.service.pool import RewardPool
from stretto.rewards.service.wire import ScoreItem
from stretto_verify.code.formats import parse_tests
from stretto_verify.code.reward import CodeReward, Judgement
from stretto_verify.code.tests import BadTests, ProgramTests
from stretto_verify.math.extract.reason import why_wrong
from stretto_verify.sandbox.config import SandboxConfig
from stretto_verify.sandbox.probe import Report, probe
from stretto_verify.sandbox.sandbox import SandboxFailed
from stretto_verify.sandbox.walls import Walls
from stretto_verify.verdicts import SandboxRefused
from stretto_workflows.data import jsonl
from stretto_workflows.data.jsonl import mistake, once

Fields = TypeVar("Fields", bound=msgspec.Struct)


@dataclass(frozen=True)
class _Line(Generic[Fields]):
    """One line of a JSONL file: its place for errors ("FILE:LINE"), its whole object, and the required fields."""

    place: str
    row: dict[str, Any]
    fields: Fields


def read_lines(path: Path, fields: type[Fields]) -> list[_Line[Fields]]:
    """Read all lines of a JSONL file that are not blank.

    Raises:
        DataError: the file is missing, empty or not text, or lines are not objects with the `fields`; names the first
            twenty.
    """
    return jsonl.read_lines(path, lambda text, _, place: _line(text, place, fields))


def _line(text: str, place: str, fields: type[Fields]) -> _Line[Fields]:
    try:
        row = msgspec.json.decode(text, type=dict[str, Any])
        json.loads(text, object_pairs_hook=once)
        return _Line(place, row, msgspec.convert(row, fields))
    except msgspec.ValidationError as error:
        needed = getattr(fields, "NEEDED", ", ".join(fields.__struct_fields__))
        raise mistake(place, str(error), f"needed: {needed}") from None
    except (ValueError, *UNREADABLE) as error:
        raise mistake(place, f"broken JSON ({error})", "one object a line is needed") from None


async def scored(config: RewardsConfig, items: Sequence[ScoreItem]) -> AsyncIterator[tuple[Verdict, float]]:
    """Judge items with a pool of workers of its own; yields the verdict and the seconds of each item, in order, as soon
    as it and all before it are judged. Undecided verdicts, however many, do not stop the rest.

    Raises:
        RewardFunctionError: the reward cannot be used; the message says why.
        RoleDied: a worker cannot be restarted.
        DeadlineExceeded: an item's verdict took longer than ``rewards.patience`` seconds.
    """
    config = config.model_copy(update={"max_consecutive_undecided": len(items) + 1})
    async with RewardPool(config) as pool:
        free = asyncio.Semaphore(pool.workers)  # so that an item's seconds include no wait in the queue

        async def judged(item: ScoreItem) -> tuple[Verdict, float]:
            async with free:
                start = time.monotonic()
                [verdict] = await pool.score([item])
                return verdict, time.monotonic() - start

        tasks = [asyncio.create_task(judged(item)) for item in items]
        try:
            for task in tasks:
                yield await task
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


class MathLine(msgspec.Struct, frozen=True):
    """Required fields of a line for `print_scored_answers`; others are kept. `answer` is another name of
    `completion`."""

    NEEDED: ClassVar[str] = "gold, completion"

    gold: str | int | float
    completion: str | msgspec.UnsetType = msgspec.UNSET
    answer: str | msgspec.UnsetType = msgspec.UNSET

    def __post_init__(self) -> None:
        if self.completion is msgspec.UNSET and self.answer is msgspec.UNSET:
            raise ValueError("Object missing required field `completion`")
        if msgspec.UNSET not in (self.completion, self.answer):
            raise ValueError("`completion`, and also `answer`, which is its other name; the gold answer is `gold`")

    @property
    def text(self) -> str:
        """The completion to judge: the field `completion`, or else `answer`."""
        return self.answer if self.completion is msgspec.UNSET else self.completion  # type: ignore[return-value]


def print_scored_answers(path: Path, config: RewardsConfig) -> None:
    """Judge the lines of a JSONL file with the reward workers of `config`. A line has the fields `gold` and
    `completion` (or `answer`). Prints every line, in order, with the further fields `verdict` ("right", "wrong" or
    "undecided"), `seconds` and `reason` ("" if right). Reasons for undecided lines go to stderr, too.

    Raises:
        DataError: the file or some of its lines are malformed; nothing was judged.
        RewardFunctionError: the reward cannot be used.
        RoleDied: a worker cannot be restarted.
        DeadlineExceeded: a verdict took longer than ``rewards.patience`` seconds.
    """
    asyncio.run(_print_answers(read_lines(path, MathLine), config))


async def _print_answers(lines: list[_Line[MathLine]], config: RewardsConfig) -> None:
    items = [ScoreItem(prompt="", completion=line.fields.text, answer=str(line.fields.gold)) for line in lines]
    at, undecided = iter(lines), 0
    async for verdict, seconds in scored(config, items):
        line = next(at)
        if verdict.outcome is Outcome.UNDECIDED:
            undecided += 1
            print(f"{line.place}: undecided: {verdict.reason}", file=sys.stderr)
        reason = verdict.reason
        if verdict.outcome is Outcome.WRONG:  # a run keeps no reason for it, so that its workers need not find one
            reason = why_wrong(line.fields.text, str(line.fields.gold))
        row = line.row | {"verdict": verdict.outcome.value, "seconds": round(seconds, 4), "reason": reason}
        print(msgspec.json.encode(row).decode(), flush=True)
    if undecided:
        print(f"{undecided:,} of {several(len(lines), 'line')} undecided", file=sys.stderr)


_SHOWN = 20


class _CodeLine(msgspec.Struct, frozen=True):
    """Required fields of a line for `print_scored_programs`; others are kept."""

    completion: str
    tests: list[Any] | dict[str, Any] | str


class _Scored(NamedTuple):
    """Result for one line: verdict ("right", "wrong" or "undecided"), judgement of the tests, seconds it took."""

    verdict: str
    judgement: Judgement
    seconds: float


def print_scored_programs(path: Path, config: SandboxConfig, workers: int) -> None:
    """Judge the programs of a JSONL file in `workers` threads. A line has the fields `completion` and `tests`. Prints
    every line, in order, with the further fields `verdict` ("right", "wrong" or "undecided"), `passed` (number of
    tests), `seconds` and sandbox `level`. Reasons for undecided lines, and the kind of sandbox, go to stderr.

    Raises:
        DataError: the file, or the fields or tests of some lines, are malformed; nothing was judged.
        RewardFunctionError: this machine has no sandbox at the level that `config` requires.
    """
    lines = read_lines(path, _CodeLine)
    tests = read_tests([(line.place, line.fields.tests) for line in lines])
    try:
        walls, report = probe(config)
    except SandboxRefused as refusal:
        raise RewardFunctionError([Problem("rewards.code", refusal.found, refusal.remedy)]) from refusal
    print(report, file=sys.stderr)
    judges = _Judges(config, walls, report)
    with ThreadPoolExecutor(workers, "judge") as pool, contextlib.closing(judges):
        found = pool.map(judges.score, [line.fields.completion for line in lines], tests)
        for line, scored in zip(lines, found, strict=True):
            if scored.verdict == "undecided":
                print(f"{line.place}: undecided: {scored.judgement.problem}", file=sys.stderr)
            told = {"verdict": scored.verdict, "passed": scored.judgement.passed}
            row = line.row | told | {"seconds": round(scored.seconds, 4), "level": report.level.value}
            print(msgspec.json.encode(row).decode(), flush=True)


def read_tests(given: Sequence[tuple[str, object]]) -> list[ProgramTests]:
    """Parse the tests of every row. `given`: pairs of the row's place, for errors ("FILE:LINE"), and its tests in any
    form of `stretto_verify.code.formats`.

    Raises:
        DataError: some cannot be read; the first twenty are named.
    """
    tests: list[ProgramTests] = []
    problems: list[Problem] = []
    for place, text in given:
        try:
            tests.append(parse_tests(text))
        except BadTests as error:
            problems.append(Problem(place, str(error)))
    if problems:
        more = [Problem("in all", f"the tests of {len(problems)} of {len(given)} rows cannot be read")]
        raise DataError([*problems[:_SHOWN], *more])
    return tests


class _Judges:
    """Judges of programs, one with its own sandbox for each thread that calls `score`."""

    def __init__(self, config: SandboxConfig, walls: Walls, report: Report) -> None:
        self._config, self._walls, self._report = config, walls, report
        self._judges: dict[int, CodeReward] = {}  # by thread

    def score(self, completion: str, tests: ProgramTests) -> _Scored:
        start, thread = time.monotonic(), threading.get_ident()
        if thread not in self._judges:
            self._judges[thread] = CodeReward(self._config, self._walls, self._report)
        try:
            judgement = self._judges[thread].judge(completion, tests)
            verdict = "undecided" if judgement.unknown else "right" if judgement.right else "wrong"
        except SandboxFailed as failure:
            judgement, verdict = Judgement(0, tests.count, str(failure)), "undecided"
        return _Scored(verdict, judgement, time.monotonic() - start)

    def close(self) -> None:
        for judge in self._judges.values():
            judge.close()
