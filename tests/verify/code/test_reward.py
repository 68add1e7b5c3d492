"""The verdict on a program.

Promises: right when every test passes, wrong when one does not, undecided when the tests or the sandbox are at fault;
no forgery passes, however it tries to look right: it is told the inputs and nothing of what is expected.
"""

import contextlib
import json
import os
import re
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from stretto.core.records import Outcome
from stretto.rewards.config import RewardsConfig
from stretto.rewards.service.pool import RewardPool
from stretto.rewards.service.wire import ScoreItem
from stretto_verify.code.formats import parse_tests
from stretto_verify.code.reward import CodeReward, Judgement, program_of
from stretto_verify.sandbox.config import SandboxConfig
from stretto_verify.sandbox.probe import Report, probe
from stretto_verify.sandbox.sandbox import ProgramEnd, Sandbox, SandboxFailed
from stretto_verify.sandbox.walls import Level, Walls
from tests.verify.sandbox.other_users import ORDINARY, as_user, delegated_groups
from tests.verify.tables import sections

ANY = "any problem"
CONFIG = SandboxConfig(seconds=0.2, completion_seconds=0.8)
BY_INPUT = parse_tests([{"stdin": f"{n}\n", "stdout": f"{n * n}\n"} for n in (7, 8, 12)])
BY_CALL = parse_tests([{"call": "f", "args": [n], "expected": [n * n, str(n)]} for n in (7, 8, 12)])


SPIN = "import time\ndef spin(s):\n    s += time.process_time()\n    while time.process_time() < s: pass\n"
NOTHING = {"stdin": "", "stdout": ""}


@pytest.fixture(scope="module")
def judge() -> Iterator[CodeReward]:
    with contextlib.closing(CodeReward(CONFIG, *probe(CONFIG, []))) as judge:
        yield judge


def judged(config: SandboxConfig, answer: str, tests: list[dict[str, Any]]) -> Judgement:
    with contextlib.closing(CodeReward(config, *probe(config, []))) as judge:
        return judge.judge(answer, parse_tests(tests))


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("print(int(input()) ** 2)", Judgement(3, 3)),
        ("Here:\n```python\nn = int(input())\nprint(n * n)\n```", Judgement(3, 3)),
        ("print(49)", Judgement(1, 3, "test 2: wrong output")),
        (
            "n = int(input())\nif n > 9: raise ValueError(n)\nprint(n * n)",
            Judgement(2, 3, "test 3: exit status 1: ValueError: 12"),
        ),
        ("n = int(input())\nprint(n * n)\nraise SystemExit(1)", Judgement(0, 3, "test 1: exit status 1")),
        ("n = int(input())\nif n == 7:\n    print(49)\n    exit()\nprint(n * n)\nquit(0)", Judgement(3, 3)),
        ("print(int(input()) ** 2)\nexit(1)", Judgement(0, 3, "test 1: exit status 1")),
        ("exit()", Judgement(0, 3, "test 1: wrong output")),
        ("while input(): pass", Judgement(0, 3, "test 1: exit status 1: EOFError: EOF when reading a line")),
        ("while True: pass", Judgement(0, 3, "test 1: time limit")),
        ("x +", Judgement(0, 3, "test 1: exit status 1: SyntaxError: invalid syntax")),
        ("```c\nmain() {}\n```", Judgement(0, 3, "no program in the completion")),
        ("", Judgement(0, 3, "no program in the completion")),
        ("print('\\ud800')", Judgement(0, 3, ANY)),
    ],
)
def test_programs_by_standard_input(judge: CodeReward, answer: str, expected: Judgement) -> None:
    found = judge.judge(answer, BY_INPUT)
    assert (found.passed, found.total) == (expected.passed, expected.total)
    assert expected.problem in (ANY, found.problem)


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("def f(n): return [n * n, str(n)]", Judgement(3, 3)),
        ("def f(n): return n * n, str(n)", Judgement(3, 3)),
        ("class Solution:\n    def f(self, n: List[int]) -> Optional[int]: return [n * n, str(n)]", None),
        ("class Solution:\n    def f(self, n): return [n * n, str(n)]", Judgement(3, 3)),
        ("def f(n): print('noise'); return [n * n, str(n)]", Judgement(3, 3)),
        ("def f(n): return [n * n, n]", Judgement(0, 3, "call 1: wrong result")),
        (
            "def f(n): return [n * n, str(n)] if n < 9 else 1 / 0",
            Judgement(2, 3, "call 3: ZeroDivisionError: division by zero"),
        ),
        ("def g(n): return [n * n, str(n)]", Judgement(0, 3, "call 1: KeyError: 'f'")),
        ("def f(n):\n    while n > 9: pass\n    return [n * n, str(n)]", Judgement(2, 3, "time limit")),
        ("def f(n): return open", Judgement(0, 3, ANY)),
        ("def f(n):\n    x = []\n    x.append(x)\n    return x", Judgement(0, 3, ANY)),
        ("def f(n): return [10 ** 5000]", Judgement(0, 3, ANY)),
        ("f = 3", Judgement(0, 3, "call 1: TypeError: 'int' object is not callable")),
        ("raise ValueError", Judgement(0, 3, "exit status 1: ValueError")),
        ("if __name__ == '__main__': raise ValueError\ndef f(n): return [n * n, str(n)]", Judgement(3, 3)),
        ("def f(n): return [n * n, str(n)] if n < 8 else exit()", Judgement(1, 3, "exit status 0")),
        ("def f(n): exit()", Judgement(0, 3, "exit status 0")),
    ],
)
def test_programs_by_calls(judge: CodeReward, answer: str, expected: Judgement | None) -> None:
    found = judge.judge(answer, BY_CALL)
    if expected is None:  # names that nobody imported are of no use to a program of ours
        assert "NameError: name 'List' is not defined" in found.problem
        return
    assert (found.passed, found.total) == (expected.passed, expected.total)
    assert expected.problem in (ANY, found.problem)


