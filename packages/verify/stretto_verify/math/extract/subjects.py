"""Subjects of statements: "Ann is 5" is about Ann, and not the answer "Tom is 5".

A value without a subject may be the answer to a question that names it. One with the name of another may not.
"""

from __future__ import annotations

import re
from functools import lru_cache

_VERBS = (
    r"is|are|was|were|has|have|had|gets?|got|needs?|pays?|paid|wins?|won|earns?|earned|owes?|sold|sells?|buys?"
    r"|bought|makes?|made|scored|receives?|received|weighs?|costs?|takes?|took|ate|eats?"
)
_NAMED = r"(?P<name>[A-Z][a-z]+(?: [A-Z][a-z]*)*|[a-z])(?:'s(?: [a-z]+){1,4})?"
_STATEMENT = re.compile(rf"{_NAMED}\s+(?:{_VERBS})\b")
_STATED = re.compile(rf"{_NAMED}\s*(?:\s(?:{_VERBS})\b|=|:)")
_LEAD = re.compile(
    r"^[\W_]*(?:(?:so|thus|hence|therefore|then|and|finally"
    r"|now)\b[,:]?\s+)*(?:(?:the )?(?:final )?answer(?: is)?\s*[:：]?\s+)?",
    re.IGNORECASE,
)
_MARKUP = re.compile(r"\\(?:text|mathrm|textbf|mbox)\s*\{([^{}]*)\}|<[^<>]*>|[$*]")
_SENTENCES = re.compile(r"(?<=[.!?])\s+|\n+")
_NO_NAMES_TEXT = """
the a an it this that these those he she they we i you there here answer final total so thus hence therefore
then his her their our my your its each every all both some in on at by for since because as if when where what
which who how let yes no true false option choice solution result value number sum difference product quotient
area perimeter volume length width height distance time speed cost price profit probability ratio average mean
maximum minimum step case question problem one two three neither nobody none either someone everyone everybody
"""
_NO_NAMES = frozenset(_NO_NAMES_TEXT.split())


@lru_cache(maxsize=1 << 12)
def subject(gold: str) -> str:
    """Name of the person or thing that a gold answer is a statement about; "" if it is no statement, or of no name.

    >>> subject("Ann is 5"), subject("The total is 5"), subject("5")
    ('Ann', '', '')
    """
    return _name(gold, _STATEMENT) if len(gold) < 200 else ""


def is_of_another(name: str, completion: str, given: str) -> bool:
    """Whether the final answer `given`, or the last sentence of `completion` that holds it (unless that has a box),
    names another subject than `name`. False if neither names a subject."""
    if _name(given, _STATED) not in ("", name):
        return True
    for sentence in reversed(_SENTENCES.split(completion)):
        if given.strip() and given.strip() in sentence:
            return r"\boxed" not in sentence and _name(sentence, _STATED) not in ("", name)
    return False


def _name(text: str, form: re.Pattern[str]) -> str:
    bare = _LEAD.sub("", _MARKUP.sub(r"\1", text))
    found = form.match(bare)
    return found["name"] if found is not None and found["name"].split()[0].lower() not in _NO_NAMES else ""


def is_named(words: str) -> bool:
    """Whether `words`, the beginning of a sentence, begin with a name of more than one letter as its subject: Alice,
    not "the function"."""
    found = re.match(_NAMED, _LEAD.sub("", words))
    return found is not None and len(found["name"]) > 1 and found["name"].split()[0].lower() not in _NO_NAMES
