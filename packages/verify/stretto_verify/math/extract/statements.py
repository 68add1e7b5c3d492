"""Short sentences that state an answer: "The statement is true." says true, "Yes, it is." says yes."""

from __future__ import annotations

import re
from typing import Final

from stretto_verify.math.extract.denials import is_denying
from stretto_verify.math.extract.subjects import is_named
from stretto_verify.math.parse.structure import says_nothing

#: Verbs that state something of a subject.
STATES: Final = re.compile(r"\b(?:is|are|(?<!to )be|equals)\b")
_STATEMENT = re.compile(
    r"(?P<subject>[A-Za-z ,'-]*?)\b(?:is|are|(?:will|must|would|should) be)\s+"
    r"(?P<said>(?P<not>not )?(?P<rest>[A-Za-z'-]+(?: [A-Za-z'-]+){0,3}))[.!]?",
    re.IGNORECASE,
)
_NEGATED = re.compile(r"\b(?:no|none|neither|nothing|nobody|hardly|either|whether|if|which|what|who)\b", re.IGNORECASE)
_REASONED = re.compile(
    r"(yes|no|true|false)\b\W{0,3}(?:since|because|as|given|due to|[0-9][^\s]* (?:is|are|divides|has))\b[^\\\n]*",
    re.IGNORECASE,
)
_CONCLUDED = re.compile(r"(?:so|thus|hence|therefore|indeed),?\s+(?=\S)", re.IGNORECASE)
_CONTRASTED = re.compile(r"([A-Za-z'-]+(?: [A-Za-z'-]+){0,2}), not [A-Za-z' -]+[.!]?")
_ON_A_DAY = re.compile(
    r"(?:(?:so|thus|hence|therefore),? )?(?:it's|it'll be"
    r"|(?:it|that|this|the [a-z]+(?: [a-z]+)?) (?:(?:will|must|would) )?"
    r"(?:is|be|was|falls?|fell|lands?|occurs?|happens?|takes place|comes?)) (?:on )?(?:an? )?"
    r"((?:mon|tues|wednes|thurs|fri|satur|sun)day)[.!]?",
    re.IGNORECASE,
)
_EMPHASIZED = re.compile(  # So it is **Saturn**. **Ann** is the liar.
    r"(?:[^*\n]{0,200}\b(?:is|are|was|be|get|choose|:) )?\*\*([A-Za-z][A-Za-z' -]{1,40})\*\*"
    r"(?: (?:on|in|at|for|of|by) [^*\n]{1,80})?[.!]?"
    r"|(?:[A-Za-z' ]{1,40}, )?\*\*([A-Za-z][A-Za-z' -]{1,40})\*\* (?:is|are|was|wins?)\b"
    r"(?!.*\b(?:second|third|fourth|almost)\b)[^*\n]{0,100}"
)
_UNSOLVED = re.compile(
    r"(?!.*\b(?:first|second|third|other|former|latter|cases?)\b)[^0-9$\\]{0,120}\b(?:is|are|has|have|exists?) no"
    r" (?:(?:real|integer|positive|such|possible) )*(?:solutions?|roots?)[.!]?",
    re.IGNORECASE,
)
_UNSURE = re.compile(
    r"\b(?:or|nor|either|whether|if|and|which|unless|when|but|except|perhaps|maybe|might|may|could|guess|than"
    r"|says?|said|claims|claimed|thinks|thought|believes|accuses)\b|\?",
    re.IGNORECASE,
)
_WINNER = re.compile(
    r"(?:(?:[Ss]o|[Tt]hus|[Hh]ence|[Tt]herefore),? )?((?:[Pp]layer )?[A-Z][a-z]*)(?: (?:will|can|must))?(?: always)?"
    r" (?:wins?(?: the (?:game|race|match))?|has (?:a|the) winning strategy"
    r"|[a-z]+ the (?:most|least|best|worst|[a-z]{3,}est)(?: [a-z]+){0,4}"
    r"|has (?:more|less|fewer)(?: [a-z]+){0,2})[.!]?"
)
_STANCE = re.compile(  # no conditions
    r"(yes|no|true|false)(?:[,.!:;]|\s[—–-])\s+(?!.*\b(?:if|unless|except|only|sometimes|otherwise)\b)[^0-9$\\]{0,200}",
    re.IGNORECASE,
)
_STANCES = re.compile(r"\b(?:yes|no|true|false)\b", re.IGNORECASE)
_REPLY = re.compile(  # yes, it is
    r"(?:(?P<yes>yes|true)|no|false)[,.!]\s+(?:it|they|he|she|there|that|this|we|you|one|I)\s+(?:is|are|was|were|does|do|did"
    r"|can|could|will|would|has|have|had|should)(?P<not>n't|\s+not)?[.!]?",
    re.IGNORECASE,
)


