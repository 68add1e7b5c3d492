r"""Check whether a parsed structure contains every candidate of the text that it was parsed from.

A *candidate* is anything that could be an answer by itself: a digit, the letter of a choice, a stance (yes, false), a
formula. Words may be skipped, since answers are embedded in sentences and numbers have units. Candidates must not be
skipped: a text with a candidate that its structure lacks is no answer.
"""

from __future__ import annotations

import re
from collections import Counter

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
)

_COMMAND = re.compile(r"\\[a-zA-Z]+")
_STANCE = r"yes|no|true|false"
_CANDIDATE = re.compile(rf"[0-9]|(?<![A-Za-z'])[A-J](?![A-Za-z'])|(?<![A-Za-z])(?:{_STANCE})(?![A-Za-z])")
_ARTICLE = re.compile(r"(?<![A-Za-z])(?:A(?= [a-z]{2})|I(?= [a-z]|'))")
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
    """Number of occurrences of each digit, choice letter and stance in a text."""
    return Counter(_CANDIDATE.findall(_ARTICLE.sub(" ", _COMMAND.sub(" ", text))))


def accounts_for(given: Node, text: str) -> bool:
    """Whether the structure `given` contains every candidate of the text that it was parsed from."""
    return candidates(text) <= candidates(" ".join(texts(given)))


def texts(given: Node) -> list[str]:
    """Texts of all parts of a structure, such as LaTeX, units and words."""
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
