"""The verdict on a completion in mathematics.

    completion ─► final answer ─► structure ─► compared with the gold structure ─► right · wrong
                   extract          parse        compare                             │ unknown
                                                                       math-verify ◄─┘

docs/rewards.md defines what is right, with reasons.
"""

from __future__ import annotations

from functools import lru_cache

from stretto.rewards.functions import Undecided
from stretto.rewards.math.compare.comparison import same
from stretto.rewards.math.compare.equality import same_value
from stretto.rewards.math.compare.opinion import accepts, parsed
from stretto.rewards.math.extract.denial import is_open
from stretto.rewards.math.extract.final import FinalAnswer, final_answer, without_frame
from stretto.rewards.math.limits import LONGEST_COMPLETION, check_piece, check_symbolic
from stretto.rewards.math.parse.expressions import expression
from stretto.rewards.math.parse.reading import read
from stretto.rewards.math.parse.spelling import compact, spelled
from stretto.rewards.math.parse.structure import (
    Letter,
    Listing,
    Matrix,
    Node,
    Ratio,
    Relation,
    Scalar,
    Union,
    Unreadable,
)


def math(prompt: str, completion: str, answer: str) -> bool:
    """Whether the final answer of `completion` is the gold `answer`.

    Raises:
        Undecided: the gold answer is empty, or one of the two is beyond the limits or cannot be read.
    """
    if len(completion) > LONGEST_COMPLETION:
        raise Undecided(f"a completion of {len(completion):,} characters; at most {LONGEST_COMPLETION:,} are read")
    gold = gold_piece(answer)
    if completion.strip() == answer.strip():
        return True
    given = final_answer(without_frame(completion.replace("’", "'"), prompt.replace("’", "'")))
    if given is None or not given.text.strip():
        return False
    return judged(gold, given)


def gold(prompt: str, completion: str, answer: str) -> bool:
    """Check that `answer` can be a gold answer.

    Raises:
        Undecided: it cannot, with the reason.
    """
    piece = gold_piece(answer)
    try:
        _understand(read(piece.text))
    except Unreadable:
        try:
            parsed(_shown(piece))
        except Unreadable as error:
            raise Undecided(f"a gold answer that cannot be read: {error}") from None
    return True


@lru_cache(maxsize=1 << 16)
def gold_piece(answer: str) -> FinalAnswer:
    """The final answer of a gold answer.

    Raises:
        Undecided: there is none.
    """
    found = final_answer(without_frame(answer.replace("’", "'")))
    if found is None or not found.text.strip():  # a gold text without a marked answer is the answer itself
        found = FinalAnswer(answer.strip(), certain=False)
    check_piece(found.text)
    if not compact(spelled(found.text)):
        raise Undecided(f"the gold answer {answer[:60]!r} holds no answer")
    return found


def judged(gold: FinalAnswer, given: FinalAnswer) -> bool:
    """Compare two final answers: strictly first, and by math-verify where that is unknown."""
    check_piece(given.text)
    if is_open(gold.text) != is_open(given.text):
        return False
    if compact(spelled(gold.text)) == compact(spelled(given.text)):
        return True
    expected, found = _structure(gold), _structure(given)
    if expected is not None and found is not None:
        opinion = same(expected, found)
        if opinion is not None:
            return opinion
    try:
        return accepts(_shown(gold), _shown(given))
    except Unreadable as error:
        raise Undecided(str(error)) from None


def _understand(given: Node) -> None:
    """Check that every scalar of a structure can be read and evaluated.

    Raises:
        Unreadable: one cannot be read.
        Undecided: the value of one is beyond the limits.
    """
    match given:
        case Scalar(latex=latex):
            found = expression(latex)
            if same_value(found, found) is None:
                check_symbolic(latex)
        case Relation(sides=(*_, last)):
            _understand(last)
        case Listing(items=parts) | Union(parts=parts) | Ratio(parts=parts):
            for part in parts:
                _understand(part)
        case Matrix(rows=rows):
            for row in rows:
                for cell in row:
                    _understand(cell)
        case Letter(content=content):
            _understand(content)


def _structure(piece: FinalAnswer) -> Node | None:
    try:
        return read(piece.text)
    except Unreadable:
        return None


def _shown(piece: FinalAnswer) -> str:
    """The text in the form that math-verify expects."""
    return f"${spelled(piece.text)}$" if piece.certain else piece.text
