"""Compare two parsed answers. The result is True, False, or None if unknown; then math-verify decides.

The form of the gold answer decides which forms are accepted. For the gold value 5, ``x = 5`` is accepted, but ``2x =
5`` is not. For the gold equation of a line, 5 is wrong. For a gold inequality, the interval is accepted. For a gold
interval, an inequality is not: a model that repeats the question (``x > 5``, ``2x = 5``) would be right too often.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from string import ascii_lowercase

from stretto_verify.math.compare.naming import (
    as_named,
    has_one_name,
    in_order,
    is_naming,
    is_number,
    is_numbered,
    name,
    says_its_last_side,
    turned,
    value_of_point,
    without_zeros,
)
from stretto_verify.math.compare.relations import as_asked, as_interval, as_range, same_relation
from stretto_verify.math.compare.scalars import Opinion, all_of, any_of, approximated, same_scalar
from stretto_verify.math.parse.structure import (
    Dots,
    Letter,
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

_TOLD = re.compile(r"([0-9]{1,2})(?:\s*:\s*([0-9]{2}))?\s*(?:([ap])\s*\.?\s*m\.?|o'clock)", re.IGNORECASE)
_CALLED = re.compile(r"(?:12(?::00)?\s*)?(noon|midnight)", re.IGNORECASE)
_TEXTS = re.compile(r"\\text\{([^{}]*)\}")
_NOON = 12 * 60
_JOINT = re.compile(r"\s*,\s*(?:and\s)?|\s+and\s+")
_STANCES = {"true": "yes", "false": "no"}
_LETTERS = re.compile(r"[a-zA-Z0-9 ]+")


@dataclass(frozen=True)
class _Time:
    """Time of day in minutes since midnight. `sure`: whether it is known to be AM or PM; if not, twelve hours more or
    less are as likely."""

    minutes: int
    sure: bool


def same_time(gold: Node, answer: Node) -> bool | None:
    """Whether two times of day are the same. If AM or PM is unknown on one side, the times may differ by twelve hours.
    None if one is no time, or neither is in words: with AM or PM, "o'clock", "noon"."""
    one, other = _time(gold), _time(answer)
    if one is None or other is None or not (isinstance(gold, Words) or isinstance(answer, Words)):
        return None
    if one.sure and other.sure:
        return one.minutes == other.minutes
    return one.minutes % _NOON == other.minutes % _NOON


def _time(given: Node) -> _Time | None:
    match given:
        case Words(text=text) if (called := _CALLED.fullmatch(_TEXTS.sub(r" \1 ", text).strip())) is not None:
            return _Time(_NOON * (called[1].lower() == "noon"), sure=True)
        case Words(text=text) if (told := _TOLD.fullmatch(_TEXTS.sub(r" \1 ", text).strip())) is not None:
            hour, minute = int(told[1]), int(told[2] or 0)
            if not (1 <= hour <= 12 and minute < 60):
                return None
            half = (told[3] or "").lower()
            return _Time(60 * (hour % 12) + minute + _NOON * (half == "p"), sure=bool(half))
        case Ratio(parts=(Scalar(latex=hours), Scalar(latex=minutes))):
            is_time = hours.isdigit() and minutes.isdigit() and len(minutes) == 2
            if not is_time or int(hours) > 23 or int(minutes) > 59:
                return None
            return _Time(60 * int(hours) + int(minutes), sure=not 1 <= int(hours) <= 12)
    return None


def same(gold: Node, answer: Node) -> Opinion:
    """Whether the parsed `answer` equals the parsed `gold` answer; None if unknown. False if the answer is an equation
    of numbers that does not hold.

    Raises:
        Undecided: the numbers are too large.
    """
    answer = turned(answer)
    if isinstance(answer, Relation) and all(map(is_number, answer.sides)) and not says_its_last_side(answer, same):
        return False
    if isinstance(gold, Relation) and all(map(is_number, gold.sides)) and says_its_last_side(gold, same):
        gold = gold.sides[-1]  # 13 - 9 = 4
    named, given = as_named(gold), as_named(answer)
    if named is not None:
        if given is not None:
            return _same_values(named, given)
        if isinstance(answer, Listing) and not answer.ordered and is_numbered(named):
            return _same_listing(Listing("", "", tuple(named.values())), answer)  # x_1 and x_2 are the members of a set
        if isinstance(answer, Relation) and name(answer.sides[0]) in named:
            return False  # x = 1, 2 has one name; x = 1, y = 2 has two
        gold = Listing("(", ")", tuple(named.values()))
    elif given is not None:
        if isinstance(gold, Relation):
            if (point := value_of_point(gold, given)) is None:
                return False  # a range, an equation
            gold = point
        if (given := in_order(given)) is None:
            return False  # it is unknown in which order the question asks for the values
        opening, closing = ("", "") if isinstance(answer, Listing) else ("(", ")")
        answer = Listing(opening, closing, tuple(given.values()))
    if isinstance(answer, Relation) and is_naming(answer) and not isinstance(gold, Relation):
        return _same_as_named(gold, answer)
    return _same_form(gold, answer)


def _same_values(gold: Mapping[str, Node], answer: Mapping[str, Node]) -> Opinion:
    """Whether two sets of named values are the same, in any order; None if unknown. If the names differ, ``x_0`` counts
    as ``x``."""
    if gold.keys() != answer.keys():
        gold, answer = without_zeros(gold), without_zeros(answer)
    return gold.keys() == answer.keys() and _in_order([*gold.values()], [answer[called] for called in gold])


def _same_form(gold: Node, answer: Node) -> Opinion:
    """Whether two nodes are the same, by the rules for their types; None if unknown. Called by `same`, which deals with
    lists of named values (``x = 1, y = 2``) first."""
    match gold, answer:
        case Letter(), Letter():
            return gold.letter == answer.letter
        case Letter(), _:
            return any_of([_same_words(Words(gold.letter), answer), same(gold.content, answer)])
        case _, Letter():
            as_letter = _same_words(gold, Words(answer.letter))
            if as_letter or _is_letter(gold):
                return as_letter
            is_one = not isinstance(gold, Listing | Matrix | Union | Relation)
            several = isinstance(answer.content, Listing) and not answer.content.opening
            return False if is_one and several else same(gold, answer.content)  # a choice (A to J) stands for one value
        case Relation(), Relation():
            return _same_relations(gold, answer)
        case Relation(), _:
            asked = as_asked(gold)
            return None if asked is None and isinstance(answer, Union) else asked is not None and same(asked, answer)
        case (Words(), _) | (_, Words()):
            told = same_time(gold, answer)
            return _same_words(gold, answer) if told is None else told
        case Listing(), Listing():
            return _same_listing(gold, answer)
        case Listing(), Union():
            return _same_ranges(gold.items, answer)
        case (Union(), Listing(opening="", items=ranges)):
            return _same_ranges(ranges, gold)  # "x < 1 or x > 2" for intervals
        case (Union() | Listing(opening="(" | "[", items=(_, _)), Relation()):
            asked = as_range(answer)
            return False if asked is None else same(gold, asked)
        case Union(), Union():
            return _matched(gold.parts, answer.parts)
        case Matrix(), Matrix():
            return _same_matrix(gold, answer)
        case (Matrix() as matrix, Listing() as listing) | (Listing() as listing, Matrix() as matrix):
            rows = _as_rows(listing)
            return _same_vector(matrix, listing) if rows is None else _same_matrix(matrix, rows)
        case Ratio(), Ratio():
            return _same_ratio(gold, answer)
        case Scalar(), Scalar():
            found = same_scalar(gold, answer)
            return approximated(gold, answer, found) if answer.beside else found
        case (Ratio(parts=(_, _)) as ratio, Scalar() as other) | (Scalar() as other, Ratio(parts=(_, _)) as ratio):
            return _same_division(ratio, other)
        case (Listing(items=(only,)), Scalar()):
            return same(only, answer)
        case (Scalar(), Listing(items=(only,))):
            return same(gold, only)
        case (Scalar(), Listing(opening="", items=items)) if items:
            return all(_same_part(gold, item) for item in items)  # "1/2 or 0.5" gives one value twice
        case (Dots(), Dots()):
            return True
        case (Matrix() | Union(), _) | (Listing(), Matrix() | Union()):
            return None
    return False


def _same_relations(gold: Relation, answer: Relation) -> Opinion:
    r"""Whether two relations say the same, as ``x \in (0, 3)`` and ``0 < x < 3`` do; None if unknown."""
    if is_naming(gold) != is_naming(answer):
        member, bounded = (gold, answer) if is_naming(gold) else (answer, gold)
        match member:
            case Relation(sides=(called, Listing(opening="(" | "[") | Union() as values), signs=(r"\in",)):
                asked = as_range(bounded)
                return None if asked is None else name(called) in map(name, bounded.sides) and same(asked, values)
    return same_relation(gold, answer, same)


def _same_as_named(gold: Node, answer: Relation) -> Opinion:
    """Whether `gold` is the value that the relation `answer` states, as in ``x = 5``; None if unknown. False also if
    `answer` states no value (``2x = 5``)."""
    first, last = answer.sides[0], answer.sides[-1]
    if not says_its_last_side(answer, same):
        return False
    if isinstance(first, Listing) and (titles := [str(name(item)) for item in first.items]) != sorted(titles):
        return False  # points whose coordinates have no known order
    if answer.signs[-1] == r"\in" and isinstance(gold, Listing) and not gold.ordered:
        return not (isinstance(last, Listing) and last.ordered) and same(gold, last)  # an interval is no list
    return same(gold, replace(last, beside=answer.beside) if isinstance(last, Scalar) else last)


def _same_words(gold: Node, answer: Node) -> Opinion:
    """Whether two texts have the same letters; "true" is "yes", and the order of a list in words, or of a product such
    as ``zyx``, does not count. None if a text has no letters, False if one is a formula with other signs than letters,
    digits and spaces."""
    if any(isinstance(node, Scalar) and not _LETTERS.fullmatch(node.latex) for node in (gold, answer)):
        return False
    first, second = letters(gold), letters(answer)
    if not first or not second:
        return None
    first, second = _STANCES.get(first, first), _STANCES.get(second, second)
    if first == second or (len(_members(gold)) > 1 and _members(gold) == _members(answer)):
        return True
    return sorted(first) == sorted(second) and is_product(gold) and is_product(answer)


def _members(given: Node) -> list[str]:
    """Letters of each member of a list in words, sorted, so that "Bob and Alice" equals "Alice, Bob". Empty if `given`
    is no `Words`."""
    parts = _JOINT.split(given.text) if isinstance(given, Words) else []
    return sorted(letters(part) for part in parts)


def is_product(given: Node) -> bool:
    """Whether the words are a product that may be reordered, such as ``zyx``: at most four neighbours in the alphabet,
    but not "no". True for a node that is no `Words`."""
    text = "".join(sorted(given.text)) if isinstance(given, Words) else ""
    return len(text) < 5 and text in ascii_lowercase and text != "no"


def _is_letter(gold: Node) -> bool:
    """Whether the gold answer is a choice given by its letter (A to J) alone."""
    return isinstance(gold, Scalar | Words) and len(letters(gold)) == 1 and letters(gold) in "abcdefghij"


# Lists, tuples, sets, intervals.


def _same_listing(gold: Listing, answer: Listing) -> Opinion:
    if not gold.ordered and not answer.ordered:
        are_sets = answer.opening == "{" and (gold.opening == "{" or len(set(gold.items)) == len(gold.items))
        gold, answer = (replace(side, items=_once(side.items, are_sets=are_sets)) for side in (gold, answer))
    if len(answer.items) == 1 and answer.opening == "{" and gold.ordered:
        return same(gold, answer.items[0])  # the set of one point
    pairs = gold.items, answer.items
    if len(gold.items) != len(answer.items):
        return False
    if answer.opening == "{" and gold.ordered:
        return False  # a set has no order: {1, 2} is neither a pair nor an interval
    if gold.opening == "{" and answer.ordered:
        return False
    if gold.ordered and has_one_name(answer):
        return False  # "x = 1 or x = 2" is a set too
    has_dots = any(isinstance(item, Dots) for item in (*gold.items, *answer.items))
    if gold.ordered or has_dots:
        return False if _differ_in_ends(gold, answer) else _in_order(*pairs)
    if answer.ordered:
        return False if _differ_in_ends(answer, gold) else _in_order(*pairs)
    return _matched(*pairs)


def _once(items: Sequence[Node], *, are_sets: bool) -> tuple[Node, ...]:
    """Items without repetitions, if they are members of sets (`are_sets`) or points. Others may be roots, which keep
    repetitions, since they have multiplicities."""
    are_points = all(isinstance(item, Listing) and item.ordered for item in items)
    return tuple(dict.fromkeys(items)) if are_sets or are_points else tuple(items)


def _differ_in_ends(one: Listing, other: Listing) -> bool:
    """Whether the brackets of two lists contradict each other; the `other` list may have no order. For two items
    brackets must be equal, since they may be an interval; only a pair ``(a, b)`` may lack its brackets. Of more items,
    any brackets of `other` fit unless just one of them is round, as in ``(1, 2, 3]``."""
    ends = (one.opening, one.closing), (other.opening, other.closing)
    if len(one.items) > 2 and other.ordered:
        return ("(" in ends[1][0]) != (")" in ends[1][1])
    return len(one.items) == 2 and (ends[0] != ends[1] if other.ordered else ends[0] != ("(", ")"))


def _same_part(gold: Node, answer: Node) -> Opinion:
    """Whether two items of lists are the same; None if unknown. If `answer` is a choice with its content, only its
    letter counts. False if `answer` is a set in braces, as ``{5}``, and `gold` a single value, as 5."""
    if isinstance(answer, Listing) and answer.opening == "{" and not isinstance(gold, Listing | Union | Matrix | Words):
        return False
    return same(gold, Words(answer.letter) if isinstance(answer, Letter) else answer)


def _in_order(gold: Sequence[Node], answer: Sequence[Node]) -> Opinion:
    return all_of(_same_part(one, other) for one, other in zip(gold, answer, strict=True))


def _matched(gold: Sequence[Node], answer: Sequence[Node]) -> Opinion:
    """Whether each item has an equal partner; None if that is unknown or the numbers of items differ. A greedy match
    suffices, since equality is transitive (up to rounding)."""
    left = list(answer)
    if len(gold) != len(left):
        return None
    unknown = False
    for item in gold:
        opinions = [_same_part(item, other) for other in left]
        if True in opinions:
            del left[opinions.index(True)]
        elif None in opinions:
            unknown = True
        else:
            return False
    return None if unknown else True


def _as_rows(listing: Listing) -> Matrix | None:
    """``[[1,2],[3,4]]`` as a matrix; None if it is no list of two or more rows in square brackets."""
    rows = [row.items for row in listing.items if isinstance(row, Listing) and row.opening == "["]
    return Matrix(tuple(rows)) if len(rows) == len(listing.items) > 1 and listing.opening == "[" else None


def _same_matrix(gold: Matrix, answer: Matrix) -> Opinion:
    if [len(row) for row in gold.rows] != [len(row) for row in answer.rows]:
        return False
    cells = [[cell for row in matrix.rows for cell in row] for matrix in (gold, answer)]
    return _in_order(*cells)


def _same_vector(matrix: Matrix, listing: Listing) -> Opinion:
    """Whether a matrix of one column or row is the same as a tuple; None for a larger matrix, or if unknown. False if
    `listing` has no order."""
    if len(matrix.rows) > 1 and any(len(row) > 1 for row in matrix.rows):
        return None
    cells = [cell for row in matrix.rows for cell in row]
    return listing.ordered and len(cells) == len(listing.items) and _in_order(cells, listing.items)


def _same_ratio(gold: Ratio, answer: Ratio) -> Opinion:
    if len(gold.parts) != len(answer.parts):
        return False
    found = _in_order(gold.parts, answer.parts)
    if found is not False or _may_be_time(gold) or _may_be_time(answer):
        return found
    pairs = zip(pairwise(gold.parts), pairwise(answer.parts), strict=True)
    return all_of([_same_quotient(*one, _quotient(*other)) for one, other in pairs])


def _may_be_time(ratio: Ratio) -> bool:
    """Whether a ratio may be a time: two digits below 60 after each colon, as in ``12:30``, ``1:02:59``."""
    behind = [part.latex for part in ratio.parts[1:] if isinstance(part, Scalar)]
    return len(behind) == len(ratio.parts) - 1 and all(
        len(digits) == 2 and digits.isdigit() and int(digits) < 60 for digits in behind
    )


def _quotient(above: Node, below: Node) -> Scalar | None:
    if isinstance(above, Scalar) and isinstance(below, Scalar) and below.latex != "0":
        return Scalar(rf"\frac{{{above.latex}}}{{{below.latex}}}")
    return None


def _same_quotient(above: Node, below: Node, other: Scalar | None) -> Opinion:
    quotient = _quotient(above, below)
    return False if quotient is None or other is None else same_scalar(quotient, other)


def _same_division(ratio: Ratio, other: Scalar) -> Opinion:
    """Whether a ratio of two parts, as a quotient, equals a number; None if unknown. A ratio that may be a time of day
    must be equal as written."""
    above, below = ratio.parts
    quotient = _quotient(above, below)
    if quotient is None or not _may_be_time(ratio):
        return _same_quotient(above, below, other)
    return other.latex == quotient.latex or rf"\frac{{{other.latex.replace('/', '}{')}}}" == quotient.latex


def _same_ranges(gold: Sequence[Node], answer: Union) -> Opinion:
    """Whether inequalities such as ``x < 1 or x > 2``, or a list of intervals with endless ones, are the parts of a
    union; None if unknown, False for any other list."""
    endless = any(isinstance(item, Listing) and r"\infty" in str(item) for item in gold)  # no point has such an end
    found: list[Node | None] = []
    for item in gold:
        is_interval = endless and isinstance(item, Listing) and item.ordered and len(item.items) == 2
        found.append(as_interval(item) if isinstance(item, Relation) else item if is_interval else None)
    return False if None in found else _matched([item for item in found if item is not None], answer.parts)
