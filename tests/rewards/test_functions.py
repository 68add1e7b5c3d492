"""The built-in rewards, and how a reward is found by its name.

Promises: integers are compared as integers and all else as text; a hostile answer costs a scan; a name that cannot be
used gives one message with the place, what was found, and what is allowed; an asynchronous reward is waited for, on one
event loop.
"""

import functools
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.core.errors import RewardFunctionError
from stretto.rewards.functions import Undecided, exact_match, final_answer, last_number
from stretto.rewards.service.judging import fields_taken, judge, load_reward
from stretto.rewards.service.wire import ScoreItem, Worth

_MODULE = """
import asyncio, functools
loops = set()
async def looped(prompt, completion, answer):
    loops.add(asyncio.get_running_loop())
    await asyncio.sleep(0)
    return float(len(loops))
LIMIT = 3
def good(prompt, completion, answer): return True
def two(prompt, completion): return True
def named(*, prompt, completion, answer): return True
async def later(prompt, completion, answer): return True
async def hurried(prompt): return True
async def streaming(prompt, completion, answer): yield True
def many(prompt, completion, answer): yield True
async def graded(prompt, completion, answer, level): return level / 4
def everything(question, completion, gold, **fields): return fields["level"] + fields["fields"]
async def broken(prompt, completion, answer):
    await asyncio.sleep(0)
    return 1 / 0
class Judge:
    def __call__(self, prompt, completion, answer): return 0.5
class Slow:
    async def __call__(self, prompt, completion, answer): return 0.5
judge, slow, part = Judge(), Slow(), functools.partial(lambda w, p, c, a: w, 1.0)
"""


@pytest.mark.parametrize(
    ("completion", "answer", "right"),
    [
        ("3+8=11;11+5=16", "16", True),
        ("3+8=11;11+5=16 ", " 16", True),
        ("3+8=11;11+5=016", "+16", True),
        ("16", "16", True),  # no chain at all: the whole text is what follows
        *[("3+8=11;11+5=", "16", False), ("3+8=11;11+5=16;", "16", False), ("3-3=-0", "0", True)],
        *[("3-8=-5", "-5", True), ("3-8=5", "-5", False), ("3+8=1_1", "11", False)],
        ("3+8=１１", "11", False),  # look-alike digits
        ("colour=red", "red", True),
        ("", "", True),
    ],
)
def test_the_final_answer_is_what_follows_the_last_equals_sign(completion: str, answer: str, right: bool) -> None:
    assert final_answer("", completion, answer) is right


@given(st.integers(), st.integers(0, 5))
def test_every_spelling_of_an_integer_is_the_integer(number: int, zeros: int) -> None:
    sign = "-" if number < 0 else ""
    assert final_answer("", f"1+1={sign}{'0' * zeros}{abs(number)}", str(number))
    assert not final_answer("", f"1+1={number + 1}", str(number))


def test_a_number_of_a_million_digits_is_judged_at_once() -> None:
    start = time.process_time()
    assert final_answer("", "9=" + "9" * 10**6, "9" * 10**6)
    assert time.process_time() - start < 5  # what is quadratic takes minutes


def test_an_exact_match_ignores_only_the_spaces_around() -> None:
    assert exact_match("", " a b\n", "a b")
    assert not exact_match("", "a  b", "a b")


