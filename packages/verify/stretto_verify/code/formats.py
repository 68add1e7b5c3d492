"""Parse tests: in stretto's own form, or as rows of public datasets.

    [{"stdin", "stdout"}, {"call", "args", "expected"}]            ours
    [{"input", "output", "testtype", "metadata"?}]                 LiveCodeBench, DeepCoder
    [{"type", "input", "output", "fn_name"?}]                      DeepCoder
    {"tests": any of these lists, "preamble"?, "entry_point"?}     ours, for completions that continue a given head
    {"inputs", "outputs", "fn_name"?}                              APPS, TACO
    a whole row of LiveCodeBench, APPS, DeepCoder, HumanEval or MBPP

Each form may also be given as JSON text, as in many datasets.
"""

from __future__ import annotations

import base64
import json
import pickletools
import zlib
from collections.abc import Iterable, Mapping
from itertools import chain, islice
from typing import Any

import msgspec

from stretto_verify.code.tests import BadTests, CallTest, ProgramTests, StdinTest, call_of_assert, calls_of_check
from stretto_verify.sandbox.values import plain

_LARGEST_PACKED = 64 << 20  # bytes of packed tests after unpacking
_DEPTH = 3  # JSON in JSON in JSON
#: Operations in the pickle of a text: those that push it, and those around it.
_TEXTS = frozenset(
    {"UNICODE", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8", "STRING", "BINSTRING", "SHORT_BINSTRING"}
)
_AROUND_TEXTS = frozenset({"PROTO", "FRAME", "PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE", "STOP"})
_MOST_OPERATIONS = 16

#: Limits of programs for LiveCodeBench and APPS: those of LiveCodeBench's grader. Old interpreters have none of digits.
_LIMITS = """\
__import__("sys").setrecursionlimit(50_000)
getattr(__import__("sys"), "set_int_max_str_digits", id)(50_000)
"""
#: The same, and names that their functions may use without importing them. The order decides between equal names:
#: `bisect` is the module, not its function, as in `bisect.insort`; `pow` is Python's own, with a modulus, not math's.
_PRELUDE = f"""\
from string import *
from re import *
from random import *
from operator import *
from copy import *
from typing import *
from bisect import *
from collections import *
from functools import *
from heapq import *
from itertools import *
from math import *
import collections, copy, functools, heapq, itertools, math, re, string, bisect, operator, random, sys
from builtins import *
{_LIMITS}"""


def parse_tests(given: object) -> ProgramTests:
    """Parse tests: stretto's own list, or those of LiveCodeBench, DeepCoder, APPS, TACO, HumanEval or MBPP, also as
    JSON text.

    Raises:
        BadTests: no form fits, or there are no tests; the message says which test is wrong, and how.
    """
    try:
        return _tests(given)
    except RecursionError:
        raise BadTests("tests are nested too deeply") from None


def _tests(given: object) -> ProgramTests:
    is_text = isinstance(given, str)
    for _ in range(_DEPTH):
        if isinstance(given, str):
            given = _json(given)
    tests = _row(given) if isinstance(given, dict) else _list(given, {})
    if not tests.count:
        raise BadTests("there are no tests")
    for number, test in enumerate(tests.stdin, start=1):
        _check_input(test.stdin, number)
    return tests if is_text else msgspec.structs.replace(tests, calls=tuple(map(_of_python, tests.calls)))


def gold(prompt: str, completion: str, answer: str) -> bool:
    """Check that `answer` holds tests of a question (`prompt` and `completion` are not used). Always returns True.

    Raises:
        BadTests: the tests cannot be read; the message says why.
    """
    return parse_tests(answer).count > 0


def _check_input(text: str, number: int) -> None:
    try:
        if not text.isascii():
            text.encode(errors="surrogateescape")
    except UnicodeEncodeError as error:
        raise BadTests(f"the input of test {number} is not valid Unicode ({error.reason})") from None


def _of_python(test: CallTest) -> CallTest:
    """The test with its accepted results in the form of `values.plain`. Its values may be Python objects that JSON
    lacks: tuples, sets, bytes, keys of any type. Raises BadTests for objects that no program can get or return."""
    try:
        for argument in test.args:
            _check_argument(argument)
        return msgspec.structs.replace(test, accepted=tuple(map(_plain, test.accepted)))
    except (TypeError, RecursionError) as error:
        raise BadTests(f"a test of {test.call!r} cannot be used: {error}") from None


def _check_argument(value: object) -> None:
    """Raise TypeError unless `value` is None, a number, a text, bytes, or a list, tuple, set or dict of these: a
    program would get another object (an array as bytes)."""
    if type(value) in (list, tuple, set, frozenset, dict):
        for item in value:  # type: ignore[attr-defined]  # it is one of these
            _check_argument(item)
        if isinstance(value, dict):
            for item in value.values():
                _check_argument(item)
    elif value is not None and type(value) not in (bool, int, float, complex, str, bytes):
        raise TypeError(f"a {type(value).__name__} is no argument that a program can get; give Python's own types")


def _plain(value: object) -> Any:
    """`value` converted to the form of `values.plain`, which JSON can hold; parts that have this form already stay."""
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {key: _plain(item) for key, item in value.items()}
    return plain(value)


def _json(text: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadTests(f"tests are broken JSON ({error})") from None


def _row(row: Mapping[str, Any]) -> ProgramTests:
    """Tests from a dictionary: `inputs` and `outputs`, a row of LiveCodeBench, HumanEval or MBPP, or any of these forms
    under `input_output` or `tests`. BadTests if it is none."""
    if "inputs" in row and "outputs" in row:
        return _lists(row["inputs"], row["outputs"], row.get("fn_name"))
    if "public_test_cases" in row or "private_test_cases" in row:
        given = [_unpacked(row.get(f"{kind}_test_cases") or "[]") for kind in ("public", "private")]
        return _list(list(chain.from_iterable(given)), _metadata(row))
    if "test" in row and "entry_point" in row:
        name = _text(row["entry_point"], "entry_point")
        calls = calls_of_check(_text(row["test"], "test"), name)
        return ProgramTests(calls=tuple(calls), preamble=_text(row.get("prompt", ""), "prompt"), entry_point=name)
    if "test_list" in row:
        return _mbpp(row)
    if "input_output" in row:
        return _tests(row["input_output"])
    if "tests" in row:
        tests = _tests(row["tests"])
        preamble, entry_point = (_text(row.get(field, ""), field) for field in ("preamble", "entry_point"))
        return msgspec.structs.replace(tests, preamble=preamble, entry_point=entry_point)
    raise BadTests(f"tests are an object with {', '.join(map(repr, row)) or 'nothing'}, of no form that is known")


def _mbpp(row: Mapping[str, Any]) -> ProgramTests:
    """Tests from a row of MBPP: its asserts, with imports (sanitized rows) and setup code (other rows). BadTests if any
    of these is no Python, or an assert has no known form."""
    imports, setup = row.get("test_imports") or "", row.get("test_setup_code") or ""
    texts = {"test_imports": _joined(imports, "test_imports"), "test_setup_code": _text(setup, "test_setup_code")}
    for place, text in texts.items():
        try:
            compile(text, place, "exec", dont_inherit=True)
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            raise BadTests(f"{place} is no Python: {error}") from None
    if not isinstance(asserts := row["test_list"], list | tuple):
        raise BadTests(f"test_list is {type(asserts).__name__}, not a list")
    return ProgramTests(
        calls=tuple([call_of_assert(_text(line, "test_list")) for line in asserts]),
        prelude=texts["test_imports"],
        setup=texts["test_setup_code"],
    )


def _list(tests: object, metadata: Mapping[str, Any]) -> ProgramTests:
    if not isinstance(tests, list):
        raise BadTests(f"tests are {type(tests).__name__}, not a list")
    read = [_test(test, f"test {number}", metadata) for number, test in enumerate(tests, start=1)]
    calls = tuple([test for test in read if isinstance(test, CallTest)])
    prelude = _PRELUDE if calls else _LIMITS
    foreign = not any(isinstance(test, dict) and ("call" in test or "stdin" in test) for test in tests)
    return ProgramTests(
        stdin=tuple([test for test in read if isinstance(test, StdinTest)]),
        calls=calls,
        prelude=prelude if foreign else "",
        alike=foreign,
    )


def _test(test: Any, place: str, metadata: Mapping[str, Any]) -> StdinTest | CallTest:
    match test:
        case {"stdin": str(given), "stdout": str(wanted), **rest} if not rest:
            return StdinTest(stdin=given, stdout=wanted)
        case {"call": str(name), "args": list(arguments), "expected": wanted, **rest} if not rest:
            return CallTest(call=name, args=tuple(arguments), accepted=(wanted,))
        case {"testtype": "functional", "input": str(given), "output": str(wanted)}:
            name = _name(_metadata(test) or metadata, place)
            arguments = [_json(line) for line in given.split("\n") if line.strip()]
            return CallTest(call=name, args=tuple(arguments), accepted=(_json(wanted),))
        case {"type": "function_call", "fn_name": str(name), "input": list(arguments), "output": wanted}:
            return CallTest(call=name, args=tuple(arguments), accepted=_accepted(wanted))
        case {"input": given, "output": wanted} if (
            test.get("testtype", "stdin") == "stdin" and test.get("type", "stdin_stdout") == "stdin_stdout"
        ):
            return StdinTest(stdin=_joined(given, place), stdout=_joined(wanted, place))
    if isinstance(test, str) and test.lstrip().startswith("assert"):
        raise BadTests(f"{place} is an assert; a list of asserts is the field 'test_list' of an object")
    fields = ", ".join(map(repr, test)) if isinstance(test, dict) else type(test).__name__
    raise BadTests(f"{place} has {fields}; needed are 'stdin' and 'stdout', or 'call', 'args' and 'expected'")


def _lists(inputs: object, outputs: object, name: object) -> ProgramTests:
    """Tests from parallel lists of inputs and outputs, in which 1 equals True; BadTests if they are none. With a
    function `name` the inputs are lists of its arguments, and usual imports run before; without (None or "") they are
    texts for standard input."""
    if not isinstance(inputs, list) or not isinstance(outputs, list) or len(inputs) != len(outputs):
        raise BadTests("'inputs' and 'outputs' are not lists of the same length")
    pairs = list(zip(inputs, outputs, strict=True))
    if not name:
        texts = [(_joined(given, "inputs"), _joined(wanted, "outputs")) for given, wanted in pairs]
        return ProgramTests(stdin=tuple(StdinTest(*pair) for pair in texts), prelude=_LIMITS, alike=True)
    name = _text(name, "fn_name")
    if not all(isinstance(given, list) for given, _ in pairs):
        raise BadTests("'inputs' of a function are not lists of arguments")
    calls = [CallTest(call=name, args=tuple(given), accepted=_accepted(wanted)) for given, wanted in pairs]
    return ProgramTests(calls=tuple(calls), prelude=_PRELUDE, alike=True)


def _accepted(wanted: object) -> tuple[Any, ...]:
    """Accepted results of a call: `wanted`, and the item of a list of one. Some rows wrap the result in a list and
    others do not, without any mark, so both readings are accepted."""
    return (wanted, wanted[0]) if isinstance(wanted, list) and len(wanted) == 1 else (wanted,)


def _joined(value: object, place: str) -> str:
    """The text `value`, or the lines of a list joined to one text. Raises BadTests for anything else; `place`: what the
    message calls it."""
    if isinstance(value, list) and all(isinstance(line, str) for line in value):
        return "\n".join(value)
    return _text(value, place)


def _text(value: object, place: str) -> str:
    if not isinstance(value, str):
        raise BadTests(f"{place} is {type(value).__name__}, not a text")
    return value


def _name(metadata: Mapping[str, Any], place: str) -> str:
    name = metadata.get("func_name") or metadata.get("fn_name")
    if not isinstance(name, str):
        raise BadTests(f"{place} is of a function, and no metadata say which (func_name)")
    return name


def _metadata(row: Mapping[str, Any]) -> Mapping[str, Any]:
    metadata = row.get("metadata") or {}
    if isinstance(metadata, str):
        metadata = _json(metadata)
    return metadata if isinstance(metadata, dict) else {}


def _unpacked(given: Any) -> Iterable[object]:
    """List of tests, given as a list, as JSON, or in LiveCodeBench's packing (JSON in a pickle, deflated, base 64).
    BadTests if it is none of these."""
    if isinstance(given, str):
        try:
            given = json.loads(given)
        except (ValueError, RecursionError):
            given = _json(_unpickled_text(given))
    if not isinstance(given, list):
        raise BadTests("public and private test cases are no lists")
    return given


def _unpickled_text(packed: str) -> str:
    try:
        unpacker = zlib.decompressobj()
        content = unpacker.decompress(base64.b64decode(packed, validate=True), _LARGEST_PACKED)
        if unpacker.unconsumed_tail:
            raise BadTests(f"packed tests of more than {_LARGEST_PACKED:,} bytes")
        return _text_of_pickle(content)
    except (ValueError, zlib.error) as error:
        raise BadTests(f"packed tests cannot be read ({error})") from None


def _text_of_pickle(content: bytes) -> str:
    """The text whose pickle `content` is. ValueError for any other pickle: to load one may run code, or take any amount
    of memory."""
    texts = list[str]()
    for operation, argument, _ in islice(pickletools.genops(content), _MOST_OPERATIONS):
        if operation.name in _TEXTS:
            texts.append(str(argument))
        elif operation.name not in _AROUND_TEXTS:
            raise ValueError(f"the pickle of more than a text: it has {operation.name}")
    if len(texts) != 1:
        raise ValueError("not the pickle of one text")
    return texts[0]
