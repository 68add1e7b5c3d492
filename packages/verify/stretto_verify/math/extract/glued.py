r"""What is written beside a box and belongs to it: ``\boxed{12}\pi`` is 12π, ``-\boxed{12}`` is -12, ``\boxed{12}`` cm
is 12 cm.

A box marks the answer, but it is not the whole of it where a sign, a digit or a unit continues its formula. An equation
before it does not: ``x = \boxed{12}`` is 12.
"""

from __future__ import annotations

import re

from stretto_verify.math.extract.denials import denied
from stretto_verify.math.extract.terms import terms
from stretto_verify.math.parse.measures import KNOWN, product, unit_named
from stretto_verify.math.parse.structure import says_nothing
from stretto_verify.math.parse.units import MAGNITUDES, SYMBOL

_OPERATOR = r"\\(?:cdot|times|div|pm|mp)(?![a-zA-Z])"
_FUNCTION = r"\\(?:pi|sqrt|[dtc]?frac|binom|ln|log|sin|cos|tan|theta)(?![a-zA-Z])"
_BEFORE = re.compile(  # within a formula
    rf"(?:[0-9]|(?<![-:>])[-−]\s*|[+/^_]\s*|(?<!\*)\*\s*|{_OPERATOR}\s*|\\(?:sqrt|[dtc]?frac\s*\{{[^{{}}]*\}})\s*"
    r"|(?:\\[dtc]?frac|\\sqrt(?:\[[0-9]\])?|[\^_])\s*(?:\{[^{}]*\}\s*)?\{[^{}]*)$"
)
_BEHIND = re.compile(
    rf"\s*(?:\^|_(?=[0-9a-zA-Z{{])|\\?%|[+/](?=\s*[0-9a-zA-Z\\({{])|\*(?!\*)(?=\s*[0-9a-zA-Z\\({{])|-(?=\s*[0-9a-zA-Z\\({{])"
    rf"|{_OPERATOR}|{_FUNCTION}|[×·÷±])|[0-9]|[.,:][0-9]|[a-zA-Z](?![a-zA-Z])"
)
_MARK_BEHIND = re.compile(r"\s*(?:!|')|\((?!\\|mod)")  # in dollar signs only: elsewhere an exclamation, a quotation
_BEFORE_IN_PROSE = re.compile(r"(?:(?<![0-9.,])[0-9]{1,9}|(?<![\w:>-])[-−])$")
_BEHIND_IN_PROSE = re.compile(
    rf"[0-9]|[.,:][0-9]|\^|_[0-9{{]|/[0-9]|(?:\s*(?:×|\\times(?![a-z])))\s*10|{_FUNCTION}|[a-z](?![a-zA-Z'])"
)
_STARTS = ("", "$", "\n")  # beside most boxes: nothing belongs to them
_ENDS = re.compile(r"(?:[$.*]|\\[\])])*\s*(?:$|\n)")
_OPENING = re.compile(r"\$|(?<!\\)\\[(\[]|\n")
_CLOSING = re.compile(r"\$|(?<!\\)\\[)\]]|\n")
_PLAIN_WORD = re.compile(r"(?<![\\a-zA-Z])[a-zA-Z]{2,}")
_NO_WORD = re.compile(r"\\(?:text|mathrm|textbf|begin|end|color|textcolor)\s*\{[^{}]*\}|\\[a-zA-Z]+")
_SIDE_BEFORE = re.compile(
    r"=|<|>|\\(?:le|ge|leq|geq|neq|ne|approx|equiv|in|to|implies|Rightarrow|rightarrow|iff|therefore|quad|qquad|text\{[^{}]*\})"
    r"(?![a-zA-Z])|&|\\\\|[,;:]\s|⇒|→"
)
_SIDE_BEHIND = re.compile(
    r"=|<|>|\\(?:le|ge|leq|geq|neq|ne|approx|equiv|implies|Rightarrow|quad|qquad|text|mathrm|tag|pmod|blacksquare)(?![a-zA-Z])|&"
    r"|\\\\|;|,(?![0-9])|\.(?![0-9])|≈|⇒|→"
)
_END_OF_SENTENCE, _LONGEST_TRAIL = re.compile(r"\A[^.!?\n]*"), 60
_ATOM = re.compile(r"[0-9.,]+|[a-zA-Z]|\\[a-zA-Z]+(?:\{[^{}]*\})*")
_OR = re.compile(
    r"(?:\s*\^\s*\{?\\circ\}?|\s*\\?%)?\$?,?\s*(?:\\text\{\s*or\s*\}|(?<=[\s$},])or\s+(?:(?:maybe|perhaps|possibly|even)\s+)?)\s*"
    r"\$?(-?[0-9][0-9./]*+(?:\\?%)?)\$?(?=[\s.,;:]|$)"
)
_ALSO = re.compile(  # and 43; by symmetry, 43 works as well; a line "Unordered: 43", not "Steps: 43"
    r"(?:\$?,|\$?,?\s+and(?: possibly)?|\$?[.,;]?\s+(?:and,?\s)?(?:also|likewise|similarly|by symmetry),?(?: also)?"
    r"|[$*}.\s]{0,20}\n\s{0,20}(?:or|and|also|otherwise|else|alternatively|instead|corrected|update|final|un[a-z]+|non-?[a-z]+"
    r"|case [0-9]|(?:if|for|when|with|without|including|excluding|assuming)(?: [a-z=0-9]+){1,6}"
    r"|(?:(?:[a-z]+ ){0,2}(?:answer|solution|root|result|option|choice)"
    r"|(?:(?:the|other|correct|actual|true|new|final|grand) )?(?:total|value|sum|number|count|amount))s?(?: [0-9])?):"
    r"(?:\s*\$?[a-z] ?=)?)\s*\$?(-?[0-9][0-9./]*|\([^()\n]{1,20},[^()\n]{1,20}\))\$?"
    r"(?: (?:works|does|is)(?: (?:also|as well|too|one|a solution))*)?[.\s]*$",
    re.IGNORECASE,
)
_OR_BEFORE = re.compile(r"(?<![0-9.,/])(-?[0-9][0-9./]*)\$?,?\s+or\s+\$?$")
_SHARE = re.compile(r"\$?\s*(?:\\?%|percent\b)\s*\$?\s*of\s+\\?\$?([0-9][0-9,]*(?:\.[0-9]+)?)")
_PERCENT = re.compile(r"\s?per ?cent\b")
_IN_BASE = re.compile(
    r"\$?\s*\(?(?:in\s+)?(base\s+(?:[0-9]{1,2}|[a-z]{3,7})|binary|octal|hexadecimal)\b", re.IGNORECASE
)
_REMAINDER = re.compile(r"\s*\$?\s*\(?\\?p?mod(?![a-z])\s*\{?\s*([0-9]{1,9})")
_NO_RIVAL = (  # words behind a comma that say something else of the answer
    r"(?:since|because|exactly|as|where|when|while|with|if|for|not|from|by|using|given|after|obtained|attained|achieved|at|in"
    r"|although|but|which|who|whose|see|rounded|to|rather|instead|of|plus|minus)\b"
)
_RIVAL = re.compile(  # \boxed{8} pairs, that is 16 people; \boxed{6}! = 720
    r"[$)}*!]{0,3}(?:[ ][a-zA-Z][\w ]{0,40}?)?[ ]?(?:!?(?:=>?|≈|→|⇒|\\(?:approx|to|[Rr]ightarrow|implies)(?![a-z]))[ ]?"
    r"|(?:[,;–—]|[(\[](?=or\b|i\.e\.|that is|which))[ ]?+(?:(?:which is|that is|i\.e\.|namely),?[ ](?:about[ ])?"
    rf"|(?:which (?:makes|gives|leaves|means)\b|(?!{_NO_RIVAL}))[^.\n;:0-9$\\(]{{0,40}}(?<!of )(?<!than )))"
    r"(?:\$(?!\s|[a-zA-Z]\s*=)(?P<formula>[^$\n]{0,80}?[0-9][^$\n]{0,80})\$|(?P<number>[-−]?\\?\$?[0-9][0-9,]*+(?:[./][0-9]+)?+(?:\s?\\?%)?))"
    r"(?! (?:of|more|less|fewer|times)\b)"
)
_NUMERIC = re.compile(r"(?:\\(?:[dtc]?frac|sqrt|pi|cdot|times|[%$!, ])|[-+−0-9./^{}()]|,(?=[0-9]{3}))+")
_LIST_NUMBER = re.compile(r"\s*(?:[0-9]+[.)]|[-*+•]\s)\s*")
_UNIT = re.compile(
    r"[\s$~]*(?:\\[,;: ]\s*)*(?:\\(?:text|mathrm|rm|mbox)\s*\{~?\s*(?P<text>[^{}]*)\}(?P<power>\^\{?-?[1-9]\}?)?"
    r"|(?P<words>[a-zA-Z]{2,}(?:[ /-][a-zA-Z]+){0,3}|[mgLWVK]/[a-z]+|[mghslLNJWVK](?![\w'.,-]*\w)))"
)
_WORD = re.compile(r"[a-zA-Z]+(?:[ /-]|$)")
_RAISED = re.compile(r"(?:\^\s*\{?)?([23²³])")
_EXPONENTS = {"²": "2", "³": "3"}


