r"""What an equation names, and whether it says a value: ``x = 5`` says 5, ``2x = 5`` does not.

An answer may give its value a name, or say of what it is the value: ``x``, ``f(2)``, ``AB``, ``\sin A``, ``a + b``,
``6 \cdot 7``. Any other left side is that of an equation to be solved, perhaps of the question itself, whose right side
is no answer.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from fractions import Fraction
from itertools import combinations, pairwise

import sympy
from sympy.core.function import AppliedUndef

from stretto.rewards.math_equality import same_value, within
from stretto.rewards.math_scalars import Opinion, expression, number
from stretto.rewards.math_spelling import closing_at
from stretto.rewards.math_structure import Listing, Matrix, Node, Ratio, Relation, Scalar, Union, Unreadable, Words

Same = Callable[[Node, Node], Opinion]

_NAMING = ("=", r"\in", r"\equiv")
_INDEX: str = r"(?:_(?:\{[^{}]*\}|[a-zA-Z0-9]))?"
_CALL = re.compile(rf"(?:[fghFGHPQE]{_INDEX}(?:\^\{{?-1\}}?)?|[a-zA-Z]{_INDEX}'+|\\(?:gcd|max|min))\s*(?=[(\[]|$)")
_SQUARE = re.compile(r"(?<![a-zA-Z\\])([A-Z]{2}|\\sigma)\s*\^\s*\{?2\}?")  # of a segment; a variance
_TEXTS = re.compile(r"\\text\{[^{}]*\}")
_LONG_WORD = re.compile(r"(?<![a-zA-Z\\])[a-zA-Z]{3}")
_COMPUTED = re.compile(r"[0-9]\s*(?:\\\s*)?[a-zA-Z](?![a-zA-Z])|[a-zA-Z)]\s*\^\s*\{?[0-9]|[-+]\s*[0-9]|[0-9]\s*[-+]")
_FUNCTIONS = (
    *(sympy.sin, sympy.cos, sympy.tan, sympy.cot, sympy.sec, sympy.csc, sympy.asin, sympy.acos, sympy.atan),
    *(sympy.log, sympy.Abs, sympy.re, sympy.im, sympy.arg, sympy.floor, sympy.ceiling),
)
_IDEMPOTENT = (sympy.Abs, sympy.floor, sympy.ceiling)
_OPERATORS = (
    *(sympy.Derivative, sympy.Integral, sympy.Limit, sympy.Sum, sympy.Product, sympy.Max, sympy.Min),
    *(AppliedUndef, sympy.Symbol),
)


def is_naming(relation: Relation) -> bool:
    """Does it say what something is equal to, or in which set it is?"""
    return all(sign in _NAMING for sign in relation.signs)


def is_number(side: Node) -> bool:
    """Is it an expression without any variable?"""
    if not isinstance(side, Scalar):
        return False
    try:
        return not expression(side.latex).free_symbols
    except Unreadable:
        return False


def name(side: Node) -> str | None:
    """What only gives a name to the other side: x, f(x), AB/CD, (p, q), a text."""
    match side:
        case Words(text=text):
            return text.replace(" ", "")
        case Listing(items=items):
            names = [name(item) for item in items]
            return None if None in names else "(" + ",".join(map(str, names)) + ")"
        case Ratio(parts=parts):
            names = [name(part) for part in parts]
            return None if None in names else ":".join(map(str, names))
        case Scalar(latex=latex):
            try:
                found = expression(latex)
            except Unreadable:
                return latex.replace(" ", "")
            return str(found) if _is_name(found) else None
    return None


def _is_name(found: sympy.Basic) -> bool:
    if isinstance(found, sympy.Symbol | AppliedUndef):
        return True
    if isinstance(found, sympy.Mul):
        return all(_is_name(part) for part in found.args)
    return isinstance(found, sympy.Pow) and found.exp == -1 and _is_name(found.base)


# Is the last side of an answer's equation its value?


def says_its_last_side(answer: Relation, same: Same) -> bool:
    """Does it name its last side (``x = 5``), or compute it (``6 · 7 = 42``, ``a^2 + b^2 = 9 + 16 = 25``)?"""
    first, *between, last = answer.sides
    if _is_asked(first, last) or computes(first, last, same, answer.signs[0]):
        return True
    return any(
        isinstance(side, Scalar) and number(side.latex) is None and computes(side, last, same) for side in between
    )


def computes(side: Node, value: Node, same: Same, sign: str = "=") -> bool:
    """May a side without variables have that value? What is rounded may, ``10/3 = 3.33``; ``2 + 2 = 5`` may not."""
    if not _is_constant(side):
        return False
    if sign == r"\equiv":
        return True
    if isinstance(value, Listing) and not value.ordered and isinstance(side, Scalar):
        return any(computes(side, item, same) for item in value.items)
    if isinstance(side, Scalar) and isinstance(value, Scalar):
        if not _is_constant(value):
            return False
        if (
            (side.unit != value.unit and (value.unit or "base" in side.unit))
            or _rounds(side, value)
            or _rounds(value, side)
        ):
            return True
    return same(side, value) is not False


def _is_constant(side: Node) -> bool:
    """Without variables, but for the imaginary unit."""
    match side:
        case Scalar(latex=latex):
            try:
                return all(str(symbol) == "i" for symbol in expression(latex).free_symbols)
            except Unreadable:
                return False
        case Listing(items=parts) | Ratio(parts=parts) | Union(parts=parts):
            return all(map(_is_constant, parts))
    return False


def _rounds(decimal: Scalar, exact: Scalar) -> bool:
    short = number(decimal.latex)
    if short is None or not short.places or decimal.scale != exact.scale:
        return False
    try:
        return within(expression(exact.latex), short.value, Fraction(1, 10**short.places))
    except Unreadable:
        return False


def _is_asked(side: Node, value: Node) -> bool:
    """May a question ask for that?"""
    match side:
        case Words(text=text):
            return _is_title(text)
        case Listing(items=parts) | Ratio(parts=parts) | Union(parts=parts):
            return all(_is_asked(part, value) for part in parts)
        case Matrix(rows=rows):
            return all(_is_asked(cell, value) for row in rows for cell in row)
        case Scalar(latex=latex):
            if latex.startswith(r"\text"):
                return _is_title(_TEXTS.sub("", latex))
            if _is_call(latex):
                return True
            try:
                found = expression(_SQUARE.sub(_square, latex))
            except Unreadable:
                return _is_title(latex)
            if isinstance(value, Matrix) and isinstance(found, sympy.Pow):
                found = found.base  # of matrices the powers are asked for, and no equation of them is solved by itself
            return _is_product(found) or _is_sum(found, value) or _is_value_of_function(found, value)
    return False


def _square(found: re.Match[str]) -> str:
    return f" S_{{{found[1].removeprefix(chr(92))}}}"


def _is_title(text: str) -> bool:
    """Words, or notation that nobody can read, ``A \\cap B``; an expression that nobody can read is neither."""
    return _LONG_WORD.search(text) is not None or _COMPUTED.search(re.sub(r"\\[a-zA-Z]+", r"\\", text)) is None


def _is_call(latex: str) -> bool:
    """``f'(2)``, ``f(x + h)``, ``\\gcd(a, b)``, which the parser of expressions takes for products, or computes."""
    found = _CALL.match(latex)
    if found is None or (found[0][0] == "\\" and not re.search("[a-zA-Z]", latex[found.end() :])):
        return False
    return found.end() == len(latex) or closing_at(latex, found.end()) == len(latex) - 1


