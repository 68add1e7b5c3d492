"""Tests of a program: texts for its standard input, or calls of a function."""

from __future__ import annotations

from typing import Any

from stretto_verify.verdicts import Record


class StdinTest(Record, frozen=True):
    """Input of the program and the expected output. Example: ``StdinTest(stdin="3 8\\n", stdout="11\\n")``"""

    stdin: str
    stdout: str


class CallTest(Record, frozen=True):
    """A function call and its accepted results, in the form of `sandbox.values.plain`. The test passes if one of
    `accepted` is returned.

    Example: ``CallTest(call="add", args=(3, 8), accepted=(11,))``
    """

    call: str
    args: tuple[Any, ...]
    accepted: tuple[Any, ...]
    within: float | None = None  #: largest distance of a number from the accepted one; None: that of `same_value`


class ProgramTests(Record, frozen=True):
    """All tests of one question, with further source texts; `code.reward.program_of` puts them around the program."""

    stdin: tuple[StdinTest, ...] = ()
    calls: tuple[CallTest, ...] = ()
    prelude: str = ""  #: imports that run before the program
    preamble: str = ""  #: text that the completion continues: imports, helpers, and the head of `entry_point`
    entry_point: str = ""
    alike: bool = False  #: whether values that are equal in Python count as the same: 1 and True
    setup: str = ""  #: code of the tests that runs after the program and before the calls

    @property
    def count(self) -> int:
        return len(self.stdin) + len(self.calls)
