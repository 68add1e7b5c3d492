"""Limits of the computation: texts that are refused before anything is computed, and time.

``9^{9^{9^{9}}}`` has fourteen characters and cannot be evaluated. A hanging worker would be killed, but that takes a
second for each of perhaps a thousand such completions. So texts are checked first, and every evaluation is limited by
`LARGEST_EXPONENT` and `LARGEST_INTEGER`.
"""

from __future__ import annotations

import gc
import re
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from stretto_verify.verdicts import Undecided

LONGEST_COMPLETION: Final = 1 << 20  # characters of a whole completion
LONGEST_TAIL: Final = 20_000  # characters at its end in which the final answer is searched
LONGEST_PIECE: Final = 2_000  # characters of a final answer
DEEPEST: Final = 40  # brackets within brackets
LONGEST_NUMBER: Final = 1_000  # digits in a row
LONGEST_WORD: Final = 60  # letters in a row
MOST_OPERATIONS: Final = 200  # signs and commands
LARGEST_EXPONENT: Final = 1 << 34  # bits of a number's magnitude while it is approximate
LARGEST_INTEGER: Final = 1 << 17  # bits of a number that is computed exactly
_LARGEST_POWER: Final = 64  # largest exponent that the symbolic fallback may expand

SECONDS: Final = 0.5  # of processor time for one comparison; most take a hundredth of it
_AGAIN: Final = 0.05  # seconds between repeated signals, since a library may swallow one

_DIGITS = re.compile(rf"[0-9]{{{LONGEST_NUMBER + 1}}}")
_LETTERS = re.compile(rf"[a-zA-Z]{{{LONGEST_WORD + 1}}}")
_OPERATION = re.compile(r"[-+*/|^!]|\\[a-zA-Z]+")
_TOWER = re.compile(r"(?:\^[\s{(]*[^\s{}()^+*/=,-]{1,9}[\s})]*){5}|(?:\^\s*\{[^{}^]{0,9}){5}")
_UNBOUNDED = re.compile(
    r"\\(?:sum|prod|int|iint|oint|lim|binom|tbinom|dbinom)(?![a-z])|[0-9})\]]\s*!|\^\s*\{?[^{}]*\^|\^\s*\{?\s*\(?[a-z0-9]*\^"
)
# The LaTeX parser evaluates these functions while it parses.
_COMPUTED = re.compile(r"\\(?:[dt]?binom|det|gcd|lcm|text\s*\{\s*(?:gcd|lcm|det|rank)|operatorname)(?![a-z])")
_MANY = re.compile(r"[0-9]{6}|\^|&.*&.*&.*&.*&.*&.*&.*&.*&", re.DOTALL)
_POWER = re.compile(r"\^\s*[{(]?\s*-?\s*([0-9]+)")


class TooLong(BaseException):
    """The time limit was exceeded. A BaseException, so that no library catches it."""


@contextmanager
def limited_time(seconds: float = SECONDS) -> Iterator[None]:
    """Limit the CPU seconds of the block (context manager). Only the main thread gets signals, and so has a limit.

    Garbage collection is paused, since a collection of the whole process could exceed the limit and fail a right
    answer.

    A signal during a weak reference callback or finalizer has no effect: Python reports the exception and drops it. The
    report is suppressed, and the next signal ends the block.

    Raises:
        TooLong: the limit was exceeded.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(*_: object) -> None:
        raise TooLong

    report = sys.unraisablehook

    def report_others(dropped: sys.UnraisableHookArgs) -> None:
        if dropped.exc_type is not TooLong:
            report(dropped)

    before, collecting = signal.signal(signal.SIGVTALRM, stop), gc.isenabled()
    sys.unraisablehook = report_others
    gc.disable()
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds, _AGAIN)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)
        sys.unraisablehook = report
        if collecting:
            gc.enable()


def check_piece(text: str) -> None:
    """Check that a final answer is small enough to be parsed.

    Raises:
        Undecided: it is too large; the reason names the limit.
    """
    if len(text) > LONGEST_PIECE:
        raise Undecided(f"a final answer of {len(text):,} characters; at most {LONGEST_PIECE:,} are read")
    if _DIGITS.search(text):
        raise Undecided(f"a number of more than {LONGEST_NUMBER:,} digits")
    if _LETTERS.search(text):
        raise Undecided(f"more than {LONGEST_WORD} letters in a row")
    if _TOWER.search(text):
        raise Undecided("a tower of powers")
    if _COMPUTED.search(text) and _MANY.search(text):
        raise Undecided("a function of numbers that are too large to compute")
    if (deep := depth(text)) > DEEPEST:
        raise Undecided(f"brackets {deep} deep; at most {DEEPEST} are read")
    if (operations := len(_OPERATION.findall(text))) > MOST_OPERATIONS:
        raise Undecided(f"{operations} signs and commands; at most {MOST_OPERATIONS} are read")


def check_symbolic(text: str) -> None:
    """Check that the symbolic fallback, which expands and simplifies, can handle this text.

    Raises:
        Undecided: an expression in it can grow without bound.
    """
    if _UNBOUNDED.search(text) or any(int(power) > _LARGEST_POWER for power in _POWER.findall(text)):
        raise Undecided("an expression that may grow without bound")


def depth(text: str) -> int:
    """Deepest nesting of brackets of any kind; 0 without brackets."""
    deepest = level = 0
    for letter in text:
        if letter in "([{":
            level += 1
            deepest = max(deepest, level)
        elif letter in ")]}":
            level -= 1
    return deepest
