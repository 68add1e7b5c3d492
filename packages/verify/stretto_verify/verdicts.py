"""Verdicts, and the errors of this package."""

from __future__ import annotations

from typing import Literal

import msgspec


class Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    """Base of all records: immutable, and refuses unknown fields."""


class Judged(Record, frozen=True):
    """Verdict on one completion.

    Attributes:
        verdict: "right", "wrong" or "undecided". Undecided says nothing about the completion: the gold answer or the
            tests cannot be read, or the judging itself failed or was late. Never count it as wrong.
        reason: why it is wrong or undecided; empty if it is right.
    """

    verdict: Literal["right", "wrong", "undecided"]
    reason: str = ""

    @property
    def right(self) -> bool:
        return self.verdict == "right"


class Undecided(Exception):
    """Raised by a reward function that cannot give a verdict. The message is the reason that the run records."""


class SandboxRefused(Exception):
    """No sandbox that is safe enough can be made on this machine. `found`: what was tried; `remedy`: what helps."""

    def __init__(self, found: str, remedy: str) -> None:
        self.found, self.remedy = found, remedy
        super().__init__(f"{found}; {remedy}")
