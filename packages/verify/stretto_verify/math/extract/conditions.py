"""Conditions behind an answer: where it is attained, for which n it holds, to how many places it is rounded."""

from __future__ import annotations

import re

_ATTAINED = re.compile(  # the maximum is 12, attained at x = 3
    r",?\s+(?:(?:which is )?(?:achieved|attained|reached)|which occurs)\s(?:at|when|for|if)\b[^.\n]{1,80}\.?\s*$"
)
_DECLARED = re.compile(  # $S_n = 2n$ for all $n \ge 1$
    r"(?<=\$),?\s+(?:(?:for (?:all|every|any|each)|whenever)(?: [a-z]+)? \$[a-zA-Z]|(?:for|where|when) \$[nkm])"
    r"\s*(?:\\(?:geq?|leq?|in|neq?)(?![a-z])|[<>≥≤])[^$\n]{1,40}\$[\s.]*$"
)
_ASKED_BOUND = re.compile(r"\b(?:least|most|minimum|maximum|smallest|largest|fewest|guarantee)\b", re.IGNORECASE)
_BOUND = re.compile(r"(?<=[a-z] )(?<! is )(?<! are )at (?:least|most) (?=\$?[0-9])")
_ROUNDED = re.compile(
    r",?\s\(?(?:(?:rounded|correct|accurate)\s)?to\s(?:[0-9]|one|two|three|four|five)\s"
    r"(?:decimal places?|significant (?:figures?|digits?))\)?"
)


def unconditioned(text: str) -> str:
    r"""The text without the place where its last value is attained, and without the integers for which its last formula
    holds.

    >>> unconditioned("The maximum is 12, attained at x = 3."), unconditioned(r"It is $2n$ for all $n \ge 1$.")
    ('The maximum is 12', 'It is $2n$')
    """
    return _DECLARED.sub("", _ATTAINED.sub("", text))


def unbounded(text: str, prompt: str) -> str:
    """The text without "at least" and "at most" before the number of a sentence, if the question asks for a bound.

    >>> unbounded("He needs at least 4 socks.", "What is the least number of socks?")
    'He needs 4 socks.'
    """
    if "at " not in text or _ASKED_BOUND.search(prompt) is None:
        return text
    return _BOUND.sub("", text)


def unrounded(text: str) -> str:
    """The text without the number of places to which an answer is rounded.

    >>> unrounded("It is 3.14, rounded to 2 decimal places.")
    'It is 3.14.'
    """
    return _ROUNDED.sub("", text) if "decimal place" in text or "significant" in text else text
