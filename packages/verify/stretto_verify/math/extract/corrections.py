"""Corrections at the end of a completion: "The answer is 42. No, 43." gives 43."""

from __future__ import annotations

import re

from stretto_verify.math.parse.numerals import counted
from stretto_verify.math.parse.units import NUMBER_WORD

_CORRECTED = re.compile(  # "The answer is 42. No, 43."
    r"[.!?;}\n]\s{0,8}(?:no|wait|actually|sorry|oops|correction|(?:just )?kidding"
    r"|scratch that)\b[,.:!]?\s{1,8}(?:[^.\n0-9$\\]{0,60}[:,]\s{0,8})?"
    r"(?:(?:it|that|the answer)(?:'s|\s(?:is|was|should be|must be))\s{1,8})?"
    r"(?P<piece>\$[^$\n]{1,80}\$|[-+−]?[0-9]+(?:[.,/][0-9]+)?)[.!]?\s*$",
    re.IGNORECASE,
)
_RECONSIDERED = re.compile(  # "The answer is 42. Wait, I forgot to add 1, so it's 43."
    r"[.!?;}$\n]\s{0,8}(?:hmm[,.]?\s)?(?:no|wait|actually|sorry|oops|correction)\b[,.:!]?\s[^\n]{0,200}?"
    r"\b(?:so|hence|thus|therefore|giving|which (?:gives|makes)),?\s{1,8}"
    r"(?:(?:it|that|the (?:correct |final |right )?(?:answer|total|result|number|sum))"
    r"(?:'s|\s(?:is|was|should be|must be|becomes))\s{1,8}|we get\s{1,8}|there (?:are|must be)\s{1,8})?"
    r"(?P<piece>\$[^$\n]{1,80}\$|[-+−]?[0-9]+(?:[.,/][0-9]+)?)[.!]?\s*$",
    re.IGNORECASE,
)
_STATED = (
    r"(?:(?:it|that|the (?:(?:correct|right|actual|true|real|new|final) [a-z]+|answer|total|result|count|number))"
    r"(?:'s|\s(?:is|was|should be|must be|becomes))|there (?:are|is|must be)|we (?:get|have)"
    r"|(?:the )?(?:final|correct|right|actual|new)(?: [a-z]+)?:)\s{1,8}"
    rf"(?P<piece>\$[^$\n]{{1,80}}\$|[-+−]?[0-9]+(?:[.,/][0-9]+)?|{NUMBER_WORD})[.!]?\s*$"
)
_SO = r"(?:(?:so|hence|thus|therefore),?\s)"
_REGRETTED = re.compile(  # \boxed{42}. I forgot the first. It is 43. \boxed{42}. So there are 43.
    r"(?:\b(?:wait|actually|hmm|sorry|oops|correction|mistake|forgot(?:ten)?|missed|overlooked|miscount(?:ed)?"
    r"|contradicts?|hold on|redo|recount(?:ing)?|but (?:this|that)|counted twice|on second thought)\b"
    rf"[^$]{{0,200}}?[.!?:;,\n]\s{{1,8}}{_SO}?|[0-9}}][$*).\s]{{1,8}}{_SO}){_STATED}",
    re.IGNORECASE,
)
_ENDS_IN_WORDS = re.compile(rf"\b{NUMBER_WORD}$", re.IGNORECASE)


def corrected(text: str) -> str | None:
    """The number or formula that a text puts, at its end, in the place of its answer; None if it corrects nothing.

    >>> corrected("The answer is 42. No, 43."), corrected("It is 42. Wait, I forgot to add 1, so it's 43.")
    ('43', '43')
    """
    end = text.rstrip(" .!\n")[-16:]
    if end[-1:] != "$" and not end[-1:].isdigit() and _ENDS_IN_WORDS.search(end) is None:
        return None
    found = _CORRECTED.search(text) or _RECONSIDERED.search(text) or _REGRETTED.search(text)
    return None if found is None else str(counted(found["piece"]) or found["piece"].strip("$"))