def stated(text: str) -> str | None:
    """Predicate of a short sentence ("true" in "The statement is true."); None if the sentence denies more than its
    predicate, there is no single predicate, or its subject has a name.

    >>> stated("The function is not even."), stated("Neither is even"), stated("Alice is taller")
    ('not even', None, None)
    """
    found = _STATEMENT.fullmatch(text)
    if found is None or len(STATES.findall(text)) > 1 or _NEGATED.search(found["subject"]):
        return None
    if found["rest"].lower() == "false":  # what a statement is, no denial of an answer
        text = text[: found.start("rest")]
    if is_denying(f"{found['subject']} {found['rest']}" if found["not"] else text):
        return None
    if is_named(found["subject"]):  # "Alice is taller" says who is
        return None
    return found["said"] if says_nothing(found["subject"]) else None


def emphasized(text: str) -> str | None:
    """The name or word in bold with which the last line of a text ends, or of which it says something: "**Ann** is the
    liar."; None if that line is not of this form, denies it, or has several candidates.

    >>> emphasized("So it is **Saturn**."), emphasized("**Ann** is the liar."), emphasized("It is not **Saturn**.")
    ('Saturn', 'Ann', None)
    """
    line = text.rstrip().rpartition("\n")[2]
    found = _EMPHASIZED.fullmatch(line)
    if found is None or line.count("**") != 2 or _UNSURE.search(line) or is_denying(line) or not says_nothing(line):
        return None
    return found[1] or found[2]


def weekday(text: str) -> str | None:
    """Day of the week on which something is, by a short sentence; None for other texts.

    >>> weekday("It falls on a Friday."), weekday("It is before Friday.")
    ('Friday', None)
    """
    return None if (found := _ON_A_DAY.fullmatch(text)) is None or is_denying(text) else found[1]


def unsolved(text: str) -> str | None:
    """The words "no solution", if a sentence ends with them and has no condition; None for other texts.

    >>> unsolved("Hence the system has no real solutions."), unsolved("If so, there is no solution.")
    ('no solution', None)
    """
    found = _UNSOLVED.fullmatch(text)
    return None if found is None or _UNSURE.search(text) else "no solution"


def winner(text: str) -> str | None:
    """Name of who wins or has the most or the least, by a short sentence; None for other texts.

    >>> winner("Alice wins"), winner("Bob has the fewest marbles."), winner("Neither wins")
    ('Alice', 'Bob', None)
    """
    return None if (found := _WINNER.fullmatch(text)) is None or not is_named(f"{found[1]} is") else found[1]


def stance(text: str) -> str | None:
    """The yes, no, true or false with which a text begins; None if it begins otherwise, has another one, a digit or a
    formula, or contradicts itself.

    >>> stance("Yes, it is."), stance("Yes, it is not."), stance("Yes. Or no.")
    ('Yes', None, None)
    """
    found = _STANCE.fullmatch(text)
    if found is None or len(_STANCES.findall(text)) > 1:
        return None
    reply = _REPLY.fullmatch(text)
    return found[1] if reply is None or _is_consistent(reply) else None


def reasoned(text: str) -> str | None:
    """The yes, no, true or false of a text that goes on with a reason; None for other texts.

    >>> reasoned("Yes, since 42 is even."), reasoned("No, 43 is odd."), reasoned("Yes or no")
    ('Yes', 'No', None)
    """
    return None if (found := _REASONED.fullmatch(text)) is None else found[1]


def concluded(text: str) -> str:
    """A few words without the word that draws a conclusion, and without what they deny.

    >>> concluded("So Ann is taller"), concluded("green, not red"), concluded("not green, not red")
    ('Ann is taller', 'green', 'not green, not red')
    """
    bare = _CONCLUDED.sub("", text, count=1)
    return bare if (found := _CONTRASTED.fullmatch(bare)) is None or is_denying(found[1]) else found[1]


def is_reply(text: str) -> bool:
    """Whether a text is a stance (yes, no, true or false) that a short sentence repeats: "yes, it is", and not "no, it
    is"."""
    reply = _REPLY.fullmatch(text)
    return reply is not None and _is_consistent(reply)


def _is_consistent(reply: re.Match[str]) -> bool:
    return (reply["yes"] is None) == (reply["not"] is not None)
