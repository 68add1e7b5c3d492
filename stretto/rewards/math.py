"""Right or wrong for answers of mathematics.

    completion ─► final answer ─► structure ─► compared with the gold answer's ─► right · wrong
    extraction      spelling       reading       comparison, equality                │ cannot tell
                                                                       math-verify ◄─┘

Every step is a file of its own (``math_extraction``, ``math_spelling``, ...). docs/rewards.md says what counts as
right, and why.
"""

from __future__ import annotations

import re
from functools import lru_cache

from stretto.rewards.functions import Undecided
from stretto.rewards.math_comparison import same
from stretto.rewards.math_denial import is_open
from stretto.rewards.math_extraction import Piece, final_answer, without_frame
from stretto.rewards.math_limits import LONGEST_ANSWER, check_piece
from stretto.rewards.math_opinion import accepts, parsed
from stretto.rewards.math_reading import read, understand
from stretto.rewards.math_scalars import number
from stretto.rewards.math_spelling import compact, spelled
from stretto.rewards.math_structure import Node, Scalar, Unreadable

_COMMA_DECIMAL = re.compile(r"([-+]?[0-9]+),([0-9]{1,2}|[0-9]{4,})")  # three digits would be thousands


def math(prompt: str, completion: str, answer: str) -> bool:
    """Is the final answer of `completion` the gold `answer`?

    Raises:
        Undecided: the gold answer has no final answer in it, or an answer is beyond the limits, or cannot be read.
    """
    if len(completion) > LONGEST_ANSWER:
        raise Undecided(f"an answer of {len(completion):,} characters; at most {LONGEST_ANSWER:,} are read")
    gold = gold_piece(answer)
    if completion.strip() == answer.strip():
        return True
    given = final_answer(without_frame(completion.replace("’", "'"), prompt.replace("’", "'")))
    if given is None or not given.text.strip():
        return False
    return judged(gold, given)


def gold(prompt: str, completion: str, answer: str) -> bool:
    """Can `answer` be a gold answer?

    Raises:
        Undecided: it cannot; the reason says why.
    """
    piece = gold_piece(answer)
    try:
        understand(read(piece.text))
    except Unreadable:
        try:
            parsed(_shown(piece))
        except Unreadable as error:
            raise Undecided(f"a gold answer that cannot be read: {error}") from None
    return True


@lru_cache(maxsize=1 << 16)
def gold_piece(answer: str) -> Piece:
    """The final answer of a gold answer.

    Raises:
        Undecided: there is none.
    """
    found = final_answer(without_frame(answer.replace("’", "'")))
    if found is None or not found.text.strip():  # what nobody commits himself to in an answer may be a gold answer
        found = Piece(answer.strip(), certain=False)
    check_piece(found.text)
    if not compact(spelled(found.text)):
        raise Undecided(f"the gold answer {answer[:60]!r} holds no answer")
    return found


def judged(gold: Piece, given: Piece) -> bool:
    """Compare two final answers, first strictly, then as math-verify does."""
    check_piece(given.text)
    if is_open(gold.text) != is_open(given.text):
        return False
    if compact(spelled(gold.text)) == compact(spelled(given.text)):
        return True
    expected, found = _structure(gold), _structure(given)
    if _is_decimal(expected) and (comma := _COMMA_DECIMAL.fullmatch(given.text)) is not None:
        found = Scalar(f"{comma[1]}.{comma[2]}")  # 2,74 where a decimal is asked for
    if expected is not None and found is not None:
        opinion = same(expected, found)
        if opinion is not None:
            return opinion
    try:
        return accepts(_shown(gold), _shown(given))
    except Unreadable as error:
        raise Undecided(str(error)) from None


def _is_decimal(expected: Node | None) -> bool:
    plain = number(expected.latex) if isinstance(expected, Scalar) else None
    return plain is not None and bool(plain.places)


def _structure(piece: Piece) -> Node | None:
    try:
        return read(piece.text)
    except Unreadable:
        return None


def _shown(piece: Piece) -> str:
    """As math-verify expects a formula."""
    return f"${spelled(piece.text)}$" if piece.certain else piece.text
