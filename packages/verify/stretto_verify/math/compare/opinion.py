"""Fallback to math-verify, for forms that the strict reader does not know.

math-verify reads far more forms but is easier to mislead: it drops unreadable text, rounds to six decimals even for
tiny numbers, and falls back to an earlier formula. So it is used last, on the final answer alone, and only if it
understands every sign of it. Its acceptance is checked numerically where possible. A change of any number or word of
the answer must change what math-verify reads.
"""

from __future__ import annotations

import logging
import re
from functools import lru_cache
from typing import Any

import sympy
from math_verify import parse, verify

from stretto_verify.math.compare.equality import same_value
from stretto_verify.math.limits import check_symbolic
from stretto_verify.math.parse.structure import Unreadable

logging.getLogger("math_verify").setLevel(logging.CRITICAL)  # it warns that its time limits are off; ours are on
_LONGEST = 2_000
_WORD = re.compile(r"(?<![\\a-zA-Z])(?<!\\begin\{)(?<!\\end\{)[a-zA-Z]{2,}")
_PART = re.compile(r"(?<![\\a-zA-Z])(?<!\\begin\{)(?<!\\end\{)[a-zA-Z]+|[0-9]+")
_NUMBER = re.compile("[0-9]+")
_FUNCTIONS = (
    "frac|sqrt|pi|theta|alpha|beta|sin|cos|tan|cot|sec|csc|arcsin|arccos|arctan|sinh|cosh|tanh|log|ln|exp|binom"
)
_UNDERSTOOD = re.compile(
    r"(?:[\s0-9a-zA-Z.,+\-*/^=<>\[\])|!%$&:}]|(?<=[a-zA-Z])'|\((?!\s*\))|\{(?!\s*\})|(?<![0-9}])(?<![0-9}]\s)_|\\[%}\\]|\\\{(?!\s*\\\})"
    rf"|\\(?:{_FUNCTIONS}|infty|cup|le|ge|neq|begin|end|text|emptyset|mathbb|[lr]floor|[lr]ceil)(?![a-zA-Z])"
    r"|\\(?:cdot|times)(?![a-zA-Z]|\s*\\)|\\in(?=\s*[\[({\\])|\^\s*\{?\\circ|(?<=\\mathbb\{R\})\s*\\setminus(?=\s*\\\{))*"
)
_TRUNCATED = re.compile(
    r"\\[lc]?dots|\.\.\.|…|[0-9a-z]\s*:\s*[0-9a-z].*:|\\text\{[^{}]*$|(?:[-+*/^=<>]|\\(?:cdot|times|div|pm|neq?|leq?|geq?|approx|in|cup|cap))\s*\$?$"
    r"|^(?!.*\\begin).*&|^[^|{]*\|[^|{]*(?:\|[^|]*\|[^|]*)*$"
)


def accepts(gold: str, answer: str) -> bool:
    """Whether math-verify accepts `answer` for `gold`, has read every number and word of it, and their values do not
    contradict it. False also if `answer` has a word that `gold` lacks.

    Raises:
        Undecided: an expression may grow without bound.
        Unreadable: math-verify cannot read one of them.
    """
    if not {*_WORD.findall(answer)} <= {*_WORD.findall(gold)}:
        return False  # a result read from a word that the gold answer lacks is not in the gold answer
    one, other = parsed_whole(gold), parsed(answer)
    if gold.count("'") != answer.count("'"):
        return False  # math-verify drops primes
    if not verify(one, other, timeout_seconds=None) or not same_parsed(one[0], other[0]):
        return False
    return all(_is_read(part, answer, other[0]) for part in _PART.finditer(answer))


def _is_read(part: re.Match[str], text: str, found: object) -> bool:
    """Whether math-verify has read this part of the text: with another number or word in its place, the text cannot be
    read, or gives another result than `found`."""
    other = str(int(part[0]) + 1) if part[0].isdigit() else "q" if part[0] != "q" else "r"
    changed: list[Any] = parse(text[: part.start()] + other + text[part.end() :], parsing_timeout=None)
    return not changed or bool(changed[0] != found)


def parsed_whole(text: str) -> list[Any]:
    """Expressions, at least one, that math-verify finds in a gold answer.

    Raises:
        Undecided: an expression may grow without bound.
        Unreadable: math-verify cannot read the text, or leaves out one of its numbers.
    """
    found = parsed(text)
    if not all(_is_read(part, text, found[0]) for part in _NUMBER.finditer(text)):
        raise Unreadable(f"a number in {text[:60]!r} that is not read")
    return found


def same_parsed(one: object, other: object) -> bool:
    """Whether two expressions that math-verify found do not differ in value. True if this cannot be checked: for
    floats, undetermined values, and anything that is no expression."""
    if isinstance(one, sympy.Expr) and isinstance(other, sympy.Expr):
        if one.has(sympy.Float) or other.has(sympy.Float):
            return True
        return same_value(one, other) is not False
    return True


@lru_cache(maxsize=1024)
def parsed(text: str) -> list[Any]:
    """Parse a text with math-verify: the expressions that it finds, at least one.

    Raises:
        Undecided: an expression may grow without bound.
        Unreadable: math-verify finds none, the text is too long or cut off, or it has a sign that math-verify drops.
    """
    if len(text) > _LONGEST or _TRUNCATED.search(text) or _UNDERSTOOD.fullmatch(text) is None:
        raise Unreadable("a sign that is not understood, an ellipsis, a proportion, or too much text")
    check_symbolic(text)
    found: list[Any] = parse(text, parsing_timeout=None)
    if not found or isinstance(found[0], str):
        raise Unreadable(f"cannot read {text[:60]!r}")
    return found
