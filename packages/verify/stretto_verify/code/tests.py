"""Tests of a program: texts for its standard input, or calls of a function, also if they are written as Python asserts
(HumanEval, MBPP).

A program can fool an assert that runs in its own process: by an object that equals everything, or by an early exit. It
cannot fool a comparison of its result in another process. So ``assert candidate([1, 2]) == 3`` becomes the call
``f([1, 2])`` and the expected result 3; ``assert abs(candidate(2) - 1.41) < 0.01`` becomes a call, a result and a
tolerance. Asserts of another form are refused, never dropped.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Iterator
from typing import Any

from stretto_verify.sandbox.values import plain
from stretto_verify.verdicts import Record, Undecided


class StdinTest(Record, frozen=True):
    """Input of the program and the expected output. Example: ``StdinTest(stdin="3 8\\n", stdout="11\\n")``"""

    stdin: str
    stdout: str


class CallTest(Record, frozen=True):
    """A function call and its accepted results, in the form of `sandbox.values.plain`. The test passes if one of
    `accepted` is returned. `within`: largest distance of a number from it; None: that of `same_value`.

    Example: ``CallTest(call="add", args=(3, 8), accepted=(11,))``
    """

    call: str
    args: tuple[Any, ...]
    accepted: tuple[Any, ...]
    within: float | None = None


class ProgramTests(Record, frozen=True):
    """All tests of one question, and texts that `code.reward.program_of` puts around the program: `prelude` (imports),
    `preamble` (to the head of `entry_point`, continued by the completion), `setup` before the calls. `alike`: 1 is
    True."""

    stdin: tuple[StdinTest, ...] = ()
    calls: tuple[CallTest, ...] = ()
    prelude: str = ""  #: imports and limits, run before the program
    preamble: str = ""  #: text that the completion continues: imports, helpers, and the head of `entry_point`
    entry_point: str = ""  #: name of the function whose head ends `preamble`
    alike: bool = False  #: whether values that are equal in Python count as the same: 1 and True
    setup: str = ""  #: code of the tests that runs after the program and before the calls

    @property
    def count(self) -> int:
        return len(self.stdin) + len(self.calls)


class BadTests(Undecided):
    """The tests cannot be read, so no completion can be judged by them."""


def calls_of_check(source: str, entry_point: str) -> Iterator[CallTest]:
    """Yield the tests in the asserts of HumanEval's ``def check(candidate): ...``, as calls of `entry_point`. ``assert
    True``, ``pass`` and docstrings are skipped.

    Raises (while iterated):
        BadTests: `source` is no Python, has no function `check`, or another statement of it does not say that a call
            equals a literal (``candidate(...) == ...``) or is close to one (``abs(candidate(...) - x) < y``).
    """
    checks = [node for node in _parsed(source).body if isinstance(node, ast.FunctionDef) and node.name == "check"]
    if not checks:
        raise BadTests("'test' defines no function check(candidate)")
    for statement in checks[-1].body:
        match statement:
            case ast.Assert():
                if (test := _test(statement, {"candidate": entry_point})) is not None:
                    yield test
            case ast.Pass() | ast.Expr(value=ast.Constant()):  # a docstring
                continue
            case _:
                raise BadTests(f"'test' does more than to assert: {ast.unparse(statement)[:80]}")


def call_of_assert(line: str) -> CallTest:
    """Parse one assert of MBPP into a test.

    Raises:
        BadTests: it is no Python, or does not assert that a call equals a literal (``assert f(...) == ...``) or is
            close to one (``assert abs(f(...) - x) < y``).
    """
    match _parsed(line).body:
        case [ast.Assert() as statement]:
            if (test := _test(statement, {})) is not None:
                return test
    raise BadTests(f"not of the form 'assert f(...) == ...': {line[:80]}")


def _test(statement: ast.Assert, names: dict[str, str]) -> CallTest | None:
    """Parse one assert (``f(...) == literal`` or ``abs(f(...) - x) < y``) into a test; None for HumanEval's ``assert
    True``; BadTests for another form. `names`: the function to call, by its name in the assert; if empty, any function
    is called by its own name."""
    match statement.test:
        case ast.Compare(left=ast.Call() as call, ops=[ast.Eq() | ast.Is()], comparators=[wanted]):
            return _call(call, _value(wanted, statement), names, statement)
        case ast.Compare(left=wanted, ops=[ast.Eq()], comparators=[ast.Call() as call]):
            return _call(call, _value(wanted, statement), names, statement)
        case ast.Compare(
            left=ast.Call(
                func=ast.Name(id="abs"), args=[ast.BinOp(left=ast.Call() as call, op=ast.Sub(), right=wanted)]
            ),
            ops=[ast.Lt() | ast.LtE() as order],
            comparators=[most],
        ):
            middle, within = _number(wanted, statement), _number(most, statement)
            # "Less than a number" means at most the float before it.
            within = math.nextafter(within, -math.inf) if isinstance(order, ast.Lt) else within
            return _call(call, middle, names, statement, within)
        case ast.Constant(value=True):
            return None
    raise _strange(statement)


def _call(
    call: ast.Call, wanted: Any, names: dict[str, str], statement: ast.Assert, within: float | None = None
) -> CallTest:
    if not isinstance(call.func, ast.Name) or call.keywords or (names and call.func.id not in names):
        raise _strange(statement)
    arguments = [_value(argument, statement) for argument in call.args]
    name = names.get(call.func.id, call.func.id)
    return CallTest(call=name, args=tuple(arguments), accepted=(wanted,), within=within)


def _value(node: ast.expr, statement: ast.Assert) -> Any:
    """Value of a literal, in the form of `plain`; BadTests for anything else, such as ``1j`` or a name."""
    try:
        return plain(ast.literal_eval(node))
    except (ValueError, TypeError, RecursionError, MemoryError):
        raise _strange(statement) from None


def _number(node: ast.expr, statement: ast.Assert) -> float:
    value = _value(node, statement)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _strange(statement)
    return value


def _strange(statement: ast.Assert) -> BadTests:
    shown = ast.unparse(statement)[:80]
    return BadTests(f"an assert that is no comparison of a call with a literal: {shown}")


def _parsed(source: str) -> ast.Module:
    try:
        return ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise BadTests(f"tests are no Python: {error}") from None
