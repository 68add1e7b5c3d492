r"""The structure of a final answer: lists, tuples, intervals, relations, matrices, ratios, words, and scalars.

Structure is read here, since it decides what is right: whether order counts, whether an end belongs to an interval.
What has no structure is a `Scalar`, and math-verify's own LaTeX parser reads it, when somebody asks for its value.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import Final

import sympy
from latex2sympy2_extended.latex2sympy2 import ConversionConfig, latex2sympy

from stretto.rewards.math_limits import check_piece
from stretto.rewards.math_spelling import closing_at, compact, spelled
from stretto.rewards.math_units import without_unit


class Unreadable(Exception):
    """Not a form that this file knows."""


@dataclass(frozen=True)
class Scalar:
    """One expression, with what stood behind it."""

    latex: str
    percent: bool = False
    unit: str = ""


@dataclass(frozen=True)
class Words:
    """A text answer: its letters and digits."""

    text: str


@dataclass(frozen=True)
class Choice:
    """The letter of a choice, with what is to be chosen: ``(A) 5``."""

    letter: str
    content: Node


@dataclass(frozen=True)
class Dots:
    """An ellipsis between the items of a list."""


@dataclass(frozen=True)
class Listing:
    """Items in brackets: ``(`` tuple or open end, ``[`` closed end, ``{`` set, nothing for a bare list."""

    opening: str
    closing: str
    items: tuple[Node, ...]

    @property
    def ordered(self) -> bool:
        return self.opening not in ("", "{")


@dataclass(frozen=True)
class Relation:
    """``a = b``, ``a < b <= c``: sides, and the signs between them."""

    sides: tuple[Node, ...]
    signs: tuple[str, ...]


@dataclass(frozen=True)
class Union:
    """Parts joined by a union sign."""

    parts: tuple[Node, ...]


@dataclass(frozen=True)
class Matrix:
    """Rows of cells."""

    rows: tuple[tuple[Node, ...], ...]


@dataclass(frozen=True)
class Ratio:
    """``a : b : c``, or a time of day."""

    parts: tuple[Node, ...]


Node = Scalar | Words | Choice | Dots | Listing | Relation | Union | Matrix | Ratio

_SIGNS: Final = re.compile(r"\\Rightarrow|\\approx|\\equiv|\\neq|\\le(?![a-z])|\\ge(?![a-z])|\\in(?![a-z])|[=<>]")
_MATRIX = re.compile(r"\\begin\{([pbvBV]?matrix|array)\}(?:\{[lcr|]*\})?(.*)\\end\{\1\}", re.DOTALL)
_GROUPED = re.compile(r"[+-]?[0-9]{1,3}(?:,[0-9]{3})+(?:\.[0-9]+)?|[+-]?[0-9]{1,3}(?: [0-9]{3})+(?:\.[0-9]+)?")
_DECIMAL = re.compile(r"([+-]?)\s*([0-9]+)(?:\.([0-9]*))?")
_FRACTION = re.compile(r"([+-]?)\s*(?:\\frac\{\s*(-?[0-9]+)\s*\}\{\s*(-?[0-9]+)\s*\}|([0-9]+)\s*/\s*([0-9]+))")
_MIXED = re.compile(r"([+-]?)\s*([0-9]+)\s+([0-9]+)\s*/\s*([0-9]+)")
_TEXT = re.compile(r"\(?\\text\{([^{}]*)\}\)?")
_PLAIN_WORDS = re.compile(r"[A-Za-z][A-Za-z'-]*(?:[ ,]+[A-Za-z][A-Za-z'-]*)*")
_CHOICE = re.compile(r"(?:\\text\{\s*\(?([A-J])[).:]*\s*\}|\(([A-J])\))\s*[:.]?\s*([^\s,)}].*)", re.DOTALL)
_REALS: Final = (r"\mathbb{R}", r"\mathbf{R}", r"\Bbb{R}", r"\R", "all real numbers", r"\text{all real numbers}")
_COMMANDS = re.compile(r"\\[a-zA-Z]+")
_NOT_READ = re.compile(r"(?<![0-9] )(?<![0-9])\\ldots|\\text\{[^{}]*[^{}a-zA-Z\s][^{}]*\}|_\{[^{}]*,|(?<![0-9a-zA-Z)}])\s*[*/]|[!]{2}")
_DEGREES = re.compile(r"([0-9.]+)\s*\^\s*\{?\\circ\}?")
_TRIGONOMETRIC = re.compile(r"\\(?:sin|cos|tan|cot|sec|csc)(?![a-z])")
_REPEATING = re.compile(r"([+-]?)([0-9]+)\.([0-9]*?)(?:\\(?:overline|bar|dot)\s*\{?([0-9]+)\}?|([0-9]{1,3}?)\5{2,}\s*\\ldots)")
_KEEP_CASE = ConversionConfig(lowercase_symbols=False)


@lru_cache(maxsize=4096)
def read(piece: str) -> Node:
    """The structure of a final answer as it was written.

    Raises:
        Undecided: it is beyond the limits.
        Unreadable: it has no form that is known here.
    """
    check_piece(piece)
    return node(spelled(piece))


def node(text: str) -> Node:
    """The structure of a spelled text."""
    text = _outer(text)
    if not text:
        raise Unreadable("nothing")
    if text == r"\ldots":
        return Dots()
    if text in _REALS:
        return Listing("(", ")", (Scalar(r"-\infty"), Scalar(r"\infty")))
    if (chosen := _CHOICE.fullmatch(text)) is not None:
        return Choice(chosen[1] or chosen[2], node(chosen[3]))
    if _GROUPED.fullmatch(text):
        return Scalar(re.sub(r"[ ,]", "", text))
    if (found := _MATRIX.fullmatch(text)) is not None and r"\begin" not in found[2]:
        rows = [row for row in re.split(r"\\\\(?:\[[^\]]*\])?", found[2]) if row.strip()]
        return Matrix(tuple(tuple(node(cell) for cell in split(row, "&")) for row in rows))
    if (words := _words(text)) is not None:
        return words
    items = [item for item in split(text, ",;") if item.strip()]
    if len(items) > 1:
        return _list("", "", items)
    if (relation := _relation(text)) is not None:
        return relation
    parts = _split_on(text, r"\cup")
    if len(parts) > 1:
        return Union(tuple(map(node, parts)))
    if (bracketed := _bracketed(text)) is not None:
        return bracketed
    if r"\pm" in text:
        return Listing("", "", tuple(node(text.replace(r"\pm", sign, 1).lstrip("+ ")) for sign in ("+", "-")))
    parts = split(text, ":")
    if len(parts) > 1:
        return Ratio(tuple(map(node, parts)))
    return _scalar(text)


def _outer(text: str) -> str:
    """Without edges, and without braces that only group."""
    text = text.strip(" ,;:\n\t").rstrip(" .,;:\n\t")
    while text.startswith("{") and closing_at(text, 0) == len(text) - 1:
        text = text[1:-1].strip()
    return text


def _words(text: str) -> Words | None:
    if (found := _TEXT.fullmatch(text)) is not None:
        return Words(found[1])
    bare = text[1:-1] if text.startswith("(") and text.endswith(")") else text
    if _PLAIN_WORDS.fullmatch(bare) and any(len(word) > 2 for word in re.split(r"[ ,]+", bare)) and "\\" not in bare:
        return Words(bare)
    return None


def _list(opening: str, closing: str, items: Iterable[str]) -> Node:
    """A list; ``x = 1, 2, 3`` is one relation whose right side is the list."""
    nodes = [node(item) for item in items]
    first, *rest = nodes
    if isinstance(first, Relation) and first.signs[-1] in ("=", r"\in") and rest:
        if not any(isinstance(other, Relation | Dots) for other in rest) and not opening:
            return Relation((*first.sides[:-1], Listing("", "", (first.sides[-1], *rest))), first.signs)
    flat: list[Node] = []
    for part in nodes:
        flat.extend(part.items if isinstance(part, Listing) and not part.opening else [part])
    return Listing(opening, closing, tuple(flat))


def _relation(text: str) -> Node | None:
    at, sides, signs, level = 0, [], [], 0
    position = 0
    while position < len(text):
        letter = text[position]
        level += (letter in "([{") - (letter in ")]}")
        found = _SIGNS.match(text, position) if level == 0 else None
        if found is None:
            position += 1
            continue
        sides.append(text[at : found.start()])
        signs.append(found[0])
        at = position = found.end()
    if not signs:
        return None
    sides.append(text[at:])
    if r"\Rightarrow" in signs:
        last = len(signs) - 1 - signs[::-1].index(r"\Rightarrow")
        sides, signs = sides[last + 1 :], signs[last + 1 :]
        return node(sides[0]) if not signs else _made(sides, signs)
    return _made(sides, signs)


def _made(sides: list[str], signs: list[str]) -> Node:
    """``x = √2 ≈ 1.41`` says √2; ``x ≈ 1.41`` says 1.41."""
    if r"\approx" in signs[1:]:
        first = signs.index(r"\approx", 1)
        sides, signs = sides[: first + 1], signs[:first]
    elif signs[0] == r"\approx" and len(signs) == 1 and not re.search("[a-zA-Z]", _COMMANDS.sub("", sides[0])):
        return node(sides[0])
    signs = ["=" if sign == r"\approx" else sign for sign in signs]
    if not sides[0].strip():
        sides, signs = sides[1:], signs[1:]
        if not signs:
            return node(sides[0])
    if not all(side.strip() for side in sides):
        raise Unreadable("a relation without a side")
    return Relation((*[_side(side) for side in sides[:-1]], node(sides[-1])), tuple(signs))


def _side(text: str) -> Node:
    """A side that is not the last may be anything: it only gives the last a name."""
    try:
        return node(text)
    except Unreadable:
        return Words(text)


def _bracketed(text: str) -> Node | None:
    is_set = text.startswith(r"\{")
    start = 1 if is_set else 0
    if text[start : start + 1] not in ("(", "[", "{") or closing_at(text, start) != len(text) - 1:
        return None
    inner = text[start + 1 : -2] if is_set else text[1:-1]
    bar = re.search(r"\\mid(?![a-z])|(?<!\\)\|", inner) if is_set else None
    if bar is not None and "|" not in inner[bar.end() :]:
        return node(inner[bar.end() :])
    items = split(inner, ",;")
    if is_set:
        return _list("{", "}", items) if inner.strip() else Listing("{", "}", ())
    if len(items) > 1 and all(item.strip() for item in items):
        return _list(text[0], text[-1], items)
    if text[-1] == {"(": ")", "[": "]"}[text[0]]:
        return node(inner)
    raise Unreadable("brackets that do not belong together")


def _scalar(text: str) -> Scalar:
    body, unit = without_unit(text)
    percent = body.endswith("%")
    body = _outer(body.rstrip("% "))
    if r"^\circ" in body:
        body = _DEGREES.sub(r"{(\1\\cdot\\pi/180)}" if _TRIGONOMETRIC.search(body) else r"\1", body)
    if _GROUPED.fullmatch(body):
        body = re.sub(r"[ ,]", "", body)
    if not body or "%" in body or _NOT_READ.search(body):
        raise Unreadable(f"cannot read {text!r}")
    return Scalar(body, percent, unit)


def split(text: str, separators: str) -> list[str]:
    """At separators outside of all brackets."""
    parts, level, start = [], 0, 0
    for at, letter in enumerate(text):
        if letter in "([{":
            level += 1
        elif letter in ")]}":
            level -= 1
        elif letter in separators and level == 0:
            parts.append(text[start:at])
            start = at + 1
    if level:
        raise Unreadable("brackets that are not closed")
    return [*parts, text[start:]]


def _split_on(text: str, command: str) -> list[str]:
    return split(re.sub(re.escape(command) + r"(?![a-z])", "\0", text), "\0")


@dataclass(frozen=True)
class Number:
    """A number that is written out: its exact value, and the digits after the point (None for a fraction)."""

    value: Fraction
    places: int | None

    @property
    def significant(self) -> int:
        """Digits from the first that is not zero."""
        return len(str(abs(self.value.numerator * 10 ** (self.places or 0) // self.value.denominator)))


def number(latex: str) -> Number | None:
    """``-12``, ``3.50``, ``1/2``, ``\\frac{1}{2}``, ``2 1/2``; None for everything else."""
    latex = latex.strip()
    if (found := _DECIMAL.fullmatch(latex)) is not None:
        digits = found[3] or ""
        value = Fraction(int(found[2] + digits), 10 ** len(digits))
        return Number(-value if found[1] == "-" else value, len(digits))
    if (found := _REPEATING.fullmatch(latex)) is not None:
        start, block = found[3], found[4] or found[5]
        value = Fraction(int(found[2] + start + block) - int(found[2] + start), 10 ** len(start) * (10 ** len(block) - 1))
        return Number(-value if found[1] == "-" else value, None)
    if (found := _MIXED.fullmatch(latex)) is not None and int(found[4]):
        value = int(found[2]) + Fraction(int(found[3]), int(found[4]))
        return Number(-value if found[1] == "-" else value, None)
    if (found := _FRACTION.fullmatch(latex)) is not None:
        above, below = int(found[2] or found[4]), int(found[3] or found[5])
        if below:
            value = Fraction(above, below)
            return Number(-value if found[1] == "-" else value, None)
    return None


@lru_cache(maxsize=4096)
def expression(latex: str) -> sympy.Basic:
    """What math-verify's LaTeX parser makes of a scalar.

    Raises:
        Unreadable: it does not know it either.
    """
    if (plain := number(latex)) is not None:
        return sympy.Rational(plain.value.numerator, plain.value.denominator)
    try:
        found = latex2sympy(latex, is_real=None, conversion_config=_KEEP_CASE, normalization_config=None)
    # The parser raises bare exceptions, and whatever sympy raises on what it built.
    except Exception as error:
        raise Unreadable(f"cannot read {latex[:60]!r}: {type(error).__name__}") from error
    if not isinstance(found, sympy.Expr):
        raise Unreadable(f"{latex[:60]!r} is {type(found).__name__}")
    return found


def letters(given: Node | str) -> str:
    """The letters and digits of a text answer, for comparing texts."""
    text = given if isinstance(given, str) else given.text if isinstance(given, Words) else _source(given)
    return re.sub(r"[^a-z0-9]", "", _COMMANDS.sub("", compact(text)).lower())


def _source(given: Node) -> str:
    return given.latex if isinstance(given, Scalar) else ""
