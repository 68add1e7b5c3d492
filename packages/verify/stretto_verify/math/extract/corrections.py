"""Corrections at the end of a completion: "The answer is 42. No, 43." gives 43."""

from __future__ import annotations

import re

from stretto_verify.math.parse.numerals import counted
from stretto_verify.math.parse.units import NUMBER_WORD

_PIECE = rf"(?P<piece>\$[^$\n]{{1,80}}\$|[-+−]?[0-9]+(?:[.,/][0-9]+)?|{NUMBER_WORD}|\(?(?-i:[A-J])\)?)[.!]?\s*$"
_SUBJECT = (
    r"(?:(?:(?:it|that|the (?:(?:correct|right|actual|true|real|new|final) [a-z]+|answer|total|result|number|sum))"
    r"(?:'s|\s(?:is|was|should be|must be|becomes))|there (?:are|is|must be)|we (?:get|have)"
    r"|(?:the )?(?:final|correct|right|actual|new)(?: [a-z]+)?:)\s{1,8})"
)
_CORRECTED = re.compile(  # "The answer is 42. No, 43."
    r"[.!?;}\n]\s{0,8}(?:no|wait|actually|sorry|oops|correction|(?:just )?kidding"
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
_LONGEST = 400  # characters behind the beginning of a correction
_ENDS_IN_WORDS = re.compile(rf"\b(?:{NUMBER_WORD}|(?-i:[A-J])\)?)$", re.IGNORECASE)


def corrected(text: str) -> str | None:
    """The number or formula that a text puts, at its end, in the place of its answer; None if it corrects nothing.

    >>> corrected("The answer is 42. No, 43."), corrected("It is 42. Wait, I forgot to add 1, so it's 43.")
    ('43', '43')
    """
    end = text.rstrip(" .!\n")[-16:]
    if end[-1:] != "$" and not end[-1:].isdigit() and _ENDS_IN_WORDS.search(end) is None:
        return None
    found = _CORRECTED.search(text) or _RECONSIDERED.search(text, max(0, len(text) - _LONGEST))
    return None if found is None else str(counted(found["piece"]) or found["piece"].strip("$"))