def _is_product(found: sympy.Basic) -> bool:
    """A name, or a product of names and of sums of names, or a quotient: ``AB``, ``xyz``, ``(a+b)(c+d)``, ``AB/BC``.
    No letter of an unknown is in it twice, as in ``x(x+y)``."""
    if isinstance(found, _OPERATORS):
        return True
    if not isinstance(found, sympy.Mul):
        return False
    twice = {str(x) for one, other in combinations(found.args, 2) for x in one.free_symbols & other.free_symbols}
    if any(len(letter) == 1 and letter.islower() for letter in twice):
        return False
    below = [part.base for part in found.args if isinstance(part, sympy.Pow) and part.exp == -1]
    above = [part for part in found.args if not isinstance(part, sympy.Pow)]
    return len(below) < len(found.args) == len(below) + len(above) and all(map(_is_quantity, above + below))


def _is_quantity(found: sympy.Basic) -> bool:
    return _is_product(found) or _is_sum(found, None)


def _is_sum(found: sympy.Basic, value: Node | None) -> bool:
    """``x + y``, ``AB + BC``, ``a - b``: names or products of them. A difference that is zero is an equation."""
    if not isinstance(found, sympy.Add):
        return False
    terms = [term.args[1] if _is_negated(term) else term for term in found.args]
    if len(set(terms)) < len(terms) or not all(map(_is_product, terms)):
        return False
    return not (isinstance(value, Scalar) and value.latex == "0" and any(map(_is_negated, found.args)))


