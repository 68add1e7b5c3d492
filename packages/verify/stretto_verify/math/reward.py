"""Judge a completion in mathematics.

    completion ─► final answer ─► structure ─► compared with the gold structure ─► right · wrong
                   extract          parse        compare                             │ unknown
                                                                       math-verify ◄─┘

docs/how_to/rewards.md defines which answers are right, with reasons.
"""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import replace
from fractions import Fraction
from functools import lru_cache

from stretto_verify.math.compare.comparison import is_product, same
from stretto_verify.math.compare.equality import same_value
from stretto_verify.math.compare.naming import is_naming, is_number, name, says_its_last_side
from stretto_verify.math.compare.opinion import accepts, parsed_whole
from stretto_verify.math.compare.scalars import Opinion
from stretto_verify.math.extract.denials import is_open
from stretto_verify.math.extract.final import FinalAnswer, final_answer, in_prose, without_frame
from stretto_verify.math.extract.statements import emphasized, stated, unsolved, weekday, winner
from stretto_verify.math.extract.subjects import is_of_another, subject
from stretto_verify.math.limits import LONGEST_COMPLETION, TooLong, check_piece, check_symbolic, limited_time
from stretto_verify.math.parse.expressions import expression
from stretto_verify.math.parse.forms import undeclared
from stretto_verify.math.parse.numerals import counted, in_figures
from stretto_verify.math.parse.reading import read
from stretto_verify.math.parse.spelling import compact, spelled
from stretto_verify.math.parse.structure import (
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
)
from stretto_verify.math.parse.units import MAGNITUDES
from stretto_verify.thoughts import opened, said
from stretto_verify.verdicts import Undecided

_DECIMAL = re.compile(r"[^0-9,()\[\]]*[0-9]+\.[0-9]+[^0-9,()\[\]]*")
_MODULUS = re.compile(r"mod(?![a-z])[\s{}()\\:]*([0-9]+|[a-z])")
_RESIDUE = re.compile(r"([0-9]+)[\s$]*(?:\\p|\(\s*\\?(?:text\{\s*)?|\\text\{\s*\()mod(?![a-z])[\s{}\\:]*([0-9]+)")
_SUBJECT = (  # of a question that has one
    r"\W*(?:it|this|that|(?:(?:the|this|that|given)\s+)*(?:answer|claim|conclusion|equation|expression|figure|formula|"
    r"function|number|integer|event|curve|graph|identity|implication|inequality|integral|limit|matrix|map|operation|proposition|quadrilateral|"
    r"relation|result|sequence|series|set|statement|solution|system|theorem|triangle)s?)\s+"
)
_TEXTS = re.compile(r"\\text\{([^{}]*)\}")
_ONLY_SUBJECT = re.compile(rf"{_SUBJECT}(?:is|are|will|must|would|should)\b", re.IGNORECASE)
_VERB = re.compile(rf"^{_SUBJECT}([a-z]+s)[.!]?$", re.IGNORECASE)  # the series diverges
_KIND = re.compile(  # odd function
    r"^(?:segment|line|point|angle|triangle|quadrilateral) (?=[A-Z]{1,4}$)"
    r"|(?<=[a-z]) (?:angle|event|function|graph|matrix|number|sequence|series|triangle)s?\.?$"
)
_CONNECTIVES = {
    re.compile(rf"\\(?:{names})(?![a-zA-Z])|{sign}"): f" {sign} "
    for sign, names in {"∧": "land|wedge", "∨": "lor|vee", "⇒": "implies|Rightarrow", "⇔": "iff|Leftrightarrow"}.items()
}
_LOGIC = re.compile(  # letters joined by connectives
    r"(?=.*[∧∨⇒⇔])(?:[\sa-zA-Z()\[\]{}$¬~'∧∨⇒⇔]|_\{?[0-9]+|\\(?:neg|lnot|sim|overline|bar|forall|exists|left|right)(?![a-z]))+"
)
_OPERATORS = ("=", "×", "÷", "≈", r"\times", r"\cdot", r"\div", r"\approx")
_ASKED_PERCENT = re.compile(r"%|per ?cent|percentage", re.IGNORECASE)
_BASES = {"binary": "2", "ternary": "3", "octal": "8", "hexadecimal": "16"}
_BASE = re.compile(r"\b(?:base[\s$-]{0,3}([0-9]{1,2}|[a-z]{3,7})|(binary|ternary|octal|hexadecimal))\b", re.IGNORECASE)
_COMMA = re.compile(  # three digits are a thousand
    r"([^0-9,()\[\]]*[0-9]+),((?:[0-9]{1,2}|[0-9]{4,})[^0-9,()\[\]]*)"
)


