r"""Parse final answers into structures: lists, tuples, intervals, relations, matrices, ratios, words, scalars.

Structure is parsed strictly, since it decides verdicts: whether order counts, whether an endpoint belongs to an
interval. Text without structure is a `Scalar`, which math-verify's LaTeX parser reads when its value is needed.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from fractions import Fraction
from functools import lru_cache
from itertools import pairwise
from typing import Final

from stretto_verify.math.limits import check_piece
from stretto_verify.math.parse.expressions import Number, number
from stretto_verify.math.parse.forms import reformed
from stretto_verify.math.parse.phrases import in_words, phrase
from stretto_verify.math.parse.spelling import PLAIN_NUMBER, closing_at, spelled, unwrapped
from stretto_verify.math.parse.structure import (
    Dots,
    LeftOver,
    Letter,
    Listing,
    Matrix,
    Node,
    Ratio,
    Relation,
    Scalar,
    Union,
    Unreadable,
    Words,
    accounts_for,
)
from stretto_verify.math.parse.units import MAGNITUDES, NUMBER_WORD, OTHER, without_unit

_SIGNS: Final = re.compile(r"\\Rightarrow|\\approx|\\equiv|\\neq|\\le(?![a-z])|\\ge(?![a-z])|\\in(?![a-z])|[=<>]")
_MATRIX = re.compile(r"\\begin\{([pbB]?(?:small)?matrix|array)\}(?:\{[lcr|]*\})?(.*)\\end\{\1\}", re.DOTALL)
_SCALED = re.compile(  # 1/2 of a matrix
    r"((?:-|[0-9.]+|\\(?:frac|sqrt|pi)(?![a-z])|[{}/]|\s)+?)(?:\\cdot|\\times)?\s*(\\begin\{[pbB]?matrix\}(?:(?!\\begin).)*\\end\{[pbB]?matrix\})",
    re.DOTALL,
)
_GROUPED = re.compile(r"[+-]?[0-9]{1,3}(?:,[0-9]{3})+(?:\.[0-9]+)?|[+-]?[0-9]{1,3}(?: [0-9]{3})+(?:\.[0-9]+)?")
_TEXT = re.compile(r"\(?\\text\{([^{}]*)\}\)?")
_PLAIN_WORDS = re.compile(r"[A-Za-z][A-Za-z'-]*(?:[ ,]+[A-Za-z][A-Za-z'-]*)*")
_CHOICE = re.compile(
    r"(?:\\text\{\s*\(?([A-J])(?:[).:]+\s*\}|\s+\}|\}(?=[\s).:]))|\(([A-J])\)|([A-J])[).:](?=\s)(?!\s*[A-Z]{1,2}$))"
    r"\s*[).:]?\s*"
    r"((?!\\(?:cdot|times|cup|cap|mid|to|in|neq|le|ge|approx|equiv|Rightarrow|pm|ldots)(?![a-z]))(?:(?<=\s)-(?=[0-9a-z\\.])|[^\W_]|[\\(\[{.\"'|√]).*)",
    re.DOTALL,
)
_UNMARKED = re.compile(r"\\text\{\s*[A-J]\s*\}(?!\s*[).:])")
_OTHER_CHOICE = re.compile(
    r"(?:\\text\{\s*)?(?:(?<![\w})^\]])\([A-J]\)|(?<![\w})^\](])[A-J][).](?=\s|$))|(?<=\))\([A-J]\)"
)
_SEPARATED = re.compile(r"[\s({]*(?:\\text\{\s*)?[,;]")  # continues a list
_EQUATED = re.compile(  # sides of a choice's equation: AB, f(x), 2x+3y; no words, no other choice, no plain number
    r"(?=(?:\\(?:[dt]?frac|sqrt|q?quad|cdot|times|left|right)(?![a-z])|[^\\a-zA-Z])*+(?!\\text)[\\a-zA-Z])"
    r"(?:\\(?!text)[a-zA-Z]+|(?<![a-zA-Z])[A-J](?=[A-Z(_])|(?<=[A-Z])[A-J]"
    r"|(?<=[a-zA-Z]\()[A-J](?=\))|(?<![a-zA-Z])(?!is\b)[a-zK-Z]{1,2}(?![a-z])"
    r"(?!(?<=[a-z]{2})\.?\s+(?:[0-9a-zA-Z]|\\(?:math|sqrt|[dt]?frac|pi)))"  # vs 7
    r"|(?<=[A-Z])[K-Z]|[^\\a-zA-Z])+"
)
_ONE_CHOICE = re.compile(r"\(?[A-J]\)?")
_NOT_READ = re.compile(
    r"\?|(?<![0-9] )(?<![0-9])\\ldots|\\text\{[^{}]*[^{}a-zA-Z\s][^{}]*\}|_\{[^{}]*,|(?<![0-9a-zA-Z)}!\s])\s*[*/]"
    r"|[!]{2}|[0-9]\s*_|^(?!.*\\(?:text|begin)).*(?<![\\a-zA-Z{])[a-zA-Z]{5}|^(?!.*\\begin).*&|^[^|]*\|[^|]*(?:\|[^|]*\|[^|]*)*$"
)
_SIDE_BY_SIDE = re.compile(r"(?<![^-+*/=(,\s])[0-9.]++\s+[0-9]++(?!\s*/)|[0-9]\.\s|[0-9]\.[0-9]+\.[0-9]")
_POINT = re.compile(r"^[K-Z]'*\s*(?=\(.*,.*\)$)")  # P(1,2)
_NAMED_POINT = re.compile(r"([A-J]'*)(\(.*,.*\))")  # A(1,2); P(1,2) needs no name, since P is no choice
_CALL = re.compile(r"\s*[A-Z]\([0-9]+,\s*[0-9]+\)\s*")  # C(5,2) = 10
_TUPLE = re.compile(r"\s*\([^()]*,[^()]*\)\s*")  # an end of no interval
_EITHER_SIGN = re.compile(r"\\pm(?![a-z])")
_INTRODUCED = re.compile(
    rf"^(?!\\text\{{\s*(?:\(?[A-J][).:]|[^{{}}]*\b(?:{OTHER})\b))"
    r"\\text\{[^{}]*(?:[:=]|\bis|\bare)\s*\}\s*(?=\S)"
    r"|^\\text\{\s*(?:[Tt]he )?(?:points?|pairs?|set|interval|vert(?:ex|ices)|cent(?:er|re)|coordinates|vector)\s*\}"
    r"\s*(?=[(\[\\])|^\\text\{\s*(?:exactly|diverges to)\s*\}\s*(?=[-0-9\\])"
    r"|^(?:\\text\{\s*)?(?:for )?all(?: (?:the|real|positive|natural|whole|integers?|numbers?|values|of))*\s*\}?\s*"
    r"(?=[a-z]\s*(?:[<>]|\\(?:le|ge)(?![a-z])))"
)
_MAGNITUDE = re.compile(rf"(?<=[0-9}}\s{{])(?:{'|'.join(MAGNITUDES)})s?\b")
_CONTINUED = re.compile(rf"[\s,]*(?:and\s)?{NUMBER_WORD}")  # 5 thousand and one
_DEGREES = re.compile(r"([0-9.]+)\s*\^\s*\{?\\circ\}?")
_TRIGONOMETRIC = re.compile(r"\\(?:sin|cos|tan|cot|sec|csc)(?![a-z])")


@lru_cache(maxsize=1 << 14)
def read(piece: str) -> Node:
    """Parse a final answer as written. The structure contains every candidate for an answer that the text has.

    Raises:
        Undecided: it exceeds the limits.
        LeftOver: a part outside the structure could be an answer too.
        Unreadable: its form is unknown.
    """
    if PLAIN_NUMBER.fullmatch(piece) is not None:
        return Scalar(piece)
    check_piece(piece)
    if (counted := in_words(unwrapped(piece))) is not None:
        return counted
    text = reformed(spelled(piece))
    found = node(text)
    if not accounts_for(found, text):
        raise LeftOver(f"more than one answer in {piece[:60]!r}")
    return found


def node(text: str) -> Node:
    """Parse a text in canonical spelling (see `spelling.spelled`) as the first that fits: a phrase, choice, matrix,
    words, list, relation, union, brackets, ±, ratio, or a scalar. Raises Unreadable for an unknown form, and LeftOver
    where a part outside the structure could be an answer too."""
    text = _outer(_INTRODUCED.sub("", text))
    if not text:
        raise Unreadable("nothing")
    if (told := phrase(text)) is not None:
        return told
    if (chosen := _CHOICE.fullmatch(text)) is not None:
        return _chosen(chosen)
    if (point := _NAMED_POINT.fullmatch(text)) is not None and closing_at(point[2], 0) == len(point[2]) - 1:
        return Relation((Words(point[1]), node(point[2])), ("=",))
    if _GROUPED.fullmatch(without_unit(text)[0].rstrip("% ")):
        return _scalar(text)
    if (found := _MATRIX.fullmatch(text)) is not None and r"\begin" not in found[2]:
        rows = [row for row in re.split(r"\\\\(?:\[[^\]]*\])?", found[2]) if row.strip()]
        return Matrix(tuple(tuple(node(cell) for cell in split(row, "&")) for row in rows))
    if (
        r"\begin" in text
        and (scaled := _SCALED.fullmatch(text)) is not None
        and isinstance(matrix := node(scaled[2]), Matrix)
    ):
        return _times(scaled[1], matrix)
    if (words := _words(text)) is not None:
        return in_words(words.text) or words
    if len(groups := split(text, ";")) > 1 and (points := _points(groups)) is not None:
        return points
    items = [item for item in split(text, ",;") if item.strip()]
    if len(items) > 1:
        return _list("", "", items)
    if (relation := _relation(text)) is not None:
        return relation
    parts = split(re.sub(re.escape(r"\cup") + r"(?![a-z])", "\0", text), "\0")
    if len(parts) > 1:
        return Union(tuple(map(node, parts)))
    if (bracketed := _bracketed(_POINT.sub("", text))) is not None:
        return bracketed
    if _EITHER_SIGN.search(text) is not None:
        return Listing("", "", tuple(node(_EITHER_SIGN.sub(sign, text, count=1).lstrip("+ ")) for sign in "+-"))
    parts = split(text, ":")
    if len(parts) > 1:
        return Ratio(tuple(map(node, parts)))
    return _scalar(text)


def _times(factor: str, matrix: Matrix) -> Matrix:
    """The matrix with each cell multiplied by `factor`, LaTeX text; "-" is -1.

    Raises:
        Unreadable: a cell is no number or expression, or has a unit.
    """
    before = factor.strip() + ("1" if factor.strip() == "-" else "")
    if any(not isinstance(cell, Scalar) or cell.unit for row in matrix.rows for cell in row):
        raise Unreadable("a multiple of a matrix that has no plain cells")
    rows = [[cell.latex for cell in row if isinstance(cell, Scalar)] for row in matrix.rows]
    return Matrix(tuple(tuple(Scalar(rf"{before}\cdot ({cell})") for cell in row) for row in rows))


def _points(groups: Iterable[str]) -> Listing | None:
    """``p=5,q=2;p=7,q=2`` as a list of points; None for other forms."""
    points = []
    for group in groups:
        sides = [item.split("=") for item in split(group, ",")]
        if len(sides) < 2 or any(len(side) != 2 for side in sides):
            return None
        names, values = (Listing("(", ")", tuple(map(node, part))) for part in zip(*sides, strict=True))
        points.append(Relation((names, values), ("=",)))
    return Listing("", "", tuple(points))


def _chosen(found: re.Match[str]) -> Node:
    """Parse a choice with its content, ``(A) 5``, found by `_CHOICE`. It becomes a list if its content has a further
    choice. LeftOver if another answer follows the letter, or a bracket is not closed."""
    if (other := _OTHER_CHOICE.search(found[4])) is not None:
        at = found.start(4) + other.start()
        return _list("", "", (found[0][:at], found[0][at:]))
    if _SEPARATED.match(found[4]):
        raise LeftOver("a choice and another answer")
    if found[4].startswith("(") and closing_at(found[4], 0) < 0:
        raise LeftOver("a choice and a bracket that is not closed")
    letter, content = Words(found[1] or found[2] or found[3]), node(found[4])
    left = content.sides[:-1] if isinstance(content, Relation) else ()
    others = any(isinstance(part, Letter) or _is_choice(part) for part in _parts(content))
    is_worded = r"\text" in found[4] and not (isinstance(content, Scalar) and content.unit)
    others |= _UNMARKED.match(found[0]) is not None and (is_worded or _is_choice(content))  # D B, D 5 blue
    if others or not all(map(_is_named, left)):
        return Listing("", "", (letter, content))
    return Letter(letter.text, content)


def _parts(given: Node) -> tuple[Node, ...]:
    match given:
        case Letter():
            return (given,)
        case Listing(items=parts) | Union(parts=parts) | Ratio(parts=parts) | Relation(sides=parts):
            return parts
    return ()


def _is_named(side: Node) -> bool:
    """Whether a side of an equation in a choice is a name or an expression in names, not an answer of its own."""
    if isinstance(side, Listing):
        return all(map(_is_named, side.items))
    if isinstance(side, Words):
        return re.fullmatch("[A-Z]{3,4}", side.text) is not None  # a triangle, a square
    return isinstance(side, Scalar) and not side.unit and _EQUATED.fullmatch(side.latex) is not None


def _is_choice(given: Node) -> bool:
    text = given.latex if isinstance(given, Scalar) else given.text if isinstance(given, Words) else ""
    return _ONE_CHOICE.fullmatch(text) is not None


def _outer(text: str) -> str:
    """The text without outer punctuation and without grouping braces; braces around a list are kept as those of a
    set."""
    text = text.strip(" ,;:\n\t").rstrip(" .,;:\n\t")
    while text.startswith("{") and closing_at(text, 0) == len(text) - 1:
        text = text[1:-1].strip()
        if "," in text and len(split(text, ",")) > 1 and not _GROUPED.fullmatch(text):
            return rf"\{{{text}\}}"
    return text


def _words(text: str) -> Words | None:
    if (found := _TEXT.fullmatch(text)) is not None:
        return Words(found[1])
    bare = text[1:-1] if text.startswith("(") and text.endswith(")") else text
    if _PLAIN_WORDS.fullmatch(bare) and (bare.lower() == "no" or _has_word(bare)):
        return Words(bare)
    return None


def _has_word(bare: str) -> bool:
    """Whether the letters are words, not a product or difference of variables: a part has over three of them, or three
    in a text without a hyphen."""
    longest = max(len(part) for part in re.split(r"[ ,-]+", bare))
    return longest > 3 or (longest == 3 and "-" not in bare)


def _list(opening: str, closing: str, items: Iterable[str]) -> Node:
    r"""A list of the parsed items, in which lists without brackets are flattened; or one relation whose right side is a
    list, as in ``x = 1, 2, 3`` or ``x \neq 1, x \neq 2``."""
    nodes = [node(item) for item in items]
    first, *rest = nodes
    names_all = isinstance(first, Relation) and first.signs[-1] in ("=", r"\in", r"\neq") and not opening
    if isinstance(first, Relation) and names_all and not any(isinstance(other, Relation | Dots) for other in rest):
        return Relation((*first.sides[:-1], Listing("", "", (first.sides[-1], *rest))), first.signs, first.beside)
    if not opening and (unequal := _unequal(nodes)) is not None:
        return unequal
    flat: list[Node] = []
    for part in nodes:
        flat.extend(part.items if isinstance(part, Listing) and not part.opening else [part])
    return Listing(opening, closing, tuple(flat))


def _unequal(nodes: Sequence[Node]) -> Relation | None:
    r"""``x \neq 1, x \neq 2`` as one relation; None for other forms."""
    sides = [node.sides for node in nodes if isinstance(node, Relation) and node.signs == (r"\neq",)]
    if len(sides) < len(nodes) or len({name for name, _ in sides}) > 1:
        return None
    return Relation((sides[0][0], Listing("", "", tuple(value for _, value in sides))), (r"\neq",))


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
        bare = [before == after == r"\Rightarrow" for before, after in pairwise([r"\Rightarrow", *signs])]
        if any(bare):
            raise Unreadable("a conclusion from no equation")
        last = len(signs) - 1 - signs[::-1].index(r"\Rightarrow")
        steps, sides, signs = sides[: last + 1], sides[last + 1 :], signs[last + 1 :]
        return _beside(node(sides[0]) if not signs else _made(sides, signs), steps)
    return _made(sides, signs)


def _beside(found: Node, texts: Iterable[str]) -> Node:
    """The structure with `texts` that belong to it but have no value of their own: steps before a conclusion,
    approximations. A structure without a place for them, such as words, is returned as it is."""
    match found:
        case Scalar() | Relation():
            return replace(found, beside=(*found.beside, *texts))
        case Listing(items=(first, *rest)):
            return replace(found, items=(_beside(first, texts), *rest))
    return found


def _made(sides: list[str], signs: list[str]) -> Node:
    """Relation from its sides and the signs between them, one fewer; ``= 5`` and ``5 ≈ 5.0`` name nothing and give 5
    alone. The value of ``x = √2 ≈ 1.41`` is √2, that of ``x ≈ 1.41`` is 1.41. Raises Unreadable, also as LeftOver, for
    what makes no relation."""
    if not sides[0].strip() and signs[0] in ("=", r"\in", r"\equiv", r"\approx"):
        was_member, sides, signs = signs[0] == r"\in", sides[1:], signs[1:]
        if not signs:
            value = node(sides[0])
            if was_member and not isinstance(value, Listing | Union):
                raise Unreadable("a member of no set")
            return value
    if r"\in" in signs[1:]:
        raise Unreadable("a member of a member")
    beside: tuple[str, ...] = ()
    if r"\approx" in signs[1:]:
        first = signs.index(r"\approx", 1)
        _check_near(sides[first:])
        beside, sides, signs = tuple(sides[first + 1 :]), sides[: first + 1], signs[:first]
    elif (
        signs[0] == r"\approx"
        and len(signs) == 1
        and not re.search("[a-zA-Z]", re.sub(r"\\text\{[^{}]*\}|\\[a-zA-Z]+|(?<![a-zA-Z])e(?=\s*\^)", "", sides[0]))
    ):
        _check_near(sides)
        return _beside(node(sides[0]), sides[1:])
    signs = ["=" if sign == r"\approx" else sign for sign in signs]
    if not all(side.strip() for side in sides[1:]):
        raise Unreadable("a relation without a side")
    last = node(sides[-1])
    if isinstance(last, Letter):
        raise LeftOver("a choice as the side of an equation")
    if signs[-1] == r"\in" and isinstance(last, Scalar) and number(last.latex) is not None:
        raise Unreadable("a member of a number")
    return Relation((*[_side(side) for side in sides[:-1]], last), tuple(signs), beside)


def _check_near(sides: list[str]) -> None:
    """Check that numbers joined by ≈ may approximate each other. Raises `Unreadable` for "41 ≈ 37", which is a list of
    candidates: they differ by one in the last place of the coarsest, or more."""
    found = [value for side in sides if (value := number(without_unit(side)[0])) is not None]
    places = [_places(value) for value in found if value.places is not None]
    values = [value.value for value in found]
    if places and max(values) - min(values) >= Fraction(10) ** -min(places):
        raise Unreadable("approximations that are far apart")


def _places(decimal: Number) -> int:
    """The last decimal place to which a number may be rounded: 2 for 1.25, -2 for 1300."""
    digits = str(abs(decimal.value.numerator)) if decimal.value.denominator == 1 and decimal.value else ""
    return decimal.places or len(digits.rstrip("0")) - len(digits)


def _side(text: str) -> Node:
    """Parse a side before the last. A call (``f(x)``) and text that cannot be read become words, since they only name
    the last side."""
    try:
        return Words(text) if _CALL.fullmatch(text) else node(text)
    except Unreadable:
        return Words(text)


def _bracketed(text: str) -> Node | None:
    is_set = text.startswith(r"\{")
    start = 1 if is_set else 0
    if text[start : start + 1] not in ("(", "[", "{") or closing_at(text, start) != len(text) - 1:
        return None
    inner = text[start + 1 : -2] if is_set else text[1:-1]
    bar = re.search(r"\\mid(?![a-z])|(?<!\\)\||(?<=[a-zR}]) ?:", inner) if is_set else None
    if bar is not None and "|" not in inner[bar.end() :]:
        return node(inner[bar.end() :])
    items = split(inner, ",;")
    if len(items) > 1 and not all(item.strip() for item in items[:-1]):
        raise LeftOver("a list that lacks an item")
    if is_set:
        return _list("{", "}", items) if inner.strip() else Listing("{", "}", ())
    if len(items) > 1 and all(item.strip() for item in items):
        points = text[0] + text[-1] == "[]" and all(_TUPLE.fullmatch(item) for item in items)
        return _list("", "", items) if points else _list(text[0], text[-1], items)
    if text[-1] == {"(": ")", "[": "]"}[text[0]]:
        return node(inner)
    raise Unreadable("brackets that do not belong together")


def _scalar(text: str) -> Scalar:
    scale = Fraction(1)
    while (magnitude := _MAGNITUDE.search(text)) is not None:
        if _CONTINUED.match(text, magnitude.end()) is not None:
            raise LeftOver(f"a number that goes on in words in {text!r}")
        scale *= Fraction(MAGNITUDES[magnitude[0].rstrip("s")])
        text = re.sub(r"\\text\{\s*\}", "", text[: magnitude.start()] + text[magnitude.end() :])
    body, unit = without_unit(text)
    power = () if unit or body == text else tuple(re.findall(r"\^\s*\{?([0-9])\}?\s*$", text))  # of an unknown unit
    if body.endswith("%"):
        scale = Fraction(1, 100)
    body = _outer(body.rstrip("% "))
    if r"^\circ" in body:
        body = _DEGREES.sub(r"{(\1\\cdot\\pi/180)}" if _TRIGONOMETRIC.search(body) else r"\1", body)
    if _GROUPED.fullmatch(body):
        body = re.sub(r"[ ,]", "", body)
    if _SIDE_BY_SIDE.search(body):
        raise LeftOver(f"several numbers in {text!r}")
    if not body or "%" in body or _NOT_READ.search(body):
        raise Unreadable(f"cannot read {text!r}")
    return Scalar(body, scale, unit, power)


def split(text: str, separators: str) -> list[str]:
    """Split at any of the `separators` that is outside all brackets; Unreadable for unclosed brackets."""
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
