"""Tests of a program: texts for its standard input, or calls of a function."""

from __future__ import annotations

from typing import Any

from stretto_verify.verdicts import Record


class StdinTest(Record, frozen=True):
    """Input of the program and the expected output. Example: ``StdinTest(stdin="3 8\\n", stdout="11\\n")``"""

    stdin: str
    stdout: str


class CallTest(Record, frozen=True):
    """A call and its accepted results, in the form of `sandbox.values.plain`.

    Example: ``CallTest(call="add", args=(3, 8), accepted=(11,))``
    """

    call: str
    args: tuple[Any, ...]
    accepted: tuple[Any, ...]
    within: float | None = None  #: how far a number may be from the accepted one; None: as far as `same_value` allows


class ProgramTests(Record, frozen=True):
    """All tests of one question: see `code.program_of` for the texts."""

    stdin: tuple[StdinTest, ...] = ()
    calls: tuple[CallTest, ...] = ()
    prelude: str = ""  #: names that a completion may use without importing them
    preamble: str = ""  #: text that the completion continues: imports, helpers, and the head of `entry_point`
    entry_point: str = ""
    alike: bool = False  #: whether values that Python calls equal are the same, as where the tests are from: 1 and True
    setup: str = ""  #: code of the tests that runs after the program and before the calls

    @property
    def count(self) -> int:
        return len(self.stdin) + len(self.calls)
