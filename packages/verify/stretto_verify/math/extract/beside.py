r"""Words and signs directly beside a number that make it another one: "42 plus 3", "42 and a half", "the supplement of
42", ``\boxed{42}, then 5 more``.

Words behind a number mostly say what it counts ("42 apples in all") and may be passed over. These may not: each takes
the number as the operand of something, so that the value is another one.
"""

from __future__ import annotations

import re
from typing import Final

from stretto_verify.math.parse.units import COMPARATIVE, LETTER, NUMBER_WORD, RELATED

_OPERAND = (
    rf"(?:(?:the|its|another)\s(?:(?:other|first|last|remaining|second|next)\s)?)?"
    rf"(?:\$?[-−]?\\?\$?[0-9.]|\$?\\(?:[dt]?frac|sqrt|pi|boxed)(?![a-z])|\$?{LETTER}|{NUMBER_WORD})"
)
_OPERATOR = (
    r"plus or minus|plus|minus|times|divided by|multiplied by|over|choose|mod(?:ulo)?|raised to|to the power(?: of)?"
    r"|give or take|less|together with|along with|as well as|out of|of"
)
_PARTS = r"(?:half|halves|thirds?|quarters?|fourths?|fifths?|sixths?|eighths?|tenths?)"
_RELATED = r"(?:[<>≤≥≠]|\\(?:leq?|geq?|neq?|lt|gt)(?![a-z]))"
FALSE: Final = r"(?:wrong|incorrect|mistaken|false|invalid|impossible|extraneous|spurious)\b"
#: What is said of an answer that is none, behind "is" or "must be".
REFUSED: Final = (
    rf"(?:(?:an? |the )?(?:{FALSE}|mistake)|rejected|discarded|excluded|eliminated|ruled out|unknown"
    r"|out of the question)\b"
)
_WRONG = rf"(?:{REFUSED}|not (?:right|correct|possible|the answer)\b)"
_CASES = (  # for x > 0, and -5 otherwise
    r"(?:otherwise\b|else\b|in (?:the (?:first|second|other|last)|one|some|either) cases?\b|at first\b"
    r"|except\b|up to sign\b|with (?:either|both) signs?\b"
    r"|(?:if|for|when|where|unless|with)\b[^.\n]{1,60}?(?:\b(?:otherwise|else)\b|[0-9}$] (?:if|for|when|where)\b))"
)
_EVEN_BEHIND_A_NOUN = (  # 5 cm plus 3, 5 apples is wrong
    rf"(?:plus or minus|plus|minus|less) {_OPERAND}|{RELATED}"
    rf"|(?:which )?(?:is|was) (?:{_WRONG}|too (?:small|large|big|low|high|much|many|few)\b)"
    rf"|and (?:counting|(?:an?|one|two|three|four|five) {_PARTS})\b"
    rf"|(?:and )?then (?:another\b|{_OPERAND}\S* (?:more|extra|additional|others?)\b)|{_CASES}"
)
_BEHIND = re.compile(
    r"[$)}*]{0,3}(?:"
    rf"(?:,?[ \t]+|,|(?<=[}}$]))(?:{_EVEN_BEHIND_A_NOUN}|(?:{_OPERATOR})[ ]{_OPERAND}"
    rf"|to (?:the [0-9]|\$?[-−]?[0-9]++(?! (?:decimal|significant|d\.?p|s\.?f|places|digits|figures)))"
    r"|(?:and )?then (?:add|subtract|multiply|divide|double|halve|square)\b"
    r"|(?:plus|minus|times|up to) (?:an?|some) (?:[a-z]+ )?(?:constant|factor|multiple|sign)\b"
    r"|(?:and|together with|along with) (?:its|their|every|all|any|possibly|perhaps|maybe|some|others?"
    r"|the (?:negative|opposite|other)|so (?:on|forth))\b|etc\b|excluding [0-9$\\]|if [a-z]+ (?:were|had)\b"
    rf"|times as (?:many|much|[a-z]+) as {_OPERAND}|point (?:zero\b|{NUMBER_WORD}|[0-9])"
    r"|(?:is|was) (?:(?:only|just|merely) )?(?:(?:an?|one|the first) )?(?:[a-z]+ )?(?:part|half|third|step|bound|guess"
    r"|estimate|approximation|candidate)\b|against[.\s]*$"
    r"|of (?:the |an? )?(?:(?:remaining|other|first|last|second|original) )?(?:half|third|quarter|rest|remainder)\b)"
    r"|(?:-|\^\s*\{?\s*(?:\\text\s*\{\s*)?)(?:st|nd|rd|th)\}*\$? (?:power|root|prime|multiple|square|cube)s?\b"
    rf"|[ \t]*{_RELATED}\s*\$?[a-z](?![a-zA-Z])"
    r"|,?\s*\\[lc]?dots(?![a-z])"
    rf"|[ \t]*[-−+*/±×÷][ \t]*(?:the|another)\s"
    r")",
    re.IGNORECASE,
)
_BEHIND_NOUN = re.compile(
    rf"[$)}}*]{{0,3}}[ ](?:[a-zA-Z][\w/²³^]*[ ])?[a-zA-Z][\w/²³^]*,?[ ](?:{_EVEN_BEHIND_A_NOUN}"
    r"|(?:or|and) (?:more|less|fewer|above|below)\b(?![ ][a-z]))",
    re.IGNORECASE,
)
_LONE = re.compile(  # 5 cm longer: the answer to "how much longer?" only
    rf"\$?(?:[ ](?!(?:is|are|was|were)\b)[a-zA-Z]+)?[ ](?:{COMPARATIVE.removeprefix('more|')}|too [a-z]+)[\s.!,;)]*$",
    re.IGNORECASE,
)
_BEHIND_FORMULA = re.compile(rf"[}}]?\$(?:\^|[ \t]*[-−+*/±×÷][ \t]*(?:\$?[0-9]|\$\\?[a-z]|{LETTER}))")
#: Nouns of quantities and of what is counted: "the total of 42" is 42. "The supplement of 42" is another value.
_QUANTITIES_TEXT = """
total sum value answer amount maximum minimum max min result age price cost rate speed velocity distance length width
height area volume perimeter mass weight time probability score average mean median mode profit loss gain size
temperature angle radius diameter discount balance ratio percentage order degree year figure bound quantity range count
capacity depth duration interest population measure magnitude dimension sample period slope limit chance case set
sequence interval number point pair tuple vector equation line function matrix form side base edge month day date
morning evening help use means end start beginning sake union list choice option group team class crowd row difference
"""
_QUANTITIES = frozenset(_QUANTITIES_TEXT.split())
_OF = re.compile(r"(?:^|\W)the (?:[a-z-]+ ){0,2}?(?P<noun>[a-z-]+) of\s*[$(*{\\]{0,3}\s*$")
_BEFORE = re.compile(
    r"(?:\b(?:all but|outside|(?:one|some|any|most|part|elements?|multiples|supplement|complement|conjugate|transpose"
    r"|reflection|negation|permutations?|subsets?|fraction|inverse) of|(?:perpendicular|parallel|orthogonal) to)"
    r"|(?:day|week|month|year|number|integer|prime|one|term|value|remaining)s? (?:after|before|following|preceding"
    r"|(?:ending|starting|beginning) (?:in|with))|[0-9]\$?(?: [a-z]+)? of (?:the|her|his|its|their|these|those|all)"
    rf"|(?:[0-9]\$?|{NUMBER_WORD}) (?:times|plus|minus|point|divided by|over|out of|choose|to|through))"
    r"\s*[$(*{\\]{0,3}\s*$"
    r"|\b(?:of (?:those|these)\s*|(?:minus|negative) \$?)$|(?<![\w\\])[a-z]\(\$?$"
    r"|(?:[0-9a-z)$]\s?[+/×÷±·]|[0-9)$] ?[-−*]|√)\s*\$?$"
)
_BOUND = re.compile(rf"\b(?:at (?:least|most)|up to|no (?:{COMPARATIVE}) than)\s*[$(*]{{0,3}}\s*$")


def is_changed_behind(after: str) -> bool:
    r"""Whether the text behind a number makes it another one.

    >>> [is_changed_behind(text) for text in (" plus 3", "$, then 5 more", " and a half", " cm plus 3")]
    [True, True, True, True]
    >>> [is_changed_behind(text) for text in (" apples", ", plus tax")]
    [False, False]
    """
    return any(form.match(after) for form in (_LONE, _BEHIND_NOUN, _BEHIND, _BEHIND_FORMULA))


def is_bounded(before: str) -> bool:
    """Whether the text before a number, in lower case, makes it a bound: "at most 42". (`denied` asks only for a number
    without a box, since a box marks an answer.)"""
    return _BOUND.search(before) is not None


def is_changed_before(before: str) -> bool:
    r"""Whether the text before a number, in lower case, makes it another one.

    >>> [is_changed_before(text) for text in ("the supplement of $", "the total of ", "an area of ")]
    [True, False, False]
    """
    if _BEFORE.search(before) is not None:
        return True
    found = _OF.search(before)
    return found is not None and found["noun"] not in _QUANTITIES