def math(prompt: str, completion: str, answer: str) -> bool:
    """Whether the final answer of `completion` equals the gold `answer`. `prompt`: the question; a repetition of it
    is no answer, and it may end inside a thought. What it fixes, such as the base of a number, may be left out.

    Raises:
        Undecided: the gold answer is empty, exceeds the limits, or cannot be read. (A completion for which this holds,
            or that takes too long, is wrong.)
    """
    expected = gold_piece(answer)
    if completion.strip() == answer.strip() and not opened(prompt):
        return True
    with suppress(TooLong, Undecided), limited_time():
        if len(completion) <= LONGEST_COMPLETION and _is_right(prompt, completion, answer, expected):
            return True
    return not gold(prompt, completion, answer)  # raises Undecided if the gold answer is at fault


def _is_right(prompt: str, completion: str, answer: str, expected: FinalAnswer) -> bool:
    given = final_answer(without_frame(completion.replace("’", "'"), prompt.replace("’", "'")))
    if given is None and (word := emphasized(said(completion, prompt))) is not None:
        given = FinalAnswer(word, certain=True)
    if given is None or not given.text.strip():
        return False
    if "boxed" not in completion and _is_unfinished(completion):
        return False
    if (named := subject(answer)) and is_of_another(named, completion, given.text):
        return False
    return judged(expected, given, prompt)


@lru_cache(maxsize=1 << 16)
def _checked(answer: str) -> str:
    """Reason why `answer` cannot be a gold answer; empty if it can. Raises Undecided if it is empty or too large."""
    piece = gold_piece(answer)
    try:
        _understand(read(piece.text))
    except Unreadable:
        try:
            parsed_whole(_shown(piece))
        except Unreadable as error:
            return f"a gold answer that cannot be read: {error}"
        except Undecided as error:
            return str(error)
    except Undecided as error:
        return str(error)
    return ""


def gold(prompt: str, completion: str, answer: str) -> bool:
    """Check that `answer` can be a gold answer; `prompt` and `completion` are not used. Returns True, or raises.

    Raises:
        Undecided: it cannot, with the reason.
    """
    if reason := _checked(answer):
        raise Undecided(reason)
    return True


@lru_cache(maxsize=1 << 16)
def gold_piece(answer: str) -> FinalAnswer:
    """Extract the final answer from a gold answer; all of it, if none is found in it.

    Raises:
        Undecided: there is none, or it exceeds the limits.
    """
    text = answer.replace("’", "'")
    if "boxed{" in text:  # no gold answer is cut off
        text += "}" * (text.count("{") - text.count("}"))
    found = final_answer(without_frame(text), is_all=True)
    if found is None or not found.text.strip():  # a gold text without a marked answer is the answer itself
        found = FinalAnswer(answer.strip(), certain=False)
    check_piece(found.text)
    if not compact(spelled(found.text)):
        raise Undecided(f"the gold answer {answer[:60]!r} holds no answer")
    return found


