"""Corrections behind an answer: "The answer is 42. No, 43." gives 43, "42. But this misses a case." nothing."""

from __future__ import annotations

import re

from stretto_verify.math.extract.beside import REFUSED
from stretto_verify.math.parse.numerals import counted
from stretto_verify.math.parse.units import NUMBER_WORD

_PIECE = rf"(?P<piece>\$[^$\n]{{1,80}}\$|[-+−]?[0-9]+(?:[.,/][0-9]+)?|{NUMBER_WORD}|\(?(?-i:[A-J])\)?)[.!]?\s*$"
_NO_ANSWER = r"(?:valid|allowed|possible|correct|right|(?:an?|the) (?:valid )?(?:answer|solution|root))\b"
_SUBJECT = (
    r"(?:(?:(?:it|that|the (?:(?:correct|right|actual|true|real|new|final) [a-z]+|answer|total|result|number|sum))"
    r"(?:'s|\s(?:is|was|should be|must be|becomes))|there (?:are|is|must be)|we (?:get|have)|should be"
    r"|(?:the )?(?:final|correct|right|actual|new)(?: [a-z]+)?:)\s{1,8})"
)
_CORRECTED = re.compile(  # "The answer is 42. No, 43."
    r"[.!?;}\n]\s{0,8}(?:no|wait|actually|sorry|oops|correction|edit|(?:just )?kidding"
    rf"|scratch that)\b[,.:!]?\s{{1,8}}(?:[^.\n0-9$\\]{{0,60}}[:,]\s{{0,8}})?{_SUBJECT}?{_PIECE}",
    re.IGNORECASE,
)
_SO = r"(?:so|hence|thus|therefore|giving|which (?:gives|makes)),?\s{1,8}"
_RECONSIDERED = re.compile(  # \boxed{42}. I forgot to add 1, so it's 43. \boxed{42}. So there are 43.
    r"(?:(?:\b(?:wait|actually|hmm|sorry|oops|correction|mistake|forgot|missed|overlooked|contradicts?|hold on"
    r"|re(?:do|count|check|compute|calculate)|but (?:this|that)|counted twice|second thought)|[.!?;}$\n]\s{0,8}no)"
    rf"\b[^$]{{0,200}}?(?:[.!?:;,\n]\s{{1,8}}{_SUBJECT}|\b{_SO}{_SUBJECT}?)|[0-9}}][$*).\s]{{1,8}}{_SO}{_SUBJECT})"
    rf"{_PIECE}",
    re.IGNORECASE,
)
_REJECTED = re.compile(  # 42 does not satisfy the condition; it fails; this overlooks a case
    r"\b(?:(?:does|do|did|can|could|would)(?:n't|\s+not)\s(?:satisfy|work|hold|fit|solve|be (?:right|correct))"
    r"|cannot be (?:right|correct|the answer)|fails\b|(?:overlook|ignore|miss|overcount|contradict|violate)e?s\b"
    r"|makes (?:the|a|one) [a-z]+ (?:zero|negative|undefined|vanish)|leads to a contradiction"
    rf"|(?:'s|is|was|are|(?:must|has to|should|can|would|will) be)\s(?:{REFUSED}|not {_NO_ANSWER})(?! to\b)"
    rf"|(?:is|was|are)n't {_NO_ANSWER}(?! to\b))"
)
_NAME = r"(?:answer|value|solution|root|guess|choice|option|count)"
_AGAIN = re.compile(
    rf"\b(?:it|the (?:[a-z]+ )?{_NAME}|(?P<nearest>(?:this|that)(?: (?:[a-z]+ )?{_NAME})?))$", re.IGNORECASE
)
_ANOTHER = re.compile(  # the negative root is rejected; option A is wrong because it ignores friction
    rf"\b(?:other|another|alternative|second|negative|positive|smaller|larger|complex) {_NAME}s?\b"
    r"|\b(?:option|choice|answer|statement) \(?(?-i:[A-J])\b|\((?-i:[A-J])\)"
    rf"|\b(?:fails|(?:is|are|was) {REFUSED}),? (?:because|since|as) it$",
    re.IGNORECASE,
)
_PART_OF_ANOTHER = re.compile(
    r"(?:[\w.,]|(?:[-−/^_<>≤≥+*·×]|\\[a-z]+|\b(?:than|least|most|to|of|under|below|with|for|by))[\s$]*)$"
)
_TAKEN_BACK = re.compile(
    r"\b(?:scratch that|on second thoughts?|never ?mind|take (?:it|that) back"
    r"|(?:could(?:n't| not)|can(?:'t|not)|unable to) (?:solve|finish|complete|answer) (?:it|this|the))\b",
    re.IGNORECASE,
)
_ENDS_IN_NO = re.compile(  # Hmm, no. They are mistaken. I made a mistake.
    r"(?:[.!}$*(]|(?<![?\s])\n)(?:\s|hmm+|wait|actually|oh|oops|well|sorry|but|[,.…])*"
    r"(?:no(?:pe)?|not (?:quite|really|so|right)|(?:(?:that|this)(?:'s| is) )?(?:wrong|incorrect|false)"
    r"|just kidding|(?:that|this|it)(?: i|'| wa)s a (?:lie|joke|trap|mistake)|(?:I|we|(?P<others>they|he|she))"
    r"(?:'m|'re| am| are| is| was| were)? (?:all )?(?:mistaken|wrong|incorrect|lying|joking)"
    r"|(?:I|we|they) (?:(?:must )?have )?ma[dk]e (?:an?|some) (?:[a-z]+ )?(?:mistake|error)s?(?: [a-z]+)?)[.!\s)]*$",
    re.IGNORECASE,
)
_NOT = re.compile(
    r"(?<!or )(?<!if )(?<!why )(?<!were )\bnot (\$?[-−0-9][^\s$,;!?]*?\$?)(?=[.,;!?)]*(?:\s|$))(?! (?:[a-z]|of))",
    re.IGNORECASE,
)
_LONGEST = 400  # characters behind the beginning of a correction
_ENDS_IN_WORDS = re.compile(rf"\b(?:{NUMBER_WORD}|(?-i:[A-J])\)?)$", re.IGNORECASE)


