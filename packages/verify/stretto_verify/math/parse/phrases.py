r"""Final answers in words or standard notation: "no real solutions", ``\mathbb{R}``, "3 to 4", all reals except some,
``2 hours 30 minutes``."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from stretto_verify.math.parse.expressions import number
from stretto_verify.math.parse.measures import KNOWN
from stretto_verify.math.parse.numerals import counted, counted_in_chinese
from stretto_verify.math.parse.structure import Dots, Listing, Node, Ratio, Scalar, Union, Words
from stretto_verify.math.parse.units import SPOKEN, amount

_INTO_WORDS = re.compile(r"\\text\{([^{}]*)\}")
_NOTHING = re.compile(
    r"\\emptyset|\\\{\s*\\\}|(?:the )?empty set|(?:there (?:is|are|exists?) |(?:(?:the|this) )?"
    r"(?:equation|system|inequality|problem)s? (?:has|have) )?no (?:(?:real|integer|positive|such|possible) )*"
    r"(?:solutions?|roots?)(?: exists?)?",
    re.IGNORECASE,
)
_REALS: Final = r"(?:\\mathbb\s*\{?\s*R\s*\}?|\\mathbf\{R\}|\\Bbb\s*\{?R\}?|\\R|R)"
_ALL_REALS = re.compile(
    rf"{_REALS[:-3]})|(?:the set of )?(?:all )?(?:the )?real numbers|all reals|(?:for )?all real(?: values of)? [a-z]",
    re.IGNORECASE,
)
_POINT = r"-?(?:[0-9]+(?:\.[0-9]+|/[0-9]+)?|\\frac\{[0-9]+\}\{[0-9]+\}|\\pi|\\sqrt\{[0-9]+\})"
_POINTS = rf"(?:x\s*=\s*)?({_POINT}(?:\s*,\s*{_POINT})*)"
_HALF_LINE = re.compile(
    rf"{_REALS}\s*(?:\^\s*\{{?\s*\+\s*\}}?|_\s*\{{?\s*(?P<sign>\+|>|\\ge)\s*0?\s*\}}?)"
    r"|(?:the set of )?(?:all )?(?P<word>positive|non-?negative) (?:real numbers|reals)",
    re.IGNORECASE,
)
_MISSING = re.compile(r"(?:(?:the )?limit |it )?(?:DNE|does not exist|is undefined)|undefined", re.IGNORECASE)
_ENDLESS = re.compile(r"(?:there (?:are|exist) )?infinitely many(?: solutions)?(?: exist)?", re.IGNORECASE)
_ALL_BUT = re.compile(
    rf"(?:x\s*\\in\s*)?{_REALS}\s*(?:\\setminus|\\backslash|\\|-)\s*\\?\{{\s*{_POINTS}\s*\\?\}}"
    rf"|[a-z]\s*\\in\s*{_REALS}\s*,?\s*[a-z]\s*\\neq\s*{_POINTS}"
    rf"|(?:all )?(?:the )?(?:real numbers|reals)(?: x)?,? (?:except|but|other than)(?: for)?\s*{_POINTS}",
    re.IGNORECASE,
)
_PROPORTION = re.compile(r"([0-9]+(?:\.[0-9]+)?) to ([0-9]+(?:\.[0-9]+)?)")
_DATE = re.compile(r"[12][0-9]{3}-(?:0[1-9]|1[0-2])-[0-3][0-9]")  # 2020-01-05; no difference is written so
_OUT_OF = re.compile(r"([0-9]{1,9}) (?:out of|in) (?:every )?([1-9][0-9]{0,8})")
_SPELT = re.compile(r"\s*(?:\\(?:text|mathrm|textbf)\s*\{)?\s*([A-Za-z]+(?:[ -]+[A-Za-z]+)*)\s*\}?[\s.]*")


def phrase(text: str) -> Node | None:
    r"""Parse a text in canonical spelling that is as a whole one of: "no solution", "does not exist", "infinitely
    many", all reals (``\mathbb{R}``), all but some, the positive ones, an amount in two units, a time, a date, "3 to
    4", "3 out of 4"; else None."""
    if text == r"\ldots":
        return Dots()
    bare = " ".join(_INTO_WORDS.sub(r" \1 ", text).split())
    if _NOTHING.fullmatch(bare):
        return Words("no solution")
    if _ALL_REALS.fullmatch(bare):
        return Listing("(", ")", (Scalar(r"-\infty"), Scalar(r"\infty")))
    if _MISSING.fullmatch(bare):
        return Words("does not exist")
    if _ENDLESS.fullmatch(bare):
        return Words("infinitely many")
    if (half := _HALF_LINE.fullmatch(bare)) is not None:
        is_closed = half["sign"] == r"\ge" or (half["word"] or "").lower().startswith("non")
        return Listing("[" if is_closed else "(", ")", (Scalar("0"), Scalar(r"\infty")))
    if (told := amount(bare)) is not None:
        return Scalar(told[0], unit=told[1], beside=(bare,))
    if SPOKEN.fullmatch(bare) or _DATE.fullmatch(bare):
        return Words(text)
    if (parts := _PROPORTION.fullmatch(bare)) is not None:
        return Ratio(tuple(map(Scalar, parts.groups())))
    if (share := _OUT_OF.fullmatch(bare)) is not None:
        return Scalar(rf"\frac{{{share[1]}}}{{{share[2]}}}")
    if (missing := _ALL_BUT.fullmatch(bare)) is not None:
        return without([Scalar(point.strip()) for point in next(filter(None, missing.groups())).split(",")])
    return None


def in_words(piece: str) -> Scalar | None:
    """Parse a text that is as a whole a number in words, with or without a unit; None if it is none."""
    if not piece.isascii() and (whole := counted_in_chinese(piece)) is not None:
        return Scalar(str(whole))
    if (found := _SPELT.fullmatch(piece)) is None:
        return None
    number_of, _, last = found[1].rpartition(" ")
    if last.lower() in KNOWN and (value := counted(number_of)) is not None:
        return Scalar(str(value), unit=KNOWN[last.lower()])
    value = counted(found[1])
    return None if value is None else Scalar(str(value))


def without(points: Sequence[Node]) -> Union | None:
    """Real numbers except these points, as a union of intervals; None if their order is unknown: of two or more, some
    are equal or no plain numbers."""
    values = [number(point.latex) if isinstance(point, Scalar) else None for point in points]
    known = [value.value for value in values if value is not None]
    if len(points) > 1 and len(set(known)) < len(points):
        return None
    ordered = [points[at] for at in sorted(range(len(points)), key=known.__getitem__)] if len(points) > 1 else points
    ends = [Scalar(r"-\infty"), *ordered, Scalar(r"\infty")]
    return Union(tuple(Listing("(", ")", (ends[at], ends[at + 1])) for at in range(len(ends) - 1)))