def judged(gold: FinalAnswer, given: FinalAnswer, prompt: str = "") -> bool:
    """Whether two final answers are equal: compared strictly, else by math-verify; Undecided if neither can, or if
    `given` exceeds the limits. False also if `given` breaks off, has a further answer, has another modulus or other
    connectives, or only repeats an equation of the question, `prompt`."""
    check_piece(given.text)
    given = _with_point(given, gold)
    if _is_unfinished(given.text) or _differ_in_connectives(gold.text, given.text):
        return False
    if is_open(gold.text) != is_open(given.text) or _differ_in_modulus(gold.text, given.text):
        return False
    if compact(_TEXTS.sub(r"\1", spelled(gold.text))) == compact(_TEXTS.sub(r"\1", spelled(given.text))):
        return True
    try:
        expected, found = _structure(gold.text), _structure(given.text, is_whole=True)
    except LeftOver:
        return False
    if prompt and _is_written_back(expected, given, found, prompt):
        return False
    told = _told(given.text, found) if isinstance(expected, Scalar) and _is_worded(found) else None
    if told is not None:
        return bool(told.text) and judged(gold, told, prompt)
    if expected is not None and found is not None:
        opinion = same(expected, found)
        if not opinion and "%" not in spelled(gold.text) and (asked := _as_asked(prompt, found)) is not found:
            opinion = same(expected, asked)
        if opinion is False and isinstance(expected, Words) and isinstance(found, Words):
            opinion = _same_statement(expected.text, found.text)
        plain = undeclared(spelled(given.text))
        if not opinion and plain != spelled(given.text) and undeclared(spelled(gold.text)) == spelled(gold.text):
            other = _structure(plain)  # the declaration may repeat the question
            opinion = opinion if other is None else same(expected, other)
        if opinion is not None:
            return opinion
    if isinstance(expected, Letter) or (isinstance(expected, Words) and not is_product(expected)):
        return False  # math-verify knows only formulas
    try:
        return accepts(_shown(gold), _shown(given))
    except Unreadable as error:
        raise Undecided(str(error)) from None


def _as_asked(prompt: str, found: Node) -> Node:
    """The parsed answer without the base of its number, or the magnitude behind its number (million, percent), if the
    question, `prompt`, names that base or magnitude, or is unknown for percent; else unchanged."""
    if isinstance(found, Relation):
        last = _as_asked(prompt, found.sides[-1])
        if last is not found.sides[-1] and all(map(is_number, found.sides)):
            return last if says_its_last_side(found, same) else found  # 1/2 = 50%
        return found if last is found.sides[-1] else replace(found, sides=(*found.sides[:-1], last))
    if isinstance(found, Listing):
        items = tuple(_as_asked(prompt, one) for one in found.items)
        return found if items == found.items else replace(found, items=items)
    if not isinstance(found, Scalar) or (found.scale == 1 and not found.unit.startswith("base ")):
        return found
    if found.scale != 1:
        is_named = any(size == found.scale and word in prompt for word, size in MAGNITUDES.items())
        if found.scale == Fraction(1, 100) and not found.unit and (not prompt or _ASKED_PERCENT.search(prompt)):
            return replace(found, scale=Fraction(1), unit="percent")
        return replace(found, scale=Fraction(1)) if is_named else found
    named = {_BASES.get(one.lower(), str(counted(one) or one)) for pair in _BASE.findall(prompt) for one in pair if one}
    return replace(found, unit="") if found.unit.removeprefix("base ") in named else found


def _same_statement(gold: str, given: str) -> Opinion:
    """Whether two texts are equal, of which one or both may be a sentence: "The statement is true" for "true"; None if
    unknown. A sentence about one of several, such as "Bob is taller", says more than its predicate."""
    expected, found = (
        (stated(text) if _ONLY_SUBJECT.match(text) else None)
        or (winner(text) or weekday(text) or unsolved(text) or _VERB.sub(r"\1", text))
        for text in (gold, given)
    )
    return same(Words(expected), Words(found)) or same(Words(expected), Words(_KIND.sub("", found)))


