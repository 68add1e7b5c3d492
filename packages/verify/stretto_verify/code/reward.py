"""Judge a program: run it in a sandbox, compare its outputs outside of it.

    completion ──► program ──► sandbox: one process per input ──► outputs ──► compared here with what was expected

Right: every test passed. Wrong: the program failed a test. Undecided: the sandbox or the tests are at fault, or all
tests together exceeded their time limit.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec

from stretto_verify.clock import clock_limit
from stretto_verify.code.comparison import near, same_text, same_value
from stretto_verify.code.formats import parse_tests
from stretto_verify.code.program import extract_program, helpers
from stretto_verify.code.tests import CallTest, ProgramTests, StdinTest
from stretto_verify.sandbox.config import SandboxConfig
from stretto_verify.sandbox.probe import Report, probe
from stretto_verify.sandbox.sandbox import ProgramEnd, Sandbox, SandboxFailed
from stretto_verify.sandbox.walls import Walls
from stretto_verify.thoughts import said
from stretto_verify.verdicts import Undecided

_TRIES = 2  # a sandbox that fails is started again once
_OUT_OF_TIME = "time limit of all tests"


class _Program(NamedTuple):
    """Source text of a program. `before` and `after`: further source that is run before and after it in the same
    module."""

    source: str
    before: str = ""
    after: str = ""


class Judgement(NamedTuple):
    """Number of passed tests, number of all tests, and the first failure (`problem`, "" if there is none). `unknown`:
    the time limit of all tests together was reached before any test failed, so there is no verdict."""

    passed: int
    total: int
    problem: str = ""
    unknown: bool = False

    @property
    def right(self) -> bool:
        return self.passed == self.total and not self.problem


class CodeReward:
    """Judges programs, one at a time, in one persistent sandbox.

    As a reward function it takes the tests as gold answer: JSON in any form of `code.formats`.
    """

    def __init__(
        self,
        config: SandboxConfig,
        walls: Walls,
        report: Report,
        sandbox: Callable[[Walls, SandboxConfig], Sandbox] = Sandbox,
    ) -> None:
        """Make the sandbox with `sandbox`, its class. `walls` isolate it. `report`: how they were found, for `facts`;
        it changes no verdict."""
        self.report = report
        self._config = config
        self._sandbox = sandbox(walls, config)

    def __call__(self, prompt: str, completion: str, answer: str) -> bool:
        """Whether the program in `completion` passes the tests in `answer`; False without a program. Tests that call a
        function all run, in one process; those on standard input run up to the first failure.

        Raises:
            Undecided: the tests cannot be read, the sandbox could not run them, or the time for all of them ran out
                before one failed.
        """
        try:
            found = self.judge(said(completion, prompt), parse_tests(answer), to_the_end=False)
            if found.unknown:
                raise Undecided(found.problem)
            return found.right
        except SandboxFailed as failure:
            raise Undecided(str(failure)) from failure

    @property
    def facts(self) -> dict[str, str]:
        """Facts for the run's record: the level of the sandbox, and how it was found."""
        return {"sandbox": str(self.report)}

    def judge(self, completion: str, tests: ProgramTests, *, to_the_end: bool = True) -> Judgement:
        """Run the program of a completion on all tests: first the calls, all in one process, then each input. Without
        `to_the_end` no input after the first failure is run. A completion without a program fails all. The judgement is
        unknown if the first failure is that the time for all tests ran out.

        Raises:
            SandboxFailed: the sandbox could not run it.
        """
        program = program_of(completion, tests)
        if program is None:
            return Judgement(0, tests.count, "no program in the completion")
        clock = _Clock(self._config)
        passed, problem = self._judge_calls(program, tests.calls, clock, alike=tests.alike) if tests.calls else (0, "")
        unknown = problem == _OUT_OF_TIME  # compared before a program's own words are put beside it
        for number, test in enumerate(tests.stdin, start=1):
            if problem and not to_the_end:
                break
            found = self._judge_input(program, test, clock, alike=tests.alike)
            if found and not problem:
                problem, unknown = f"test {number}: {found}", found == _OUT_OF_TIME
            passed += not found
        return Judgement(passed, tests.count, problem, unknown)

    def close(self) -> None:
        self._sandbox.close()

    def _judge_input(self, program: _Program, test: StdinTest, clock: _Clock, *, alike: bool) -> str:
        """Run the program on one input and charge its time to `clock`. Return the reason of its failure (`_OUT_OF_TIME`
        if earlier tests have used up its time), "" if it passes. `alike`: as for `same_text`."""
        if clock.left <= 0:
            return _OUT_OF_TIME
        seconds, patience = clock.allow(1)
        ended = self._run(program._asdict(), test.stdin.encode(errors="surrogateescape"), seconds, patience)
        clock.charge(ended)
        if ended.timed_out and (seconds < self._config.seconds or patience < clock_limit(seconds)):
            return _OUT_OF_TIME  # earlier tests used up part of this test's time
        if not ended.well:
            return ended.how
        return "" if same_text(test.stdout, ended.output.decode(errors="replace"), alike=alike) else "wrong output"

    def _judge_calls(
        self, program: _Program, tests: tuple[CallTest, ...], clock: _Clock, *, alike: bool
    ) -> tuple[int, str]:
        """Run all calls in one process, which gets the arguments but not the expected results, and charge its time to
        `clock`. Return the number of passed calls and the first failure, "" if there is none; 0 if the program wrote
        among the results. `alike`: as for `same_value`."""
        calls = [{"name": test.call, "args": list(test.args)} for test in tests]
        ended = self._run({**program._asdict(), "calls": calls}, b"", *clock.allow(len(tests)))
        clock.charge(ended)
        lines = ended.output.count(b"\n")
        if lines > len(tests) or (ended.well and ended.output[-1:] not in (b"", b"\n")):
            return 0, "it wrote among the results of its calls"
        results = [_result(line) for line in ended.output.split(b"\n")[:lines]]
        right = [
            "value" in result and _is_accepted(test, result["value"], alike=alike)
            for test, result in zip(tests, results, strict=False)
        ]
        if ended.timed_out and all(right) and not self._is_slow_alone(ended):
            return sum(right), _OUT_OF_TIME  # no single call took too long, but all together did
        if not ended.well or lines < len(tests):  # a call may end the program, with status 0
            return sum(right), ended.how
        problems = (
            f"call {number}: {result.get('error', 'wrong result')}"
            for number, (result, passed) in enumerate(zip(results, right, strict=False), start=1)
            if not passed
        )
        return sum(right), next(problems, "")

    def _is_slow_alone(self, ended: ProgramEnd) -> bool:
        """Whether the call that a timed-out run did not finish exceeded a limit of one call by itself: `seconds` of
        CPU time, estimated from its share of the run's wall-clock time, or `clock_limit(seconds)` of wall-clock time.
        """
        computed = ended.silent * ended.cpu_seconds / ended.seconds
        return computed >= self._config.seconds or ended.silent >= clock_limit(self._config.seconds)

    def _run(self, task: dict[str, Any], given: bytes, seconds: float, patience: float) -> ProgramEnd:
        """Run the program `task` on the input `given`, with limits as in `Sandbox.run`, and return how it ended. If the
        sandbox fails twice with it and then runs an empty one, the program is blamed: it ends as if killed.

        Raises:
            SandboxFailed: the sandbox fails without the program's fault.
        """
        for _ in range(_TRIES):
            with suppress(SandboxFailed):
                return self._sandbox.run(task, given, seconds, patience)
        ended = self._sandbox.run({"source": ""}, b"", seconds)
        return msgspec.structs.replace(ended, status=-signal.SIGKILL, errors=b"")