@pytest.mark.parametrize(
    ("completion", "answer", "right"),
    [
        *[("3 or 4.50", "4.5", True), ("-0.50", "-.5", True), ("-0.50", "-0.5", True), ("7", "7.0", True)],
        ("x", "7", False),
        ("48 + 24 = 72", "He sold <<48+24=72>>72 clips.\n#### 72", True),  # as GSM8K has it
        ("<<48+24=72>>72 clips\n#### 72", "<<48+24=72>>72 clips\n#### 73", False),
        *[("It costs $1,000.", "So 2 * 500 = 1000\n#### 1,000", True), ("It costs 1000", "1,000", True)],
        *[("nothing: .0", "0", True), ("0", "-.00", True), ("-.0", "1", False)],  # no digit before the point
        *[("1,000,000.50", "1000000.5", True), ("either 1, 2 or 3,4", "4", True)],
        *[("12", r"so it is \boxed{1,2}", None), ("So 72", r"we get \boxed{72}", True), ("18", "$18", True)],
        ("yes", "yes", None),
        ("1/2", "1/2", None),  # its last number would be 2
    ],
)
def test_the_last_number_is_compared_with_that_of_the_gold(completion: str, answer: str, right: bool | None) -> None:
    if right is None:
        with pytest.raises(Undecided, match="is not a number"):
            last_number("", completion, answer)
    else:
        assert last_number("", completion, answer) is right


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "our_rewards.py").write_text(_MODULE)
    (tmp_path / "leaving.py").write_text("raise SystemExit('no')")
    monkeypatch.syspath_prepend(str(tmp_path))
    return "our_rewards"


@pytest.mark.parametrize("name", ["good", "judge", "part", "Judge.__call__"])
def test_a_function_an_object_and_a_partial_can_be_rewards(module: str, name: str) -> None:
    if name == "Judge.__call__":
        with pytest.raises(RewardFunctionError, match="signature"):
            load_reward(f"{module}:{name}")
    else:
        assert callable(load_reward(f"{module}:{name}"))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("final_anwser", ["rewards.function", "final_anwser", "did you mean 'final_answer'?"]),
        ("nowhere.at.all:f", ["cannot import 'nowhere.at.all'", "ModuleNotFoundError"]),
        ("leaving:f", ["cannot import 'leaving'", "SystemExit"]),
        ("our_rewards:godo", ["has no 'godo'", "did you mean 'good'?"]),
        ("our_rewards:LIMIT", ["is int", "cannot be called"]),
        ("our_rewards:two", ["another signature", "for one completion", "function(prompt, completion, answer)"]),
        ("our_rewards:named", ["another signature"]),
        ("our_rewards:many", ["is a generator", "by 'return' and not by 'yield'"]),
        ("our_rewards:streaming", ["is a generator"]),
        ("our_rewards:hurried", ["another signature"]),
        (":f", ["':f' names no reward", "'package.module:name'"]),
        ("our_rewards:", ["'our_rewards:' names no reward"]),
    ],
)
def test_a_name_that_cannot_be_used_is_refused_with_the_way_out(module: str, name: str, words: list[str]) -> None:
    with pytest.raises(RewardFunctionError) as refused:
        load_reward(name)
    assert all(word in str(refused.value) for word in words), str(refused.value)


ITEM = ScoreItem(prompt="", completion="", answer="")
WORTH = Worth(right=1.0, wrong=0.0)


@pytest.mark.parametrize(("name", "reward"), [("later", 1.0), ("slow", 0.5), ("looped", 1.0)])
def test_an_asynchronous_reward_is_waited_for(module: str, name: str, reward: float) -> None:
    function = load_reward(f"{module}:{name}")
    assert [judge(function, ITEM, WORTH).reward for _ in range(3)] == [reward] * 3


def test_an_asynchronous_reward_gets_the_fields_it_names_and_its_faults_have_its_lines(
    module: str, tmp_path: Path
) -> None:
    graded = load_reward(f"{module}:graded")
    fields = fields_taken(graded, '{"level": 3, "other": 4}')
    assert fields == {"level": 3}
    assert judge(functools.partial(graded, **fields), ITEM, WORTH).reward == 0.75
    lines = _MODULE.splitlines()
    place = f"our_rewards.py:{lines.index('    return 1 / 0') + 1}"
    assert f"/{place}: division by zero" in judge(load_reward(f"{module}:broken"), ITEM, WORTH).reason


def test_a_reward_that_takes_all_fields_gets_none_with_its_own_name_of_the_answer(module: str) -> None:
    everything = load_reward(f"{module}:everything")
    fields = fields_taken(everything, '{"level": 3, "gold": 7, "fields": 8}')
    assert fields == {"level": 3, "fields": 8}
    assert judge(functools.partial(everything, **fields), ITEM, WORTH).reward == 11.0
