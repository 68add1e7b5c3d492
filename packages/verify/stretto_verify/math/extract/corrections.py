"""Corrections at the end of a completion: "The answer is 42. No, 43." gives 43."""

from __future__ import annotations

import re

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


def corrected(text: str) -> str | None:
    """The number or formula that a text puts, at its end, in the place of its answer; None if it corrects nothing.

    >>> corrected("The answer is 42. No, 43."), corrected("It is 42. Wait, I forgot to add 1, so it's 43.")
    ('43', '43')
    """
    last = text.rstrip(" .!\n")[-1:]
    if last != "$" and not last.isdigit():
        return None
    found = _CORRECTED.search(text) or _RECONSIDERED.search(text)
    return None if found is None else found["piece"].strip("$")
