"""Tests as datasets write them.

Promises: the forms of LiveCodeBench, DeepCoder, APPS, HumanEval and MBPP are read as what they say; asserts are taken
apart into calls and results; what cannot be read is refused with the place, never left out; a packed pickle runs
nothing and takes no memory.
"""

import base64
import json
import math
import pickle
import tracemalloc
import zlib
from typing import Any

import pytest

from stretto_verify.code.comparison import near
from stretto_verify.code.formats import parse_tests
from stretto_verify.code.tests import BadTests, CallTest, StdinTest
from stretto_verify.sandbox.values import plain

ADD = StdinTest(stdin="3 8\n", stdout="11\n")
CALL = CallTest(call="add", args=(3, 8), accepted=(11,))
HUMANEVAL = {
    "prompt": "def add(a, b):\n",
    "entry_point": "add",
    "test": (
        "METADATA = {'author': 'x'}\n\ndef check(candidate):\n    '''All of it.'''\n    assert True, 'a comment'\n"
        "    assert candidate(3, 8) == 11, 'first'\n    assert 5 == candidate(2, 3)\n"
        "    assert abs(candidate(0.5, 0.25) - 0.75) < 1e-6\n"
        "    assert candidate((1,), (2,)) == (1, 2)\n    assert candidate(-1, 2) is True\n"
    ),
}


@pytest.mark.parametrize(
    "given",
    [
        [{"stdin": "3 8\n", "stdout": "11\n"}],
        [{"input": "3 8\n", "output": "11\n", "testtype": "stdin"}],
        [{"type": "stdin_stdout", "input": "3 8\n", "output": "11\n"}],
        {"inputs": ["3 8\n"], "outputs": ["11\n"]},
        {"inputs": [["3 8", ""]], "outputs": [["11", ""]]},
        {"input_output": '{"inputs": ["3 8\\n"], "outputs": ["11\\n"]}', "difficulty": "interview"},
        {"tests": '[{"input": "3 8\\n", "output": "11\\n", "testtype": "stdin", "metadata": {"func_name": null}}]'},
        {"public_test_cases": '[{"input": "3 8\\n", "output": "11\\n", "testtype": "stdin"}]', "metadata": "{}"},
    ],
)
def test_tests_by_standard_input(given: Any) -> None:
    for form in (given, json.dumps(given), json.dumps(json.dumps(given))):
        tests = parse_tests(form)
        assert (tests.stdin, tests.calls) == ((ADD,), ())


@pytest.mark.parametrize(
    "given",
    [
        [{"call": "add", "args": [3, 8], "expected": 11}],
        [{"input": "3\n8", "output": "11", "testtype": "functional", "metadata": {"func_name": "add"}}],
        {
            "public_test_cases": '[{"input": "3\\n8", "output": "11", "testtype": "functional"}]',
            "metadata": '{"func_name": "add"}',
        },
        [{"type": "function_call", "fn_name": "add", "input": [3, 8], "output": 11}],
        {"fn_name": "add", "inputs": [[3, 8]], "outputs": [11]},
        {"test_list": ["assert add(3, 8) == 11"], "text": "Add."},
    ],
)
def test_tests_by_calls(given: Any) -> None:
    tests = parse_tests(given)
    assert (tests.stdin, tests.calls) == ((), (CALL,))


def test_the_imports_and_the_setup_of_mbpp_are_read() -> None:
    row = {"test_list": ["assert add(3, 8) == 11"], "test_imports": ["import math", "import re"], "test_setup_code": ""}
    assert parse_tests(row).prelude == "import math\nimport re"
    given = parse_tests({"test_list": row["test_list"], "test_setup_code": "root = Node(1)", "test_imports": []})
    assert (given.prelude, given.setup) == ("", "root = Node(1)")


def test_a_result_in_a_list_of_its_own_is_accepted_both_ways() -> None:
    [test] = parse_tests({"fn_name": "add", "inputs": [[3, 8]], "outputs": [[11]]}).calls
    assert test.accepted == ([11], 11)


def test_the_asserts_of_humaneval_become_calls_and_results() -> None:
    tests = parse_tests(HUMANEVAL)
    assert [(test.args, test.accepted[0]) for test in tests.calls] == [
        ((3, 8), 11),
        ((2, 3), 5),
        ((0.5, 0.25), 0.75),
        ((plain((1,)), plain((2,))), plain((1, 2))),
        ((-1, 2), True),
    ]
    assert {test.call for test in tests.calls} == {"add"}
    assert (tests.preamble, tests.entry_point) == ("def add(a, b):\n", "add")