def with_glued(content: str, before: str, after: str) -> str:
    r"""The content of a box together with what belongs to it of the text before and after the box: a value joined by
    "or", a rival number, "% of", a base or modulus, the rest of a formula, or else a unit.

    >>> with_glued("12", "so it is $", r"\pi$."), with_glued("12", "$x = ", "$, 3 more."), with_glued("5", "", " cm")
    ('12\\pi', '12', '5\\text{ cm}')
    """
    if (other := _OR_BEFORE.search(before, max(0, len(before) - 30))) is not None:
        return f"{other[1]}, {content}"
    if (added := further(after)) is not None:
        return f"{content}, {added}"
    if before[-1:] in _STARTS and _ENDS.match(after) is not None:
        return content
    if (share := _SHARE.match(after)) is not None:
        return rf"{content}\% of {share[1]}"
    if (base := _IN_BASE.match(after)) is not None:
        return rf"{content}\text{{ in {base[1].lower()}}}"
    if (modulus := _REMAINDER.match(after)) is not None:
        return rf"{content} \pmod{{{modulus[1]}}}"
    if _NUMERIC.fullmatch(content) and (rival := _with_rival(content, after)) is not None:
        return rival
    left, opened = _segment_before(before)
    right, closed = _segment_behind(after)
    if _PLAIN_WORD.search(_NO_WORD.sub(" ", f"{left} | {right}")):
        glued = _in_prose(content, left, right)
    else:
        glued = _in_formula(content, left, right, is_marked=opened and closed)
    if glued is not None:
        return glued
    return with_unit(content, after)


