r"""Names and values in equations: ``x = 5`` has the value 5, ``2x = 5`` has none.

The left side of a final answer may be a name (``x``, ``f(2)``, ``AB``), or a computation of the value (``6 \cdot 7``).
With any other left side it is an unsolved equation, such as the question's, and its right side is no final answer.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from string import ascii_lowercase

import sympy
from sympy.core.function import AppliedUndef
from sympy.functions.elementary.trigonometric import TrigonometricFunction

from stretto_verify.math.compare.scalars import Opinion
from stretto_verify.math.parse.expressions import expression, number
from stretto_verify.math.parse.structure import Listing, Matrix, Node, Ratio, Relation, Scalar, Union, Unreadable, Words

Same = Callable[[Node, Node], Opinion]

_NAMING = ("=", r"\in", r"\equiv")
_TEXTS = re.compile(r"\\text\{[^{}]*\}")
_LONG_WORD = re.compile(r"(?<![a-zA-Z\\])[a-zA-Z]{3}")
_COMPUTED = re.compile(r"[0-9]\s*(?:\\\s*)?[a-zA-Z](?![a-zA-Z])|[a-zA-Z)]\s*\^\s*\{?[0-9]|[-+]\s*[0-9]|[0-9]\s*[-+]")
_DERIVED = re.compile(
    r"\\(?:gcd|lcm)\s*\([a-zA-Z_0-9{}]*[a-zA-Z][a-zA-Z_0-9{}, ]*\)|(?:[a-zA-Z]'+|[fgh]\s*\^\s*\{?-1\}?)\s*\([^()]*\)"
)  # f'(2), f^{-1}(2)
_POWER_OF_MATRIX = re.compile(r"[A-Z]|[A-Z]\s*\^\s*\{?-?[0-9A-Z]+\}?")
_NUMBERED = re.compile(r"_\{?[0-9]\}?$")
_ZERO = re.compile(r"_\{?0\}?$")
_UNKNOWNS = frozenset("tuvwxyz")
_OPERATORS = (
    *(sympy.Derivative, sympy.Integral, sympy.Limit, sympy.Sum, sympy.Product, sympy.Max, sympy.Min),
    *(AppliedUndef, sympy.Symbol),
)


def is_naming(relation: Relation) -> bool:
    """Whether the relation is an equality, a congruence or a membership."""
    return all(sign in _NAMING for sign in relation.signs)


def is_number(side: Node) -> bool:
    """Whether the side is an expression without variables. False if it cannot be read."""
    if not isinstance(side, Scalar):
        return False
    try:
        return not expression(side.latex).free_symbols
    except Unreadable:
        return False


def name(side: Node) -> str | None:
    """Name that one side of an equation gives to the other side: x, f(x), AB/CD, (p, q), a text, or LaTeX that cannot
    be read. None if the side is no name."""
    match side:
        case Words(text=text):
            return text.replace(" ", "")
        case Listing(items=parts) | Ratio(parts=parts):
            names = [name(part) for part in parts]
            return None if None in names else "(" + ",".join(map(str, names)) + ")"
        case Scalar(latex=latex):
            try:
                found = expression(latex)
            except Unreadable:
                return latex.replace(" ", "")
            return str(found) if _is_name(found) or _is_length(found) else None
    return None


def _is_name(found: sympy.Basic) -> bool:
    if isinstance(found, sympy.Symbol | AppliedUndef | sympy.Derivative):
        return True
    if isinstance(found, sympy.Mul):
        return all(_is_name(part) for part in found.args)
    return isinstance(found, sympy.Pow) and found.exp == -1 and _is_name(found.base)


def _is_length(found: sympy.Basic) -> bool:
    """Whether the expression is a length ``|AB|`` (``|x|`` is not: ``|x| = 5`` is unsolved)."""
    return isinstance(found, sympy.Abs) and isinstance(found.args[0], sympy.Mul) and _is_name(found.args[0])


# Whether the last side of an equation is the value that it states.


def says_its_last_side(given: Relation, same: Same) -> bool:
    """Whether the other sides of an equation name its last side (``x = 5``) or compute it (``6 · 7 = 42``, ``a^2 + b^2
    = 9 + 16 = 25``). `same` compares two sides. False if one of them computes another value (``x = 41 = 37``)."""
    first, *between, last = given.sides
    if not all(computes(side, last, same, given.signs[0]) for side in between if _is_constant(side)):
        return False  # x = 41 = 37
    if _is_asked(first) or computes(first, last, same, given.signs[0]) or _is_identity(first, last, same):
        return True
    if isinstance(last, Matrix) and isinstance(first, Scalar) and _POWER_OF_MATRIX.fullmatch(first.latex):
        return True
    return any(isinstance(side, Scalar) and not number(side.latex) and computes(side, last, same) for side in between)


def _is_identity(side: Node, last: Node, same: Same) -> bool:
    """Whether two expressions with variables are equal, as in ``(x+2)(x+3) = x^2+5x+6``."""
    return isinstance(side, Scalar) and isinstance(last, Scalar) and not _is_constant(side) and same(side, last) is True


def computes(side: Node, value: Node, same: Same, sign: str = "=") -> bool:
    """Whether a side of an equation is the computation of `value`, as in ``2 + 3 = 5``; False for ``2 + 2 = 5``.

    False for a side, or a scalar `value`, with a variable. True if `same`, which compares two sides, cannot decide, if
    `value` has a unit other than the side's, and for every congruence (`sign` is ``\\equiv``). Of a list without order
    one member is enough.
    """
    if not _is_constant(side):
        return False
    if sign == r"\equiv":
        return True
    if isinstance(value, Listing) and not value.ordered and isinstance(side, Scalar):
        return any(computes(side, item, same) for item in value.items)
    if isinstance(side, Scalar) and isinstance(value, Scalar):
        if not _is_constant(value):
            return False
        if side.unit != value.unit and (value.unit or "base" in side.unit):
            return True
    return same(side, value) is not False


def _is_constant(side: Node) -> bool:
    """Whether a side has no variable; the imaginary unit does not count. False for words, matrices, relations and what
    cannot be read."""
    match side:
        case Scalar(latex=latex):
            try:
                return all(str(symbol) == "i" for symbol in expression(latex).free_symbols)
            except Unreadable:
                return False
        case Listing(items=parts) | Ratio(parts=parts) | Union(parts=parts):
            return all(map(_is_constant, parts))
    return False


def _is_asked(side: Node) -> bool:
    """Whether a side denotes a quantity that a question may ask for: ``f(2)``, ``AB``, "the area", but not ``2x``."""
    match side:
        case Words(text=text):
            return _is_title(text)
        case Listing(items=parts) | Ratio(parts=parts) | Union(parts=parts):
            return all(map(_is_asked, parts))
        case Matrix(rows=rows):
            return all(_is_asked(cell) for row in rows for cell in row)
        case Scalar(latex=latex):
            if latex.startswith(r"\text"):
                return _is_title(_TEXTS.sub("", latex))
            if _DERIVED.fullmatch(latex):
                return True
            try:
                return _is_quantity(expression(latex))
            except Unreadable:
                return _is_title(latex)
    return False


def _is_title(text: str) -> bool:
    """Whether a text that is no readable expression names a quantity, in words or notation (``A \\cap B``): it has a
    word of three letters, or nothing that is computed."""
    return _LONG_WORD.search(text) is not None or _COMPUTED.search(re.sub(r"\\[a-zA-Z]+", r"\\", text)) is None


def _is_quantity(found: sympy.Basic) -> bool:
    """Whether a question may ask for the expression: a name, a product or quotient of names (``AB/BC``, but not
    ``1/x``), ``f(2)``, a derivative, integral, limit, series, maximum or length, a trigonometric function of a name
    that is no usual unknown, a sum of such names."""
    if isinstance(found, _OPERATORS):
        return True
    if isinstance(found, sympy.Abs):  # a length; |x| = 5 is still to be solved
        return str(found.args[0]) not in ("x", "y") and _is_quantity(found.args[0])
    if isinstance(found, sympy.Add):  # a question may ask for m + n or ∠A + ∠B, but x + y = 5 is still to be solved
        return all(_is_known(part) for part in found.args)
    if isinstance(found, TrigonometricFunction):
        return _is_known(found.args[0])
    above = isinstance(found, sympy.Mul) and any(not isinstance(part, sympy.Pow) for part in found.args)
    return above and _is_name(found)


def turned(given: Node) -> Node:
    """Equation with the name on the left: ``5 = x`` as ``x = 5``. Any other node is returned as it is."""
    match given:
        case Relation(sides=(value, called), signs=("=",)) if name(called) is not None and is_number(value):
            return replace(given, sides=(called, value))
    return given


def _is_known(part: sympy.Basic) -> bool:
    """Whether the expression is an angle, or a name that does not usually stand for an unknown."""
    factors = [factor for factor in part.args if str(factor) != "angle"] if isinstance(part, sympy.Mul) else [part]
    is_angle = isinstance(part, sympy.Mul) and len(factors) < len(part.args)
    names = all(isinstance(factor, sympy.Symbol) and str(factor) not in _UNKNOWNS for factor in factors)
    return names and (is_angle or len(factors) == 1)


# Several names.


def in_order(named: Mapping[str, Node]) -> dict[str, Node] | None:
    """Values in alphabetical order of their names. None if they are given in another order and the names are not
    neighbours in the alphabet: then the order in the question is unknown."""
    names = sorted(named)
    if list(named) != names and "".join(names) not in ascii_lowercase:
        return None
    return {called: named[called] for called in names}


def is_numbered(named: Iterable[str]) -> bool:
    """Whether names are one letter (or lambda) with different numbers of one digit: ``x_1``, ``x_2``."""
    return {_NUMBERED.sub("", called) for called in named} in ({letter} for letter in (*ascii_lowercase, "lambda"))


def without_zeros(named: Mapping[str, Node]) -> dict[str, Node]:
    """The values, with the index zero removed from names: ``x`` for ``x_0``."""
    return {_ZERO.sub("", called): value for called, value in named.items()}


def value_of_point(gold: Relation, given: Mapping[str, Node]) -> Listing | None:
    """Coordinates of a gold point such as ``P = (1, 2)``, if it has as many as there are named values (``x = 1, y =
    2``) to compare with; None if `gold` is no such point."""
    match gold:
        case Relation(sides=(point, Listing(opening="(", items=items) as value), signs=("=",)):
            return value if len(items) == len(given) and str(name(point)).isupper() else None
    return None


def as_named(given: Node) -> dict[str, Node] | None:
    """Values by name, from ``y = 2, x = 1`` or ``(y, x) = (2, 1)``; None for any other node, also for a single name
    (``x = 1``), or if two names are equal."""
    relations = given.items if isinstance(given, Listing) else (given,)
    found: list[tuple[Node, Node]] = []
    for relation in relations:
        if not isinstance(relation, Relation) or not is_naming(relation):
            return None
        called, value = relation.sides[0], relation.sides[-1]
        if isinstance(given, Relation) and isinstance(called, Listing):
            if not isinstance(value, Listing) or value.opening == "{" or len(value.items) != len(called.items):
                return None
            if any(isinstance(item, Listing) for item in value.items):
                return None  # several points
            found += zip(called.items, value.items, strict=True)
        else:
            found.append((called, value))
    named = {title: value for side, value in found if (title := name(side)) is not None}
    return named if len(named) == len(found) > 1 else None


def has_one_name(listing: Listing) -> bool:
    """Whether all items, two or more, give values to the same name: ``x = 1, x = 2``."""
    found = {name(item.sides[0]) if isinstance(item, Relation) and is_naming(item) else None for item in listing.items}
    return len(listing.items) > len(found) == 1 and None not in found
