r"""Is an answer the gold answer? True, False, or None where this file cannot tell and math-verify is asked.

The gold answer says what is asked for: where it gives a value, ``x = 5`` is read as 5, and ``2x = 5`` as nothing; where
it gives the equation of a line, 5 is no answer; where it gives an inequality, the interval says the same, and not the
other way round (a model that writes the question back, as ``x > 5`` or ``2x = 5``, would be right too often).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise

from stretto.rewards.math_naming import (
    as_named,
    as_points,
    has_one_name,
    in_order_of,
    in_usual_order,
    is_naming,
    is_number,
    is_system,
    name,
    names,
    says_its_last_side,
)
from stretto.rewards.math_relations import as_asked, as_interval, as_one, as_value, same_relation
from stretto.rewards.math_scalars import Opinion, any_of, same_scalar
from stretto.rewards.math_structure import (
    Choice,
    Clock,
    Dots,
    Listing,
    Matrix,
    Node,
    Ratio,
    Relation,
    Scalar,
    Union,
    Words,
    letters,
)


def same(gold: Node, answer: Node) -> Opinion:
    """Does `answer` say what `gold` says?

    Raises:
        Undecided: its numbers are too large.
    """
    if isinstance(answer, Relation) and all(map(is_number, answer.sides)) and not says_its_last_side(answer, same):
        return False
    gold, answer = _simplest(gold), _simplest(answer)
    named, given = as_named(gold), as_named(answer)
    if named is not None and given is not None and not (isinstance(gold, Listing) and isinstance(answer, Listing)):
        turned = in_order_of(named, given)
        return turned is not None and same(named.sides[-1], turned.sides[-1])
    if given is not None and named is None:
        if isinstance(gold, Relation) and gold.signs != ("=",):
            return False  # a range
        answer = _in_usual_order(answer, given)
    if isinstance(answer, Relation) and is_naming(answer) and not isinstance(gold, Relation):
        return _same_as_named(gold, answer)
    if isinstance(answer, Listing) and is_system(answer) and not _names_something(gold):
        return False
    return _same_form(gold, answer)


def _same_form(gold: Node, answer: Node) -> Opinion:
    """Each form against each other one."""
    match gold, answer:
        case Choice(), Choice():
            return gold.letter == answer.letter
        case Choice(), _:
            return any_of([_same_words(Words(gold.letter), answer), same(gold.content, answer)])
        case _, Choice():
            return any_of([_same_words(gold, Words(answer.letter)), same(gold, answer.content)])
        case Relation(), Relation():
            return same_relation(gold, answer, same)
        case Relation(), _:
            asked = as_asked(gold)
            return None if asked is None and isinstance(answer, Union) else asked is not None and same(asked, answer)
        case (Words(), _) | (_, Words()):
            return _same_words(gold, answer)
        case Listing(), Listing():
            return _same_listing(gold, answer)
        case Listing(), Union():
            return _same_ranges(gold.items, answer)
        case Union(), Union():
            return _matched(gold.parts, answer.parts)
        case Matrix(), Matrix():
            return _same_matrix(gold, answer)
        case (Matrix() as matrix, Listing() as listing) | (Listing() as listing, Matrix() as matrix):
            return _same_vector(matrix, listing)
        case Clock(), Clock():
            return gold == answer
        case (Clock() as clock, Ratio() as time) | (Ratio() as time, Clock() as clock):
            return _is_time(clock, time)
        case Ratio(), Ratio():
            return _same_ratio(gold, answer)
        case Scalar(), Scalar():
            return same_scalar(gold, answer)
        case (Ratio(parts=(_, _)) as ratio, Scalar() as other) | (Scalar() as other, Ratio(parts=(_, _)) as ratio):
            return _same_division(ratio, other)
        case (Listing(items=(only,)), Scalar()):
            return same(only, answer)
        case (Scalar(), Listing(items=(only,))):
            return same(gold, only)
        case (Scalar(), Listing(opening="", items=items)) if items:
            return all(same(gold, item) for item in items)  # "1/2 or 0.5" is one answer, told twice
        case (Dots(), Dots()):
            return True
        case (Matrix(), _) | (_, Matrix()) | (Union(), _) | (_, Union()):
            return None
    return False


def _simplest(given: Node) -> Node:
    if isinstance(given, Relation):
        return as_value(given)
    one = as_one(given)
    return as_points(one) or one if isinstance(one, Listing) and not one.opening else one


def _names_something(gold: Node) -> bool:
    relations = gold.items if isinstance(gold, Listing) else (gold,)
    return any(isinstance(item, Relation) for item in relations)


def _in_usual_order(answer: Node, given: Relation) -> Node:
    """An answer that names several values (`given`: in the form of `as_named`), where the gold answer names none."""
    turned = in_usual_order(given)
    if isinstance(answer, Relation):
        return turned
    pairs = zip(_items(turned.sides[0]), _items(turned.sides[-1]), strict=True)
    return Listing("", "", tuple(Relation(sides, ("=",)) for sides in pairs))


def _items(given: Node) -> tuple[Node, ...]:
    return given.items if isinstance(given, Listing) else (given,)


def _same_as_named(gold: Node, answer: Relation) -> Opinion:
    """Is `gold` what the answer gives a name to?"""
    first, last = answer.sides[0], answer.sides[-1]
    if not says_its_last_side(answer, same):
        return False
    if isinstance(gold, Listing):
        if (called := as_named(gold)) is not None and name(first) in map(name, _items(called.sides[0])):
            return False  # x = 1, 2 gives one name what x = 1, y = 2 gives to two
        if answer.signs[-1] == r"\in" and not gold.ordered and isinstance(last, Listing) and last.ordered:
            return False  # an interval
    return same(gold, last)


def _same_words(gold: Node, answer: Node) -> Opinion:
    """The same letters. Of a formula only a product of letters is a text: ``ab - c`` is none."""
    if any(isinstance(node, Scalar) and not _LETTERS.fullmatch(node.latex) for node in (gold, answer)):
        return False
    first, second = letters(gold), letters(answer)
    if not first or not second:
        return None
    if first == second:
        return True
    is_product = len(first) < 5 and sorted(first) == sorted(second) and _is_lower(gold) and _is_lower(answer)
    return None if is_product else False  # xyz and zyx


def _is_lower(node: Node) -> bool:
    return isinstance(node, Words) and node.text.islower() and node.text.isalpha()


_LETTERS = re.compile(r"[a-zA-Z0-9 ]+")


# Lists, tuples, sets, intervals.


def _same_listing(gold: Listing, answer: Listing) -> Opinion:
    pairs = gold.items, answer.items
    if len(gold.items) != len(answer.items):
        return False if not gold.items or not answer.items else _same_distinct(gold, answer)
    if answer.opening == "{" and (gold.ordered or names(gold)) and not _names_something(answer):
        return False  # a set has no order: {1, 2} is no pair, and no interval
    if gold.opening == "{" and answer.ordered and names(gold) is None:
        return False
    if gold.ordered and has_one_name(answer):
        return False  # "x = 1 or x = 2" is a set too
    has_dots = any(isinstance(item, Dots) for item in (*gold.items, *answer.items))
    if gold.ordered or has_dots:
        return False if _differ_in_ends(gold, answer) else _in_order(*pairs)
    if answer.ordered:
        return False if _differ_in_ends(answer, gold) else _in_order(*pairs)
    if names(gold) is not None and not any(isinstance(item, Relation) for item in answer.items):
        return _in_order(*pairs)  # a = 1, b = 2 may be answered by 1, 2
    return _matched(*pairs)


def _differ_in_ends(one: Listing, other: Listing) -> bool:
    """Two items in brackets may be an interval; only ``(a, b)`` is a pair as well, whose brackets may be left out."""
    ends = (one.opening, one.closing), (other.opening, other.closing)
    if len(one.items) > 2 and other.ordered:
        return ("(" in ends[1][0]) != (")" in ends[1][1])
    return len(one.items) == 2 and (ends[0] != ends[1] if other.ordered else ends[0] != ("(", ")"))


def _same_distinct(gold: Listing, answer: Listing) -> Opinion:
    """Sets whose lists repeat an item: ``{1, 2, 2}`` is ``{1, 2}``."""
    if gold.ordered or answer.ordered:
        return False
    first, second = _distinct(gold.items), _distinct(answer.items)
    return _matched(first, second) if len(first) == len(second) else False


def _distinct(items: Sequence[Node]) -> list[Node]:
    kept: list[Node] = []
    for item in items:
        if not any(same(item, other) for other in kept):
            kept.append(item)
    return kept


def _in_order(gold: Sequence[Node], answer: Sequence[Node]) -> Opinion:
    unknown = False
    for one, other in zip(gold, answer, strict=True):
        found = same(one, other)
        if found is False:
            return False
        unknown |= found is None
    return None if unknown else True


def _matched(gold: Sequence[Node], answer: Sequence[Node]) -> Opinion:
    """Is there a partner for each? Sameness is transitive but for rounding, so the first that fits will do."""
    left = list(answer)
    if len(gold) != len(left):
        return None
    unknown = False
    for item in gold:
        opinions = [same(item, other) for other in left]
        if True in opinions:
            del left[opinions.index(True)]
        elif None in opinions:
            unknown = True
        else:
            return False
    return None if unknown else True


def _same_matrix(gold: Matrix, answer: Matrix) -> Opinion:
    if [len(row) for row in gold.rows] != [len(row) for row in answer.rows]:
        return False
    cells = [[cell for row in matrix.rows for cell in row] for matrix in (gold, answer)]
    return _in_order(*cells)


def _same_vector(matrix: Matrix, listing: Listing) -> Opinion:
    """One column, or one row, against a tuple; a matrix against a list of its rows."""
    if not listing.ordered:
        return None if listing.opening == "" else False
    if len(matrix.rows) == 1 or all(len(row) == 1 for row in matrix.rows):
        cells = [cell for row in matrix.rows for cell in row]
        return len(cells) == len(listing.items) and listing.closing in ")]" and _in_order(cells, listing.items)
    rows = [item.items for item in listing.items if isinstance(item, Listing) and item.ordered]
    return len(rows) == len(listing.items) and _same_matrix(matrix, Matrix(tuple(rows)))


def _is_time(clock: Clock, time: Ratio) -> bool:
    """Is a time of day without "am" and "pm", in twelve hours or in twenty-four, that one?"""
    parts = [int(part.latex) for part in time.parts if isinstance(part, Scalar) and part.latex.isdigit()]
    if len(parts) != len(time.parts) or len(parts) != 2:
        return False
    minutes = 60 * parts[0] + parts[1]
    return minutes == clock.minutes + 720 * (clock.half == "p") or (
        minutes < 780 and minutes % 720 == clock.minutes and parts[0] > 0
    )


def _same_ratio(gold: Ratio, answer: Ratio) -> Opinion:
    if len(gold.parts) != len(answer.parts):
        return False
    found = _in_order(gold.parts, answer.parts)
    if found is not False or _may_be_time(gold) or _may_be_time(answer):
        return found
    opinions: list[Opinion] = []
    for (one, two), (three, four) in zip(pairwise(gold.parts), pairwise(answer.parts), strict=True):
        quotient = _quotient(three, four)
        opinions.append(False if quotient is None else _same_quotient(one, two, quotient))
    return False if False in opinions else None if None in opinions else True


def _may_be_time(ratio: Ratio) -> bool:
    """``12:30``, ``1:02:59``: two digits behind each colon."""
    behind = [part.latex for part in ratio.parts[1:] if isinstance(part, Scalar)]
    return len(behind) == len(ratio.parts) - 1 and all(
        len(digits) == 2 and digits.isdigit() and int(digits) < 60 for digits in behind
    )


def _quotient(above: Node, below: Node) -> Scalar | None:
    if isinstance(above, Scalar) and isinstance(below, Scalar) and below.latex != "0":
        return Scalar(rf"\frac{{{above.latex}}}{{{below.latex}}}")
    return None


def _same_quotient(above: Node, below: Node, other: Scalar) -> Opinion:
    quotient = _quotient(above, below)
    return False if quotient is None else same_scalar(quotient, other)


def _same_division(ratio: Ratio, other: Scalar) -> Opinion:
    """A ratio as a number; what may be a time of day only as it stands there."""
    above, below = ratio.parts
    quotient = _quotient(above, below)
    if quotient is None or not _may_be_time(ratio):
        return _same_quotient(above, below, other)
    return other.latex == quotient.latex or rf"\frac{{{other.latex.replace('/', '}{')}}}" == quotient.latex


def _same_ranges(gold: Sequence[Node], answer: Union) -> Opinion:
    """``x < 1 or x > 2`` against intervals."""
    intervals = [as_interval(item) if isinstance(item, Relation) else None for item in gold]
    found = [interval for interval in intervals if interval is not None]
    return _matched(found, answer.parts) if len(found) == len(gold) else False