def further(after: str) -> str | None:
    """The value that the text behind an answer adds to it; None if it adds none.

    >>> further(" or 43"), further(". By symmetry, -43 works as well."), further(" apples")
    ('43', '-43', None)
    """
    other = _OR.match(after) or _ALSO.match(after)
    return None if other is None else _term(other[1], after, other.start(1))[1]


def _with_rival(content: str, after: str) -> str | None:
    """The number in a box and another number that follows in its sentence, as a list. None if no other number follows,
    or it is denied, belongs to a reason, or is the same amount in another unit."""
    if (found := _RIVAL.match(after)) is None:
        return None
    start = found.start("formula" if found["number"] is None else "number")
    if denied(after, start, found.end()):
        return None
    number, measured = _term(found["number"] or "", after, start)
    one, other = with_unit(content, after), found["formula"] or measured
    is_converted = one != content and other != number and found["formula"] is None
    joint = r" \approx " if "≈" in found[0] or r"\approx" in found[0] else ", "
    return None if is_converted else f"{one}{joint}{other}"


def _term(number: str, text: str, start: int) -> tuple[str, str]:
    """The whole term that begins with `number` at the index `start` of the text: first bare, then with its unit,
    magnitude or percent ("3 dozen", not 3)."""
    length, term = next(
        ((end, term) for at, end, term in terms(text[start : start + 60]) if at == 0), (len(number), number)
    )
    after = text[start + length :]
    return term, rf"{term}\%" if _PERCENT.match(after) else with_unit(term, after)


