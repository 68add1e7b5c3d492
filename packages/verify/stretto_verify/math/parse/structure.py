"""Structures of final answers: what the parser returns and the comparison takes, and the check that a structure
contains every candidate of its text.

A *candidate* is anything that could be an answer by itself: a digit, the letter of a choice, a stance (yes, false), a
formula. Words may be skipped, since answers are embedded in sentences and numbers have units. Candidates must not be
skipped: a text with a candidate that its structure lacks is no answer.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from fractions import Fraction

from stretto_verify.math.parse.spelling import compact

_COMMAND = re.compile(r"\\[a-zA-Z]+")
_ARTICLE = re.compile(r"^\s*(?:an?|the)\s+(?=[a-z]{2})", re.IGNORECASE)


class Unreadable(Exception):
    """The form of the text is unknown."""


class LeftOver(Unreadable):
    """The text has a part outside the parsed structure that could be an answer too."""


@dataclass(frozen=True)
class Scalar:
    """One expression in LaTeX. `scale`: factor of a word after it (percent, million). `unit`: its canonical name, ""
    without a known one. `beside`: texts parsed with it that have no value of their own, such as an approximation."""

    latex: str
    scale: Fraction = Fraction(1)
    unit: str = ""
    beside: tuple[str, ...] = ()


@dataclass(frozen=True)
class Words:
    """An answer in words."""

    text: str


@dataclass(frozen=True)
class Letter:
    """Letter of a choice, with its content: ``(A) 5``."""

    letter: str
    content: Node


@dataclass(frozen=True)
class Dots:
    """An ellipsis between the items of a list."""


@dataclass(frozen=True)
class Listing:
    """Items in brackets: ``(`` tuple or open end, ``[`` closed end, ``{`` set; "" for a list without brackets."""

    opening: str
    closing: str
    items: tuple[Node, ...]

    @property
    def ordered(self) -> bool:
        return self.opening not in ("", "{")


@dataclass(frozen=True)
class Relation:
    """Sides of ``a = b`` or ``a < b <= c``, and the signs between them in LaTeX, one fewer. `beside`: as in
    `Scalar`."""

    sides: tuple[Node, ...]
    signs: tuple[str, ...]
    beside: tuple[str, ...] = ()


@dataclass(frozen=True)
class Union:
    """Sets or intervals joined by a union sign."""

    parts: tuple[Node, ...]


@dataclass(frozen=True)
class Matrix:
    """A matrix as rows of cells."""

    rows: tuple[tuple[Node, ...], ...]


@dataclass(frozen=True)
class Ratio:
    """``a : b : c``, or a time of day: ``12:30``."""

    parts: tuple[Node, ...]


Node = Scalar | Words | Letter | Dots | Listing | Relation | Union | Matrix | Ratio


def letters(given: Node | str) -> str:
    """Letters and digits of an answer in words, in lower case, for comparison; empty for other nodes than words and
    scalars."""
    if isinstance(given, Words | Scalar):
        given = given.text if isinstance(given, Words) else given.latex
    text = given if isinstance(given, str) else ""
    return re.sub(r"[^a-z0-9]", "", _COMMAND.sub("", compact(_ARTICLE.sub("", text))).lower())


_STANCE = r"yes|no|true|false"
_CANDIDATE = re.compile(rf"[0-9]|(?<![A-Za-z'])[A-J](?![A-Za-z'])|(?<![A-Za-z])(?:{_STANCE})(?![A-Za-z])")
_ARTICLE_OR_I = re.compile(r"(?<![A-Za-z])(?:A(?= [a-z]{2})|I(?= [a-z]|'))")
_FORMULA = re.compile(r"[$\\=<>^]")
_CALLED = r"\s*(?:\\(?:triangle|angle)\s*)?(?:[a-zK-Z](?:_?[a-z])?|[A-Z]{2,12}|[a-zA-Z]\([a-z]\))\s*"
_NAME = re.compile(rf"\${_CALLED}\$|\\\({_CALLED}\\\)")


def says_nothing(words: str) -> bool:
    """Whether the words around an answer contain no other candidate.

    >>> says_nothing("apples in all, as $n$"), says_nothing("or 43"), says_nothing("or (B)"), says_nothing("A total of")
    (True, False, False, True)
    """
    words = _NAME.sub(" ", words)
    return _FORMULA.search(words) is None and not candidates(words)


def candidates(text: str) -> Counter[str]:
    """Number of occurrences of each digit, choice letter and stance (yes, no, true, false) in a text."""
    return Counter(_CANDIDATE.findall(_ARTICLE_OR_I.sub(" ", _COMMAND.sub(" ", text))))


def accounts_for(given: Node, text: str) -> bool:
    """Whether the structure `given` contains every candidate of the text that it was parsed from."""
    return candidates(text) <= candidates(" | ".join(texts(given)))  # no "A base 16" with an article


def texts(given: Node) -> list[str]:
    """Texts of all parts of a structure, in order: LaTeX of numbers, units, words, letters. Some may be empty."""
    match given:
        case Scalar(latex=latex, unit=unit, beside=beside):
            return [latex, unit, *beside]
        case Words(text=text):
            return [text]
        case Letter(letter=letter, content=content):
            return [letter, *texts(content)]
        case Listing(items=parts) | Union(parts=parts) | Ratio(parts=parts):
            return [text for part in parts for text in texts(part)]
        case Relation(sides=sides, beside=beside):
            return [*(text for side in sides for text in texts(side)), *beside]
        case Matrix(rows=rows):
            return [text for row in rows for cell in row for text in texts(cell)]
        case Dots():
            return []