#: By name; as functions that are called, and as whole programs.
FORGERIES = sections("forgeries.txt")


@pytest.mark.parametrize("forgery", FORGERIES.values(), ids=FORGERIES)
def test_no_forgery_passes(judge: CodeReward, forgery: str) -> None:
    for tests in (BY_INPUT, BY_CALL):
        found = judge.judge(forgery, tests)
        assert not found.right, found


@pytest.mark.skipif(os.getuid() != 0, reason="only root can be somebody else")
def test_no_forgery_passes_where_an_ordinary_user_judges() -> None:
    def passed() -> str:
        with contextlib.closing(CodeReward(CONFIG, *probe(CONFIG, []))) as judge:
            honest = judge.judge("def f(n): return [n * n, str(n)]", BY_CALL)
            asked = [(name, forgery, tests) for name, forgery in FORGERIES.items() for tests in (BY_INPUT, BY_CALL)]
            forged = [name for name, forgery, tests in asked if judge.judge(forgery, tests).right]
            return f"honest {honest.passed} of {honest.total}, forged {forged}"

    with delegated_groups(ORDINARY) as groups:
        assert as_user(ORDINARY, passed, groups) == "honest 3 of 3, forged []"


def test_a_function_is_taken_from_the_block_that_defines_it(judge: CodeReward) -> None:
    answer = "```python\ndef f(n): return [n * n, str(n)]\n```\nUsage:\n```python\nprint(f(7))\n```"
    assert judge.judge(answer, BY_CALL) == Judgement(3, 3)
    twice = "```python\ndef f(n): return 1\n```\nBetter:\n```python\ndef f(n): return [n * n, str(n)]\n```"
    assert judge.judge(twice, BY_CALL) == Judgement(3, 3)


def test_what_is_written_among_the_results_of_calls_is_wrong(judge: CodeReward) -> None:
    program = (
        "import os\n"
        "def f(n):\n"
        "    for number in range(3, 16):\n"
        "        try: os.write(number, b'{\"value\": 1}\\n')\n"
        "        except OSError: pass\n"
        "    return [n * n, str(n)]\n"
    )
    assert judge.judge(program, BY_CALL) == Judgement(0, 3, "it wrote among the results of its calls")


def test_right_results_and_a_wrong_end_are_wrong(judge: CodeReward) -> None:
    program = "import atexit, os\natexit.register(os._exit, 3)\ndef f(n): return [n * n, str(n)]"
    found = judge.judge(program, BY_CALL)
    assert (found.passed, found.right, found.problem) == (3, False, "exit status 3")


