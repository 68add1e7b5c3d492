"""Programs that ask for more than a verdict, or for none.

Promises: a program is undecided only when nothing was wrong with it while the time of all tests lasted; what it writes
among results costs the grader no more than to count it; one that ends its sandbox is wrong; the method that is asked
for is called, whatever else has its name.
"""

import contextlib
import time
from collections.abc import Mapping
from typing import Any

import pytest

from stretto_verify.code.formats import parse_tests
from stretto_verify.code.reward import CodeReward, Judgement
from stretto_verify.sandbox.config import SandboxConfig
from stretto_verify.sandbox.probe import probe
from stretto_verify.sandbox.sandbox import ProgramEnd, Sandbox, SandboxFailed
from tests.verify.code.test_reward import BY_CALL, BY_INPUT, CONFIG, SPIN, judged
from tests.verify.code.test_reward import judge as judge

SLOW = SandboxConfig(seconds=0.25, completion_seconds=0.3)
#: For programs that sleep: ten times as long passes by the clock.
BRIEF = SandboxConfig(seconds=0.1, completion_seconds=0.12)
PRINT_1 = [{"stdin": "", "stdout": "1"}] * 8
F_OF_1 = [{"call": "f", "args": [1], "expected": 1}] * 8


@pytest.mark.parametrize(
    ("answer", "tests", "unknown"),
    [
        (f"{SPIN}\nspin(0.1); print(1)", PRINT_1, True),
        (f"{SPIN}\nspin(0.1); print(2)", PRINT_1, False),
        ("import time; time.sleep(99)", PRINT_1, False),
        (f"{SPIN}\ndef f(n): spin(0.1); return n", F_OF_1, True),
        (f"{SPIN}\ndef f(n): spin(0.1); return n + 1", F_OF_1, False),
        ("import time\ndef f(n): time.sleep(99); return n", F_OF_1, False),
        ("def f(n): return n\nwhile True: pass", F_OF_1, False),
    ],
)
def test_only_a_program_of_which_nothing_is_known_is_undecided_when_the_time_of_all_tests_is_over(
    answer: str, tests: list[dict[str, Any]], unknown: bool
) -> None:
    found = judged(BRIEF if "sleep" in answer else SLOW, answer, tests)
    assert (found.right, found.unknown) == (False, unknown), found


@pytest.mark.parametrize("size", [1, 4 << 20])
@pytest.mark.parametrize("piece", ["\\n", "1\\n", "[[\\n", '{"value": 1}\\n', "x"])
def test_a_flood_among_the_results_is_counted_and_not_parsed(judge: CodeReward, piece: str, size: int) -> None:
    flood = f"import os\nfor n in range(3, 16):\n    try: os.write(n, b'{piece}' * ({size} // len(b'{piece}') + 1))\n"
    flood += "    except OSError: pass\n"
    start = time.process_time()
    assert not judge.judge(flood + "def f(n): return [n * n, str(n)]", BY_CALL).right
    assert time.process_time() - start < 4.0  # a hundredth of it; parsed line by line, eleven seconds


def test_a_program_that_ends_its_sandbox_every_time_is_wrong() -> None:
    class Mortal(Sandbox):
        """A sandbox whose guest some programs can end."""

        def run(
            self, task: Mapping[str, Any], given: bytes, seconds: float, patience: float | None = None
        ) -> ProgramEnd:
            if "kill" in task["source"]:
                raise SandboxFailed("the guest is gone")
            return super().run(task, given, seconds, patience)

    with contextlib.closing(CodeReward(CONFIG, *probe(CONFIG, []), sandbox=Mortal)) as mortal:
        assert not mortal.judge("kill", BY_INPUT).right
        assert mortal.judge("print(int(input()) ** 2)", BY_INPUT).right


def test_the_method_of_a_solution_is_called_and_not_a_global_of_its_name(judge: CodeReward) -> None:
    for name in ("gcd", "f", "comb", "reduce", "insort", "floor"):
        tests = parse_tests({"fn_name": name, "inputs": [[3]], "outputs": [9]})
        answer = f"def f(n): return 0\nclass Solution:\n    def {name}(self, n): return n * n"
        assert judge.judge(answer, tests) == Judgement(1, 1), name
    plain = "class Solution:\n    def g(self, n): return 0\ndef f(n): return [n * n, str(n)]"
    assert judge.judge(plain, BY_CALL) == Judgement(3, 3)


LIVE = [{"testtype": "functional", "input": "3", "output": "true", "metadata": {"func_name": "f"}}]
APPS = {"inputs": ["3\n"], "outputs": ["3\n"]}


@pytest.mark.parametrize(
    ("tests", "answer", "right"),
    [
        (LIVE, "def f(n): return 1", True),
        (LIVE, "def f(n): return 2", False),
        (LIVE, "def f(n): return 'True'", False),
        (APPS, "print(float(input()))", True),
        (APPS, "print(float(input()) + 1e-9)", False),
        ([{"call": "f", "args": [3], "expected": True}], "def f(n): return 1", False),
        ([{"stdin": "3", "stdout": "3"}], "print(float(input()))", False),
    ],
)
def test_rows_of_others_are_judged_as_their_graders_do(judge: CodeReward, tests: Any, answer: str, right: bool) -> None:
    assert judge.judge(answer, parse_tests(tests)).right == right