def corrected(text: str) -> str | None:
    """The number, formula or letter of a choice that a text puts, at its end, in the place of its answer; None if it
    corrects nothing.

    >>> corrected("The answer is 42. No, 43."), corrected("It is 42. Wait, I forgot to add 1, so it's 43.")
    ('43', '43')
    """
    end = text.rstrip(" .!\n")[-16:]
    if end[-1:] != "$" and not end[-1:].isdigit() and _ENDS_IN_WORDS.search(end) is None:
        return None
    found = _CORRECTED.search(text) or _RECONSIDERED.search(text, max(0, len(text) - _LONGEST))
    return None if found is None else str(counted(found["piece"]) or found["piece"].strip("$"))


def withdrawn(answer: str, after: str) -> bool:
    """Whether the text `after` an answer says that it is not the answer. "It" and "this" are not taken for the answer
    if another number stands before them, nor "it" if words for another answer do ("the other root", "option A").

    >>> withdrawn("42", ". But this misses a case."), withdrawn("3", "; 3 is extraneous"), withdrawn("2", "; 3 fails")
    (True, True, False)
    """
    end, after, value = after[-100:], after[:_LONGEST], answer.rpartition("=")[2].strip(" $").rstrip("})").lstrip("(")
    for found in _REJECTED.finditer(after):
        before = after[: found.start()].rstrip(" $*})")
        again = None if any(map(str.isdigit, before)) else _AGAIN.search(before)
        if again is not None and (again["nearest"] or _ANOTHER.search(before) is None):
            return True
        if value and before.endswith(value) and _PART_OF_ANOTHER.search(before.removesuffix(value)) is None:
            return True
    if value and any(found[1].strip(" $") == value for found in _NOT.finditer(after)):
        return True
    regretted = _ENDS_IN_NO.search(f"\n{end}")
    if regretted is not None and not (regretted["others"] and any(map(str.isdigit, after))):
        return True
    return _TAKEN_BACK.search(after) is not None