def _differ_in_modulus(gold: str, given: str) -> bool:
    """Whether both texts name a modulus, and not the same; or only the second one does, and its number is no remainder:
    ``42 (mod 5)``."""
    if "mod" not in given:
        return False
    if "mod" not in gold:
        residue = _RESIDUE.search(given)
        return residue is not None and int(residue[1]) >= int(residue[2])
    one, other = ({found[1] for found in _MODULUS.finditer(text)} for text in (gold, given))
    return bool(one and other) and one != other


def _is_unfinished(text: str) -> bool:
    """Whether the text ends in an equals, times or division sign, behind which something is missing. False if another
    sign stands directly before it, as in ``==``."""
    end = text[-40:].rstrip("$* \t\n")
    return end.endswith(_OPERATORS) and end[-2:-1] not in {*"-=+×/<>"}


def _differ_in_connectives(gold: str, given: str) -> bool:
    """Whether `gold` joins letters by connectives, and `given` has others; or its letters are in another order, which
    matters to an implication and to several kinds of connectives. False for a `gold` of another form."""
    for form, sign in _CONNECTIVES.items():
        gold, given = form.sub(sign, gold), form.sub(sign, given)
    if _LOGIC.fullmatch(gold) is None:
        return False
    last = re.split(r"=|\\equiv", given)[-1]
    one, other = (re.findall("[∧∨⇒⇔]", text) for text in (gold, last))
    return one != other or ((len({*one}) > 1 or "⇒" in one) and compact(gold) != compact(last))


def _is_worded(found: Node | None) -> bool:
    r"""Whether words are a part of what was parsed, so that it has no value: ``\text{a loss of }5``. True also if
    nothing was (None)."""
    return found is None or isinstance(found, Words) or (isinstance(found, Scalar) and r"\text" in found.latex)


def _told(text: str, found: Node | None) -> FinalAnswer | None:
    """The final answer, a value, in a text of words that contains a value in digits or in words; None for other
    texts."""
    if isinstance(found, Words) and (written := in_figures(found.text)) != found.text:
        return final_answer(written, is_all=True)
    return in_prose(text)


def _with_point(given: FinalAnswer, gold: FinalAnswer) -> FinalAnswer:
    """The answer with a decimal comma replaced by a point (``2,75`` becomes 2.75) if the gold answer is a decimal.
    (Otherwise ``2,75`` is a list.)"""
    if _DECIMAL.fullmatch(gold.text) is None or (found := _COMMA.fullmatch(given.text)) is None:
        return given
    return FinalAnswer(f"{found[1]}.{found[2]}", given.certain)


def _is_written_back(gold: Node | None, given: FinalAnswer, found: Node | None, prompt: str) -> bool:
    """Whether the answer `given` only repeats an unsolved equation or an inequality of the question, `prompt`. `gold`
    and `found`: both answers, parsed; None: they cannot be."""
    relations = [one for one in (found.items if isinstance(found, Listing) else (found,)) if isinstance(one, Relation)]
    if not relations or compact(spelled(given.text)) not in _asked(prompt):
        return False
    first = relations[0]
    is_solved = not isinstance(gold, Relation) or name(gold.sides[0]) is not None
    return is_solved and (name(first.sides[0]) is None or (isinstance(gold, Listing | Union) and not is_naming(first)))


@lru_cache(maxsize=256)
def _asked(prompt: str) -> str:
    return compact(spelled(prompt))


def _understand(given: Node) -> None:
    """Check that every scalar of a structure can be parsed and evaluated.

    Raises:
        Unreadable: a scalar cannot be parsed.
        Undecided: its value exceeds the limits.
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


def _structure(text: str, *, is_whole: bool = False) -> Node | None:
    """Parse a text; None if it cannot be read.

    Raises:
        LeftOver: with `is_whole`, a part outside the structure could be an answer too.
    """
    try:
        return read(text)
    except Unreadable as error:
        if is_whole and isinstance(error, LeftOver):
            raise
        return None


def _shown(piece: FinalAnswer) -> str:
    """The text of a final answer in the form that math-verify expects."""
    return f"${spelled(piece.text)}$" if piece.certain else piece.text
