"""`judge_math` and `judge_program`: one completion in, one verdict out."""

from __future__ import annotations

import threading
import weakref
from functools import cached_property, lru_cache
from typing import Self

from stretto_verify.code.formats import parse_tests
from stretto_verify.code.reward import CodeReward
from stretto_verify.code.tests import BadTests
from stretto_verify.math.extract.reason import why_wrong
from stretto_verify.math.limits import SECONDS
from stretto_verify.math.reward import math
from stretto_verify.sandbox.config import SandboxConfig
from stretto_verify.sandbox.probe import Report, probe
from stretto_verify.sandbox.sandbox import SandboxFailed
from stretto_verify.sandbox.walls import Walls
from stretto_verify.verdicts import Judged, Undecided
from stretto_verify.worker import Worker

DEFAULTS = SandboxConfig()  #: default limits of a program


def judge_math(completion: str, gold: str, prompt: str = "") -> Judged:
    r"""Judge whether the final answer of `completion` equals the answer `gold`.

    A comparison takes at most half a second of CPU time. In the main thread a signal ends it, and the completion is
    wrong; in another thread, where signals do not work, a process of its own judges. The verdict is "undecided" if the
    gold answer cannot be read, or this process is late.

    Args:
        completion: the whole text; thoughts (``<think>…</think>``) are left out.
        gold: a number, an expression, an interval, a set, a choice, a text that ends in ``\boxed{…}`` or ``#### …``.
        prompt: the question; if given, text that only repeats it is not taken for an answer.

    >>> judge_math(r"2x = 1, so $x = \frac12$.", "0.5").verdict
    'right'
    >>> judge_math(r"\boxed{43}", "42")
    Judged(verdict='wrong', reason="the final answer is '43', the gold answer '42'")

    Raises:
        TypeError: an argument is not a text.
    """
    for name, given in (("completion", completion), ("gold", gold), ("prompt", prompt)):
        if not isinstance(given, str):
            raise TypeError(f"{name}: {given!r:.40} is of the type {type(given).__name__}; give a text")
    if threading.current_thread() is threading.main_thread():
        return judged_here(completion, gold, prompt)
    return _OWN.worker.judge(completion, gold, prompt, SECONDS)


def judged_here(completion: str, gold: str, prompt: str = "") -> Judged:
    """Judge the final answer of a completion against `gold`: right, wrong with a reason, or undecided. Same as
    `judge_math`, but in this process and thread: without a time limit outside the main thread."""
    try:
        if math(prompt, completion, gold):
            return Judged("right")
    except Undecided as reason:
        return Judged("undecided", str(reason))
    return Judged("wrong", why_wrong(completion, gold, prompt))


def judge_program(completion: str, tests: object, config: SandboxConfig = DEFAULTS) -> Judged:
    """Run the program of `completion` against `tests` in a sandbox.

    The first call in a process attacks its own sandbox to find a level of isolation that holds on this machine, which
    takes seconds. Later calls take milliseconds. The sandbox lives until its thread ends; `ProgramJudge` can be closed.

    Args:
        completion: a program, or a text with one in a Markdown block.
        tests: ``[{"stdin": …, "stdout": …}]``, ``[{"call": …, "args": […], "expected": …}]``, or a row of
            LiveCodeBench, APPS, TACO, DeepCoder, HumanEval or MBPP.
        config: limits of time, memory and files for a program.

    Returns:
        "wrong" also without a program in the completion; "undecided" if the tests cannot be read, the sandbox fails or
        the time for all tests together runs out before one has failed.

    Raises:
        SandboxRefused: no sandbox that is safe enough can be made here.
    """
    return _OWN.judge(config).judge(completion, tests)


class ProgramJudge:
    """Judges programs one after the other, in a persistent sandbox (context manager).

    Example::

        with ProgramJudge(SandboxConfig(seconds=2.0)) as judge:
            verdicts = [judge.judge(completion, tests) for completion, tests in rows]

    Use it only in the thread that created it: the sandbox ends with this thread.
    """

    def __init__(self, config: SandboxConfig = DEFAULTS) -> None:
        """Find a level of isolation that holds here (seconds, once per process and config) and make the sandbox, which
        starts with the first program.

        Raises:
            SandboxRefused: no sandbox that is safe enough can be made here.
        """
        self._reward = CodeReward(config, *_probed(config))
        self._ended = weakref.finalize(self, self._reward.close)

    @property
    def report(self) -> Report:
        """Level of the sandbox, and how it was found."""
        return self._reward.report

    def judge(self, completion: str, tests: object) -> Judged:
        """Run the completion's program on `tests` in this sandbox, up to the first failure: right, wrong with the
        failure, or undecided (invalid tests, a failure of the sandbox, or the time for all tests ran out)."""
        try:
            found = self._reward.judge(completion, parse_tests(tests), to_the_end=False)
        except (BadTests, SandboxFailed) as reason:
            return Judged("undecided", str(reason))
        if found.unknown:
            return Judged("undecided", found.problem)
        return Judged("right") if found.right else Judged("wrong", found.problem)

    def close(self) -> None:
        """End the sandbox."""
        self._ended()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


@lru_cache(maxsize=8)
def _probed(config: SandboxConfig) -> tuple[Walls, Report]:
    return probe(config)


class _OfThisThread(threading.local):
    """Judging processes of one thread: the worker for mathematics, and a sandbox for each config. They end with the
    thread."""

    def __init__(self) -> None:
        self._judges: dict[SandboxConfig, ProgramJudge] = {}

    @cached_property
    def worker(self) -> Worker:
        return Worker()

    def judge(self, config: SandboxConfig) -> ProgramJudge:
        if config not in self._judges:
            self._judges[config] = ProgramJudge(config)
        return self._judges[config]


_OWN = _OfThisThread()