@pytest.mark.parametrize(
    ("order", "off"), [("< 0.25", {0.0: True, 0.2: True, 0.25: False}), ("<= 0.25", {0.25: True, 0.3: False})]
)
def test_the_tolerance_of_an_assert_is_that_of_the_test(order: str, off: dict[float, bool]) -> None:
    [test] = parse_tests({"test_list": [f"assert abs(root(2) - 1.5) {order}"]}).calls
    assert test.accepted == (1.5,)
    assert test.within is not None
    assert {by: near(1.5, 1.5 + by, test.within) for by in off} == off
    assert not near(1.5, True, 9.0)
    assert not near(1.5, 10**400, 9.0)
    assert not near(1.5, math.nan, 9.0)


def test_the_packed_tests_of_livecodebench_are_unpacked() -> None:
    content = json.dumps([{"input": "3 8\n", "output": "11\n", "testtype": "stdin"}])
    packed = base64.b64encode(zlib.compress(pickle.dumps(content))).decode()
    public = '[{"input": "1 1\\n", "output": "2\\n", "testtype": "stdin"}]'
    tests = parse_tests({"public_test_cases": public, "private_test_cases": packed})
    assert tests.stdin == (StdinTest(stdin="1 1\n", stdout="2\n"), ADD)


class Bomb:
    """A pickle that would run a program when it is read."""

    def __reduce__(self) -> Any:
        return (exec, ("raise SystemExit('run')",))


def packed(content: bytes) -> dict[str, str]:
    return {"public_test_cases": "[]", "private_test_cases": base64.b64encode(zlib.compress(content)).decode()}


def test_a_packed_pickle_runs_nothing() -> None:
    with pytest.raises(BadTests, match="the pickle of more than a text: it has STACK_GLOBAL"):
        parse_tests(packed(pickle.dumps(Bomb())))


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize("length", [1, 100_000])
def test_a_pickle_of_any_protocol_is_unpacked(protocol: int, length: int) -> None:
    content = json.dumps([{"input": "é\n" * length, "output": "11\n", "testtype": "stdin"}], ensure_ascii=False)
    tests = parse_tests(packed(pickle.dumps(content, protocol)))
    assert tests.stdin == (StdinTest(stdin="é\n" * length, stdout="11\n"),)