def test_expected_outputs_never_come_into_the_sandbox(judge: CodeReward, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    run = judge._sandbox.run

    def watched(task: Any, given: bytes, seconds: float, patience: float | None = None) -> Any:
        seen.append(f"{task} {given!r}")
        return run(task, given, seconds, patience)

    monkeypatch.setattr(judge._sandbox, "run", watched)
    judge.judge("def f(n): return n", parse_tests([{"call": "f", "args": [5], "expected": 424242}]))
    judge.judge("print(input())", parse_tests([{"stdin": "5", "stdout": "424242"}]))
    assert len(seen) == 2
    assert not any("424242" in words for words in seen)


def test_as_a_reward_it_stops_at_the_first_failure(judge: CodeReward) -> None:
    tests = parse_tests([{"stdin": "1", "stdout": "2"}, {"stdin": "1", "stdout": "1"}])
    assert judge.judge("print(input())", tests, to_the_end=True).passed == 1
    assert judge.judge("print(input())", tests, to_the_end=False).passed == 0


def test_all_tests_together_have_a_time_limit_too() -> None:
    found = judged(SandboxConfig(seconds=0.2, completion_seconds=0.3), f"{SPIN}spin(0.11)", [NOTHING] * 20)
    assert found.passed == 2
    assert found.problem.startswith("test 3: time limit")


def test_calls_are_charged_to_the_time_of_an_answer() -> None:
    program = f"{SPIN}def f():\n    spin(0.3)\n    return 1\nif __name__ == '__main__': spin(0.4)"
    tests: list[dict[str, Any]] = [{"call": "f", "args": [], "expected": 1}, NOTHING]
    found = judged(SandboxConfig(seconds=0.5, completion_seconds=0.6), program, tests)
    assert found == Judgement(1, 2, "test 1: time limit of all tests", unknown=True)


def test_a_program_that_speaks_of_the_time_limit_of_all_tests_is_wrong_all_the_same(judge: CodeReward) -> None:
    told = "time limit of all tests"
    for program, tests in ((f"exit({told!r})", BY_INPUT), (f"def f(n): raise OSError({told!r})", BY_CALL)):
        found = judge.judge(program, tests)
        assert found.problem.endswith(told)
        assert (found.passed, found.unknown, found.right) == (0, False, False)


class FailsAtFirst(Sandbox):
    """Its first run takes longer than an answer may, and comes to nothing."""

    failed = False

    def run(self, task: Mapping[str, Any], given: bytes, seconds: float, patience: float | None = None) -> ProgramEnd:
        if not self.failed:
            self.failed = True
            time.sleep(0.4)
            raise SandboxFailed("it was killed")
        return super().run(task, given, seconds, patience)


def test_the_time_that_a_sandbox_loses_is_not_the_programs() -> None:
    config = SandboxConfig(seconds=0.2, completion_seconds=0.3)
    with contextlib.closing(CodeReward(config, *probe(config, []), sandbox=FailsAtFirst)) as judge:
        assert judge.judge("print(int(input()) ** 2)", BY_INPUT) == Judgement(3, 3)


def test_the_prelude_stands_before_a_program_of_the_public_sets(judge: CodeReward) -> None:
    tests = parse_tests({"fn_name": "f", "inputs": [[[3, 1, 2]]], "outputs": [3]})
    answer = "class Solution:\n    def f(self, n: List[int]) -> int: return heapq.nlargest(1, n)[0]"
    assert program_of(answer, tests) == (answer, tests.prelude, "")
    assert judge.judge(answer, tests) == Judgement(1, 1)


@pytest.mark.parametrize(
    "answer",
    [
        "def f(n): return pow(n, -1, 7)",
        "def f(n): return [5, bisect.bisect_left([1, 2, 3], n)][0] if Counter([n]) == collections.Counter([n]) else 0",
        "from __future__ import annotations\ndef f(n: Unknown) -> list[Unknown]: return pow(n, 5, 7)",
        "'''Inverts.'''\nfrom __future__ import annotations\ndef f(n): return 5 if type(sum([1])) is int else 0",
        "def f(n): return bisect_left(range(9), 5) if gcd(4, 6) == 2 else 0",
        "def f(n): return xor(*deepcopy([n, 6])) if n < sys.maxsize and 'n' in ascii_lowercase else 0",
        "@cache\ndef f(n): return 5 if n > 9_000 else f(n + 1)",
    ],
)
def test_the_prelude_hides_nothing_and_may_stand_before_any_program(judge: CodeReward, answer: str) -> None:
    assert judge.judge(answer, parse_tests({"fn_name": "f", "inputs": [[3]], "outputs": [5]})) == Judgement(1, 1)


def test_programs_of_the_public_sets_have_the_limits_of_livecodebenchs_grader(judge: CodeReward) -> None:
    tests = parse_tests({"inputs": ["9000"], "outputs": ["9000"]})
    assert judge.judge("def f(n): return n and f(n - 1) + 1\nprint(f(int(input())))", tests) == Judgement(1, 1)
    tests = parse_tests([{"input": "7" * 9000, "output": "7" * 9000, "testtype": "stdin"}])
    assert judge.judge("print(int(input()))", tests) == Judgement(1, 1)


@pytest.mark.parametrize(
    ("answer", "passes"),
    [
        ("print(1)", False),
        ("def greatest(a, b): return gcd(a, b)", False),
        ("from math import gcd", True),
        ("from math import *", True),
        ("def gcd(a, b): return math.gcd(a, b)", True),
        ("class Solution:\n    def gcd(self, a, b): return gcd(a, b)", True),
    ],
)
def test_a_function_of_the_prelude_is_not_the_programs(judge: CodeReward, answer: str, passes: bool) -> None:
    expected = Judgement(1, 1) if passes else Judgement(0, 1, "call 1: KeyError: 'gcd'")
    assert judge.judge(answer, parse_tests({"fn_name": "gcd", "inputs": [[12, 18]], "outputs": [6]})) == expected


HUMANEVAL = {
    "prompt": (
        "import math\nfrom typing import List\n\ndef poly(xs: list, x: float):\n    return sum(c * x**k for k, c in "
        "enumerate(xs))\n\n\ndef at_two(xs: List[int]) -> int:\n    '''The value at 2.'''\n"
    ),
    "entry_point": "at_two",
    "test": "def check(candidate):\n    assert candidate([1, 2]) == 5\n    assert candidate([0, 0, 1]) == 4\n",
}


@pytest.mark.parametrize(
    ("answer", "right"),
    [
        ("    return poly(xs, 2)", True),
        ("```python\ndef at_two(xs: List[int]) -> int:\n    return math.floor(poly(xs, 2))\n```", True),
        ("class Solution:\n    def at_two(self, xs: List[int]) -> int:\n        return poly(xs, 2)", True),
        ("from __future__ import annotations\ndef at_two(xs: Unknown): return poly(xs, 2)", True),
        ("def at_two(xs): return poly(xs, 3)", False),
        ("def poly(xs, x): return 0\ndef at_two(xs): return poly(xs, 2)", False),
    ],
)
def test_an_answer_has_the_helpers_of_the_preamble_also_where_it_gives_the_function_again(
    judge: CodeReward, answer: str, right: bool
) -> None:
    assert judge.judge(answer, parse_tests(HUMANEVAL)).right == right


def test_what_the_tests_of_a_row_import_and_set_up_is_there_when_they_call(judge: CodeReward) -> None:
    row = {"test_list": ["assert size(2) == 3", "assert size(3) == 4"], "test_imports": ["import math"]}
    assert judge.judge("def size(n): return math.ceil(n + 0.5)", parse_tests(row)).right
    made = {"test_list": ["assert size(2) == 3"], "test_setup_code": "root = Node(1)"}
    assert judge.judge(
        "class Node:\n    def __init__(self, n): self.n = n\ndef size(n): return n + root.n", parse_tests(made)
    ).right
    assert not judge.judge("def size(n): return n + 1", parse_tests(made)).right


def test_an_answer_may_go_on_from_the_head_of_the_function(judge: CodeReward) -> None:
    tests = parse_tests(
        {"tests": [{"call": "f", "args": [3], "expected": 9}], "preamble": "def f(n):", "entry_point": "f"}
    )
    assert judge.judge("x=n*n;return x", tests).right
    assert judge.judge("def f(n): return n * n", tests).right
    assert not judge.judge("return n", tests).right


def test_a_sandbox_that_fails_leaves_the_answer_undecided() -> None:
    walls = Walls(Level.C, namespaces=0x1)  # there is no such namespace
    with contextlib.closing(CodeReward(CONFIG, walls, Report(rungs=()))) as judge, pytest.raises(SandboxFailed):
        judge.judge("print(49)", BY_INPUT)


def left_behind() -> set[Path]:
    """The control groups whose maker, whose number is in their name, is no more."""
    groups = {path for path in Path("/sys/fs/cgroup").glob("*/**/stretto-*") if path.is_dir()}
    return {path for path in groups if not Path("/proc", path.name.split("-")[1]).exists()}


async def test_the_workers_of_a_run_judge_programs_and_leave_no_control_group_when_they_are_killed() -> None:
    gold = json.dumps([{"stdin": "7", "stdout": "49"}])
    asked = [("print(49)", gold), ("print(48)", gold), ("print(49)", "nonsense"), ("print(49)", "[]")]
    before = left_behind()
    async with RewardPool(RewardsConfig(function="code", code=CONFIG)) as pool:
        assert pool.facts["sandbox"].startswith("sandbox level ")
        verdicts = await pool.score([ScoreItem(prompt="", completion=text, answer=gold) for text, gold in asked])
    undecided = [Outcome.UNDECIDED] * 2
    assert [verdict.outcome for verdict in verdicts] == [Outcome.RIGHT, Outcome.WRONG, *undecided]
    assert verdicts[3].reason == "there are no tests"
    end = time.monotonic() + 10.0  # others who score at the same time put away theirs
    while not left_behind() <= before and time.monotonic() < end:
        time.sleep(0.1)
    assert left_behind() <= before


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"timeout": 5.0}, "must leave room for code.completion_seconds: 25 or more"),
        ({"code": {"seconds": 20.0}}, "seconds = 20 is more than completion_seconds = 10"),
        ({"code": {"lowest_level": "E"}}, "needs unsafe = true"),
        ({"code": {"lowest_level": "F"}}, "'A', 'B', 'C', 'D' or 'E'"),
        ({"code": {"memory_mib": 1}}, "greater than or equal to 64"),
        ({"code": {"memory": 100}}, "Extra inputs are not permitted"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        RewardsConfig.model_validate({"function": "code"} | settings)