def _is_negated(term: sympy.Basic) -> bool:
    return isinstance(term, sympy.Mul) and len(term.args) == 2 and term.args[0] == -1


def _is_value_of_function(found: sympy.Basic, value: Node) -> bool:
    """``\\sin A = 3/5``, ``|z| = 5``, ``\\log_a b = 2``; an equation that its right side solves, ``\\sin x = 0``, may
    be that of the question."""
    if not isinstance(found, _FUNCTIONS):
        return False
    of, *base = found.args
    if not _is_quantity(of) or not all(part.is_number or _is_product(part) for part in base):
        return False
    symbols = sorted(found.free_symbols, key=str)
    if len(symbols) == 1 and isinstance(found, _IDEMPOTENT):
        return str(symbols[0]) not in ("x", "y")
    if len(symbols) != 1 or not isinstance(value, Scalar):
        return True
    try:
        given = expression(value.latex)
    except Unreadable:
        return True
    return bool(given.free_symbols) or same_value(found.xreplace({symbols[0]: given}), given) is False


def is_system(listing: Listing) -> bool:
    """Equations one beside the other, ``x + y = 3, xy = 2``, and no values of several names."""
    relations = [item for item in listing.items if isinstance(item, Relation) and is_naming(item)]
    return len(relations) > 1 and any(_is_combined(relation.sides[0]) for relation in relations)


def _is_combined(side: Node) -> bool:
    if not isinstance(side, Scalar) or _is_call(side.latex):
        return False
    try:
        found = expression(side.latex)
    except Unreadable:
        return False
    letters = [str(symbol) for symbol in found.free_symbols]
    is_product = isinstance(found, sympy.Mul) and any(len(letter) == 1 and letter.islower() for letter in letters)
    return isinstance(found, sympy.Add) or is_product


# Several names.


def names(listing: Listing) -> list[str] | None:
    """The different letters that ``a = 1, b = 2`` gives values to, in their order; None where it is something else."""
    found = [name(item.sides[0]) if isinstance(item, Relation) and is_naming(item) else None for item in listing.items]
    letters = [called.partition("_")[0] for called in found if called is not None]
    return letters if len(letters) == len(found) == len(set(letters)) else None


def has_one_name(listing: Listing) -> bool:
    """``x = 1, x = 2``: one name, and several values that it may have."""
    found = [name(item.sides[0]) for item in listing.items if isinstance(item, Relation) and is_naming(item)]
    return len(found) == len(listing.items) > len(set(found)) == 1 and None not in found


