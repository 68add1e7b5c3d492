"""``stretto score code``: a file of completions with their tests, judged line by line."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from stretto.core.errors import DataError, Problem
from stretto.rewards.files.lines import Line, read_lines
from stretto.rewards.programs import safe_walls
from stretto_verify.code.asserts import BadTests
from stretto_verify.code.formats import parse_tests
from stretto_verify.code.reward import CodeReward, Judgement
from stretto_verify.code.tests import ProgramTests
from stretto_verify.sandbox.config import SandboxConfig
from stretto_verify.sandbox.probe import Report
from stretto_verify.sandbox.sandbox import SandboxFailed
from stretto_verify.sandbox.walls import Walls

_SHOWN = 20


class CodeLine(msgspec.Struct, frozen=True):
    """Required fields of a line; others are kept."""

    completion: str
    tests: list[Any] | dict[str, Any] | str


class Scored(NamedTuple):
    """Result for one line: verdict ("right", "wrong" or "undecided"), judgement of the tests, seconds it took."""

    verdict: str
    judgement: Judgement
    seconds: float


def print_scored(path: Path, config: SandboxConfig, workers: int) -> None:
    """Judge the programs of a JSONL file in `workers` threads. Prints every line, in order, with the further fields
    `verdict`, `passed` (number of tests), `seconds` and sandbox `level`. Reasons for undecided lines, and the kind of
    sandbox, go to stderr.

    Raises:
        DataError: the file or some of its lines are malformed; nothing was judged.
        RewardFunctionError: this machine has no sandbox at the level that `config` requires.
    """
    lines = read_lines(path, CodeLine)
    tests = read_tests([(line.place, line.fields.tests) for line in lines])
    walls, report = safe_walls(config)
    print(report, file=sys.stderr)
    judges = _Judges(config, walls, report)
    with ThreadPoolExecutor(workers, "judge") as pool:
        try:
            for line, scored in zip(
                lines, pool.map(judges.score, [x.fields.completion for x in lines], tests), strict=True
            ):
                _print(line, scored, report)
        finally:
            judges.close()


def read_tests(given: Sequence[tuple[str, object]]) -> list[ProgramTests]:
    """Parse the tests of every row. `given`: pairs of the row's place, for messages ("FILE:LINE"), and its tests.

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


def _print(line: Line[CodeLine], scored: Scored, report: Report) -> None:
    judgement = scored.judgement
    if scored.verdict == "undecided":
        print(f"{line.place}: undecided: {judgement.problem}", file=sys.stderr)
    row = line.row | {
        "verdict": scored.verdict,
        "passed": judgement.passed,
        "seconds": round(scored.seconds, 4),
        "level": report.level.value,
    }
    print(msgspec.json.encode(row).decode(), flush=True)


class _Judges:
    """Judges of programs, one with its own sandbox for each thread."""

    def __init__(self, config: SandboxConfig, walls: Walls, report: Report) -> None:
        self._config, self._walls, self._report = config, walls, report
        self._own = threading.local()
        self._all: list[CodeReward] = []

    def score(self, completion: str, tests: ProgramTests) -> Scored:
        start = time.monotonic()
        try:
            judgement = self._judge().judge(completion, tests)
            verdict = "undecided" if judgement.unknown else "right" if judgement.right else "wrong"
        except SandboxFailed as failure:
            judgement, verdict = Judgement(0, tests.count, str(failure)), "undecided"
        return Scored(verdict, judgement, time.monotonic() - start)

    def close(self) -> None:
        for judge in self._all:
            judge.close()

    def _judge(self) -> CodeReward:
        if not hasattr(self._own, "judge"):
            self._own.judge = CodeReward(self._config, self._walls, self._report)
            self._all.append(self._own.judge)
        judge: CodeReward = self._own.judge
        return judge