def _segment_before(before: str) -> tuple[str, bool]:
    """The text, of at most 200 characters, behind the last dollar sign, ``\\(``, ``\\[`` or line break; and whether a
    sign of a formula precedes it, not a line break or nothing."""
    found = list(_OPENING.finditer(before, max(0, len(before) - 200)))
    return (before[found[-1].end() :], found[-1][0] != "\n") if found else (before[-200:], False)


def _segment_behind(after: str) -> tuple[str, bool]:
    found = _CLOSING.search(after, 0, 200)
    return (after[: found.start()], found[0] != "\n") if found is not None else (after[:200], False)


def _in_prose(content: str, left: str, right: str) -> str | None:
    before = _BEFORE_IN_PROSE.search(left)
    behind = _BEHIND_IN_PROSE.match(right)
    if behind is not None and right[behind.start()].isalpha() and not content[-1:].isdigit():
        behind = None
    if before is None and behind is None:
        return None
    tail = "" if behind is None else right[: behind.end()] + right[behind.end() :].split(" ")[0].rstrip(".,;:!?*)")
    return f"{before[0] if before is not None else ''}{_atom(content)}{tail}"


def _in_formula(content: str, left: str, right: str, *, is_marked: bool) -> str | None:
    """The side of the formula in which the box stands, with the `content` of the box; None if the box is the whole
    side. `left` and `right`: the text beside the box; `is_marked`: whether signs of a formula surround that text."""
    cut = [one.end() for one in _SIDE_BEFORE.finditer(left)]
    left = left[cut[-1] :] if cut else left
    opened = left.count("(") - left.count(")")
    if opened > 0 and is_marked and (closing := _closing(right, opened)) is not None:
        ends = len(right) if _BEHIND.match(right, closing) else closing
        return None if not right[:ends].strip(" )\\") else f"{left}{_atom(content)}{right[:ends]}"
    before = None if _LIST_NUMBER.fullmatch(left) else _BEFORE.search(left)
    behind = _BEHIND.match(right) or (_MARK_BEHIND.match(right) if is_marked else None)
    if before is None and behind is None:
        return None
    end = _SIDE_BEHIND.search(right)
    return f"{left}{_atom(content)}{right[: end.start()] if end is not None else right}"


def _closing(right: str, level: int) -> int | None:
    for at, letter in enumerate(right):
        level += (letter == "(") - (letter == ")")
        if level == 0:
            return at + 1
    return None


def _atom(content: str) -> str:
    return content if _ATOM.fullmatch(content) else f"({content})"


def is_trailed(after: str) -> bool:
    """Whether behind the sentence of an answer there are only candidates, without a word: "5 kPa. — E, D"."""
    rest = _NO_WORD.sub(" ", _END_OF_SENTENCE.sub("", after, count=1)) if len(after) < _LONGEST_TRAIL else ""
    return bool(rest) and not says_nothing(rest) and _PLAIN_WORD.search(rest) is None


def with_unit(content: str, after: str) -> str:
    r"""The content of a box, or a number, with the unit, base or magnitude ("million") that the text after it begins
    with; unchanged if there is none, or the content does not end with a digit.

    >>> with_unit("5", " days a week"), with_unit("5", " apples"), with_unit("60", " km/h.")
    ('5\\text{ days}', '5', '60\\text{ km/h}')
    """
    if not content.rstrip("}")[-1:].isdigit():
        return content
    if (base := _IN_BASE.match(after)) is not None:
        return rf"{content}\text{{ in {base[1].lower()}}}"
    if (found := _UNIT.match(after)) is None:
        return content
    if found["words"] is None:
        is_unit = bool(product(found["text"], "2" if found["power"] else None))
        return rf"{content}\text{{ {found['text'].strip()}}}{found['power'] or ''}" if is_unit else content
    words = _WORD.findall(found["words"])
    for count in range(len(words), 0, -1):
        told = "".join(words[:count]).strip(" /-")
        if told in MAGNITUDES:
            return f"{content} {told}"
        is_sign = count > 1 or len(told) == 1 or SYMBOL.fullmatch(told) or (len(told) > 2 and unit_named(told))
        if told.lower() in KNOWN or (is_sign and words[0].lower() != "in " and product(told)):
            power = _RAISED.match(after, found.start("words") + len(told))
            return rf"{content}\text{{ {told}}}" + (f"^{_EXPONENTS.get(power[1], power[1])}" if power else "")
    return content