def as_points(listing: Listing) -> Relation | None:
    """``p = 2, q = 3, p = 3, q = 2`` as ``(p, q) = (2, 3), (3, 2)``; None where no names come again in that order."""
    relations = [item for item in listing.items if isinstance(item, Relation) and is_naming(item)]
    called = [name(relation.sides[0]) for relation in relations]
    size = len(set(called))
    if len(relations) != len(listing.items) or size < 2 or len(called) == size or None in called:
        return None
    if len(called) % size or called != called[:size] * (len(called) // size):
        return None
    points = [_point(relations[at : at + size]) for at in range(0, len(relations), size)]
    return Relation((_called(relations[:size]), Listing("", "", tuple(points))), ("=",))


def as_named(given: Node) -> Relation | None:
    """Values with several different names, ``y = 2, x = 1`` and ``(y, x) = (2, 1)``, in the latter form."""
    if isinstance(given, Listing):
        relations = [item for item in given.items if isinstance(item, Relation) and is_naming(item)]
        if len(relations) != len(given.items):
            return None
        given = Relation((_called(relations), _point(relations)), ("=",))
    if not isinstance(given, Relation) or not is_naming(given) or not isinstance(given.sides[0], Listing):
        return None
    called = [name(item) for item in given.sides[0].items]
    points = _points(given.sides[-1], len(called))
    if None in called or len(set(called)) < max(2, len(called)) or points is None:
        return None
    return given


def _called(relations: Iterable[Relation]) -> Listing:
    return Listing("(", ")", tuple(relation.sides[0] for relation in relations))


def _point(relations: Iterable[Relation]) -> Listing:
    return Listing("(", ")", tuple(relation.sides[-1] for relation in relations))


def _points(value: Node, size: int) -> list[Listing] | None:
    """One point, or several, of so many coordinates."""
    if not isinstance(value, Listing) or not value.items:
        return None
    inner = [item for item in value.items if isinstance(item, Listing) and item.ordered and len(item.items) == size]
    if len(inner) == len(value.items) and not value.ordered:
        return inner
    return [value] if len(value.items) == size and value.opening != "{" else None


def in_order_of(gold: Relation, answer: Relation) -> Relation | None:
    """Two of `as_named`: the answer's values in the order of the gold answer's names; None where it has other names."""
    wanted, given = _names_of(gold), _names_of(answer)
    if sorted(wanted) != sorted(given):  # x_0 may be called x
        wanted, given = ([one.partition("_")[0] for one in called] for called in (wanted, given))
    if sorted(wanted) != sorted(given) or len(set(given)) < len(given):
        return None
    return _ordered(answer, [given.index(one) for one in wanted])


def in_usual_order(answer: Relation) -> Relation:
    """One of `as_named` where nothing says in which order its names were asked for: neighbours in the alphabet have
    theirs, ``(x, y)``, and so have ``x_1, x_2``; others stay."""
    given = _names_of(answer)
    keys = [_place(one) for one in given]
    places = sorted(key for key in keys if key is not None)
    if len(places) < len(keys) or any(
        (letter, index + 1) != other and (chr(ord(letter) + 1), index) != other
        for (letter, index), other in pairwise(places)
    ):
        return answer
    return _ordered(answer, [keys.index(place) for place in places])


def _place(called: str) -> tuple[str, int] | None:
    found = re.fullmatch(r"([a-zA-Z])(?:_\{?([0-9]{1,3})\}?)?", called)
    return None if found is None else (found[1], int(found[2] or 0))


def _names_of(named: Relation) -> list[str]:
    called = named.sides[0]
    return [str(name(item)) for item in called.items] if isinstance(called, Listing) else []


def _ordered(named: Relation, order: list[int]) -> Relation:
    called, value = named.sides[0], named.sides[-1]
    points = _points(value, len(order))
    if not isinstance(called, Listing) or not isinstance(value, Listing) or points is None:
        return named
    turned = [Listing(one.opening, one.closing, tuple(one.items[at] for at in order)) for one in points]
    new = turned[0] if points == [value] else Listing(value.opening, value.closing, tuple(turned))
    return Relation((Listing("(", ")", tuple(called.items[at] for at in order)), new), ("=",))