def code_reward(settings: str) -> CodeReward:
    """Make the reward ``code`` of a run; `settings` is a `SandboxConfig` as JSON. Probes the sandboxes of this machine.

    Raises:
        SandboxRefused: this machine has no sandbox at the level that the settings require.
    """
    config = SandboxConfig.model_validate_json(settings)
    return CodeReward(config, *probe(config))


def program_of(completion: str, tests: ProgramTests) -> _Program | None:
    """Program of a completion, ready to run; None if the completion has none. `before` it come the tests' `prelude` and
    the helpers of their `preamble` (unless the program begins with the preamble); `after` it comes their `setup`."""
    called = frozenset(test.call for test in tests.calls)
    source = extract_program(completion, tests.preamble, tests.entry_point, called)
    if source is None:
        return None
    given = "" if source.startswith(tests.preamble) else helpers(tests.preamble, tests.entry_point)
    return _Program(source, before="\n".join(filter(None, (tests.prelude, given))), after=tests.setup)


@dataclass
class _Clock:
    """Time that the tests of one completion have used so far, in CPU seconds (`computed`) and wall-clock seconds
    (`waited`). Failures of the sandbox are not charged."""

    config: SandboxConfig
    computed: float = 0.0
    waited: float = 0.0

    @property
    def left(self) -> float:
        """Remaining CPU seconds; 0 also when no wall-clock time is left."""
        return self.config.completion_seconds - self.computed if self._patience > 0 else 0.0

    @property
    def _patience(self) -> float:
        return clock_limit(self.config.completion_seconds) - self.waited

    def allow(self, tests: int) -> tuple[float, float]:
        """Limits of the next run, which executes this number of tests: CPU and wall-clock seconds. They are at most
        what is left; nothing is charged before `charge`."""
        seconds = min(tests * self.config.seconds, self.left)
        return seconds, min(clock_limit(seconds), self._patience)

    def charge(self, ended: ProgramEnd) -> None:
        """Add the CPU time and the wall-clock time of a run that has ended."""
        self.computed += ended.cpu_seconds
        self.waited += ended.seconds


def _is_accepted(test: CallTest, value: Any, *, alike: bool) -> bool:
    if test.within is None:
        return any(same_value(wanted, value, alike=alike) for wanted in test.accepted)
    return any(near(wanted, value, test.within) for wanted in test.accepted)


def _result(line: bytes) -> dict[str, Any]:
    """Report of the sandbox about one call: ``{"value": ...}`` or ``{"error": ...}``; empty if malformed. It is
    untrusted, because the program may have written it."""
    try:
        result = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return result if isinstance(result, dict) and len(result) == 1 else {}
