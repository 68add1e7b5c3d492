"""Structures of final answers: what the parser returns and the comparison takes."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

from stretto_verify.math.parse.spelling import compact

_COMMANDS = re.compile(r"\\[a-zA-Z]+")
_ARTICLE = re.compile(r"^\s*(?:an?|the)\s+(?=[a-z]{2})", re.IGNORECASE)


class Unreadable(Exception):
    """The form of the text is unknown."""


class LeftOver(Unreadable):
    """The text has a part outside the parsed structure that could be an answer too."""


@dataclass(frozen=True)
class Scalar:
    """One expression in LaTeX. `scale`: factor of a word after it (percent, million). `beside`: texts parsed with it
    that have no value of their own, such as an approximation."""

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
    """Sides of ``a = b`` or ``a < b <= c``, and the signs between them. `beside`: as in `Scalar`."""

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
    text = given if isinstance(given, str) else given.text if isinstance(given, Words) else _source(given)
    return re.sub(r"[^a-z0-9]", "", _COMMANDS.sub("", compact(_ARTICLE.sub("", text))).lower())


def _source(given: Node) -> str:
    return given.latex if isinstance(given, Scalar) else ""
