"""Denials: parts of a text that are mentioned but are not the answer: "not 42", "42 is wrong", "more than 42", "twice
42"."""

from __future__ import annotations

import re

_TURN = r"\b(?:but|so|hence|thus|therefore|then|giving|which gives)\b"  # words that end the scope of a denial
_BEFORE = re.compile(
    r"(?:\b(?:not|non|pas|nicht)\b(?!-)|n't\b|\bnever\b|\bneither\b|\bnor\b|\bcannot be\b|\brather than\b"
    r"|\binstead of\b|\\neq?|≠|!="
    r"|\bdoubt\b|\bimpossible\b|\bunlikely\b|\bhardly\b|\banything but\b|\bexcept\b|\bother than\b|\bfar from\b)"
    rf"(?:(?!{_TURN})[^.,;:\n!?0-9$]){{0,24}}\$?$",
    re.IGNORECASE,
)
_LABELLED = re.compile(  # "This is not the final answer: 42"
    r"(?:\b(?:not|never|wrong|false|incorrect)|n't)\b[^.,;:\n!?0-9$]{0,30}\banswer\b[^.,;:\n!?0-9$]{0,10}[:：]\s*[$(*]{0,3}$",
    re.IGNORECASE,
)
_BESIDE = re.compile(  # the answer is another number, described by this one
    r"\b(?:(?:more|less|fewer|greater|larger|bigger|higher|smaller|lower|older|younger|longer|shorter) than"
    r"|exceed(?:s|ing)?"
    r"|below|above|beyond|close to|nearly|almost|twice|double|triple|half(?: of)?|thrice|divisible by"
    r"|(?:square|cube|square root|cube root|root|sqrt|opposite|reciprocal|negative|inverse|double|half|multiple) of)"
    r"\s*[$(*{\\]{0,3}\s*$",
    re.IGNORECASE,
)
_OPEN = r"(?:or|and) (?:more|less|greater|fewer|larger|smaller|bigger|higher|lower|above|below|beyond|up|over)"
_OPEN_BEHIND = re.compile(rf"{_OPEN}\W*$", re.IGNORECASE)
_AFTER = re.compile(
    r"^[\s$.)}*]{0,3}\s*(?:isn't|wasn't"
    r"|(?:is|was|are|would be|can)\s*(?:not|n't|wrong|incorrect|false|impossible|too)\b"
    rf"|\s(?:squared|cubed|factorial|less (?:one|[0-9])|at (?:least|most)|{_OPEN}|or so|or (?:maybe |perhaps )?not)\b)",
    re.IGNORECASE,
)
_DENYING = re.compile(r"\b(?:not|never|doubt|impossible|unlikely|wrong|incorrect|false)\b|n't\b", re.IGNORECASE)
_SEEN = 60, 40  # characters before and after that are searched


def denied(text: str, start: int, end: int) -> bool:
    """Whether the text denies that its part from `start` to `end` is the answer, or only uses it to describe another
    number."""
    before, after = text[max(0, start - _SEEN[0]) : start], text[end : end + _SEEN[1]]
    return any(
        found is not None
        for found in (_BEFORE.search(before), _LABELLED.search(before), _BESIDE.search(before), _AFTER.search(after))
    )


def is_open(answer: str) -> bool:
    """Whether an answer is a range with an open end: "42 or more"."""
    return _OPEN_BEHIND.search(answer) is not None


def is_denying(words: str) -> bool:
    """Whether the words that introduce an answer deny it: "the answer is not", "I doubt that the answer is"."""
    return _DENYING.search(words) is not None