@pytest.mark.parametrize(
    "content",
    [
        b"\x80\x02X\x02\x00\x00\x00[]r\xff\xff\xff\x00.",  # names the 16,777,215th of its values
        b"\x80\x05\x96\x00\x00\x00\x00\x01\x00\x00\x00x.",  # says that 4 GiB follow
        b"\x80\x02" + b"\x94" * 1_000_000 + b".",
    ],
)
def test_a_packed_pickle_takes_no_memory(content: bytes) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(BadTests):
            parse_tests(packed(content))
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("given", "words"),
    [
        *[(None, "tests are NoneType, not a list"), (3, "tests are int, not a list"), ("", "broken JSON")],
        *[("nonsense", "broken JSON"), ("[" * 100_000, "broken JSON"), ([], "there are no tests")],
        *[({}, "an object with nothing"), ({"foo": 1}, "an object with 'foo', of no form that is known")],
        ([3], "test 1 has int"),
        ([{"stdin": "1", "stdout": "2"}, {"stdin": "1"}], "test 2 has 'stdin'; needed are 'stdin' and 'stdout'"),
        (["assert f(1) == 2"], "test 1 is an assert; a list of asserts is the field 'test_list' of an object"),
        ([{"stdin": 1, "stdout": "2"}], "test 1 has 'stdin', 'stdout'"),
        ([{"stdin": "1", "stdout": "2", "extra": 1}], "'extra'"),
        ([{"call": "f", "args": 3, "expected": 1}], "test 1 has 'call'"),
        ([{"input": "1", "output": "2", "testtype": "functional"}], "no metadata say which"),
        ([{"input": "x", "output": "2", "testtype": "functional", "metadata": {"func_name": "f"}}], "broken JSON"),
        ({"inputs": ["1"], "outputs": []}, "not lists of the same length"),
        ({"fn_name": "f", "inputs": ["1"], "outputs": ["1"]}, "not lists of arguments"),
        ({"inputs": [1], "outputs": ["1"]}, "inputs is int, not a text"),
        ({"public_test_cases": "[]", "private_test_cases": "!!"}, "packed tests cannot be read"),
        ({"public_test_cases": "[" * 100_000}, "packed tests cannot be read"),
        # the pickle of a dictionary with a list as its key
        ({"public_test_cases": base64.b64encode(zlib.compress(b"}]K\x01s.")).decode()}, "packed tests cannot be read"),
        *[(HUMANEVAL | {"test": "x = 1"}, "defines no function check"), (HUMANEVAL | {"test": "def f(:"}, "no Python")],
        (
            HUMANEVAL | {"test": "def check(candidate):\n  for i in range(3): assert candidate(i) == i"},
            "does more than",
        ),
        (HUMANEVAL | {"test": "def check(candidate):\n  assert candidate(1) == other(1)"}, "no comparison of a call"),
        (HUMANEVAL | {"test": "def check(candidate):\n  assert candidate(*x) == 1"}, "no comparison of a call"),
        (HUMANEVAL | {"test": "def check(candidate):\n  pass"}, "there are no tests"),
        ({"test_list": ["assert f(1) > 2"]}, "no comparison of a call with a literal"),
        ({"test_list": ["assert f(1)"]}, "no comparison of a call with a literal"),
        ({"test_list": ["assert not f(1)"]}, "no comparison of a call with a literal"),
        ({"test_list": ["assert abs(f(1) - 'a') < 1"]}, "no comparison of a call with a literal"),
        ({"test_list": ["assert abs(f(1) - 2) < eps"]}, "no comparison of a call with a literal"),
        ({"test_list": ["assert angle_complex(0, 1j) == 1.57"]}, "no comparison of a call with a literal"),
        ({"test_list": ["assert f(1) == ..."]}, "no comparison of a call with a literal"),
        ({"test_list": None}, "test_list is NoneType, not a list"),
        ({"test_list": ["f(1)"]}, "not of the form"),
        ({"test_list": ["assert f(1) == 2"], "test_imports": [3]}, "test_imports is list, not a text"),
        ({"test_list": ["assert f(1) == 2"], "test_imports": ["import"]}, "test_imports is no Python: invalid syntax"),
        ({"test_list": ["assert f(1) == 2"], "test_setup_code": "x ="}, "test_setup_code is no Python"),
        ('{"tests": ' * 900 + "[]" + "}" * 900, "nested too deeply"),
        ({"test_list": [f"assert {900 * 'not '}f(1)"]}, "nested too deeply"),
    ],
)
def test_what_cannot_be_read_is_refused_with_the_reason(given: object, words: str) -> None:
    with pytest.raises(BadTests) as refused:
        parse_tests(given)
    assert words in str(refused.value)


def test_tests_of_python_may_hold_what_json_lacks() -> None:
    expected = [(1, (2,)), {1: {2}}, b"x", [{"k": (1,)}]]
    tests = parse_tests([{"call": "f", "args": [(1,), {1: 2}, {3}], "expected": value} for value in expected])
    assert [test.accepted[0] for test in tests.calls] == [
        plain((1, (2,))),
        plain({1: {2}}),
        plain(b"x"),
        [{"k": plain((1,))}],
    ]
    assert tests.calls[0].args == ((1,), {1: 2}, {3})
    asserts = {"test_list": ["assert f((1,)) == {1: (2,)}"]}
    assert parse_tests(asserts) == parse_tests(json.dumps(asserts))  # asserts are taken apart already


@pytest.mark.parametrize(
    ("test", "told"),
    [
        ({"call": "f", "args": [object()], "expected": 1}, "a object is no argument that a program can get"),
        ({"call": "f", "args": [[{1: memoryview(b"12")}]], "expected": 1}, "a memoryview is no argument"),
        ({"call": "f", "args": [1], "expected": 1j}, "a complex is no result that a test can expect"),
        ({"stdin": "\ud800", "stdout": "1"}, "the input of test 1 is not valid Unicode"),
    ],
)
def test_what_no_program_can_get_or_return_is_refused(test: Any, told: str) -> None:
    with pytest.raises(BadTests, match=told):
        parse_tests([test])
