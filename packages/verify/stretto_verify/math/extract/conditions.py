"""Conditions behind an answer: where it is attained, for which n it holds, to how many places it is rounded, why it is
so, what it is the sum of."""

from __future__ import annotations

import re
from fractions import Fraction

from stretto_verify.math.parse.numerals import counted
from stretto_verify.math.parse.units import COMPARATIVE, NUMBER_WORD

_ATTAINED = re.compile(  # the maximum is 12, attained at x = 3
    r",?\s+(?:(?:which is )?(?:achieved|attained|reached)|which occurs)\s(?:at|when|for|if)\b[^.\n]{1,80}\.?\s*$"
)
_EXTREME = re.compile(  # the least value is 42 when x = 7 and y = 6
    r"(\b(?:maxim|minim|largest|smallest|greatest|least)[a-z]*\b[^.\n=]{0,60}?\b(?:is|are) \S{1,40}?)"
    r",?\s(?:at|when|for|where|with)\s(?!.*\b(?:otherwise|else|or|but|if|not|is|are|so|hence|thus|therefore|giving)\b)"
    r"(?=[^.\n]*=)[^.;\n]{1,80}\.?\s*$"
)
_DECLARED = re.compile(  # $S_n = 2n$ for all $n \ge 1$; $x^2 + 1$ for every real $x$, as claimed
    r"(\$(?: [a-z]+){0,3}),?\s+(?:(?:for (?:all|every|any|each)|whenever)(?: [a-z]+){0,2} \$[a-zA-Z]"
    r"|(?:for|where|when) \$[nkm](?!\$))(?:\s*(?:\\(?:geq?|leq?|in|neq?)(?![a-z])|[<>≥≤])[^$\n]{1,40})?\$"
    r"(?:, (?:which|as|since|because)\b[^$0-9\n]{1,60})?[\s.]*$"
)
_PRICED = re.compile(  # $64 for 16 glasses
    r"((?:\$|[€£¥])[0-9][0-9,]*(?:\.[0-9]+)?) for (?:(?:all|the|these|those) )*[0-9]+ [a-z]+(?: [a-z]+)?(?=[\s.!]*$)"
)
_ASKED_BOUND = re.compile(
    r"\b(?:least|most|minimum|maximum|smallest|largest|fewest|guarantee)\b|至少|至多|最[大小多少]", re.IGNORECASE
)
_BOUND = re.compile(r"(?<=[a-z] )(?<! is )(?<! are )at (?:least|most) (?=\$?[0-9])|至少|至多")
_COMPARATIVE = re.compile(rf"\b({COMPARATIVE}|times)\b")
_COMPARED = re.compile(rf"(?<=[0-9a-z$}}])[ ]({COMPARATIVE}|times)\b(?=[\s.!)}}$]*$| (?:than|the|that|its)\b)")
_ASKED_ORDINAL, _ORDINAL = re.compile(r"\b[Ww]hich\b"), re.compile(r"(?<=[0-9])(?:st|nd|rd|th)\b(?=[\s.!]*$)")
_ROUNDED = re.compile(
    r",?\s\(?(?:(?:rounded|correct|accurate)\s)?to\s(?:[0-9]|one|two|three|four|five)\s"
    r"(?:decimal places?|significant (?:figures?|digits?))\)?"
)
_CONCLUSION = r"\b(?:so|hence|thus|therefore|then|leaving|giving|making|which|but|now|total|answer)\b"
_REASON = re.compile(  # 58 stickers are left after she gave 12 away
    rf"([0-9](?:(?!{_CONCLUSION})[^0-9.;:]){{0,40}}?)(?:,\s(?:(?:exactly )?as(?! well)|of which"
    r"|[0-9]+ of (?:which|whom|them|these)|the (?:sum|product|number|difference) of|with [0-9]+ (?:element|member)s?"
    r"|(?:i\.e\.|that is),? (?:until|from|by|in|on|at))|\s\(from|\s[—–] (?:this|it)"
    r"|,?\s\(?(?:because|since|after (?:[a-z]+ing|he|she|it|they|we|you|[A-Z][a-z]+ (?!is|was)[a-z]+)))\b"
    rf"(?:(?!{_CONCLUSION})[^\n]){{1,120}}$"
)
_PARTED = re.compile(  # 42 students: 20 girls and 22 boys
    rf"(?<![\w.,])(?P<total>(?:\\?\$)?[0-9][0-9,]*(?:\.[0-9]+)?|{NUMBER_WORD})(?P<noun>[^0-9:.;=()\n]{{0,40}}?)"
    r"(?::|\()(?P<parts>[^=()\n]{3,200})\)?[\s.!]*$"
)
_PART, _NO_WORD = re.compile(r"[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+(?:\.[0-9]+)?"), re.compile(r"(?:[0-9,;.\s]|and)+")
_PRICE = re.compile(rf"\$({_PART.pattern})")
_END_OF_PROOF = re.compile(r"(?:\$\\(?:blacksquare|square|Box|qed)\$|\\\(\\(?:black)?square\\\)|QED)[\s.]*$")
_LONGEST_LINE = 400


def unconditioned(text: str) -> str:
    r"""The text without what its last line says of its answer: the place where a value is attained, the integers for
    which a formula holds, a reason, the parts that a number is the sum or the count of.

    >>> unconditioned("The maximum is 12, attained at x = 3."), unconditioned(r"It is $2n$ for all $n \ge 1$.")
    ('The maximum is 12', 'It is $2n$')
    >>> unconditioned("58 left after giving 12 away"), unconditioned("5: 2 girls, 3 boys"), unconditioned("6: 2 and 3")
    ('58 left', '5', '6: 2 and 3')
    """
    text = _PRICED.sub(r"\1", _DECLARED.sub(r"\1", _EXTREME.sub(r"\1", _ATTAINED.sub("", text))))
    start = text.rstrip().rfind("\n") + 1
    last = _END_OF_PROOF.sub("", text[start:])
    if len(last) > _LONGEST_LINE or not last.strip():
        return text
    if (parted := _PARTED.search(last)) is not None and (total := _total(parted)) is not None:
        return f"{text[: start + parted.start()]}{total}{parted['noun']}"
    return text[:start] + _REASON.sub(r"\1", last)


def _total(found: re.Match[str]) -> str | None:
    """The total in a match of `_PARTED` ("42 students: 20 girls and 22 boys"), in digits, if the numbers behind it add
    up to it, or are a bare list of that many numbers; else None. Of a price, the parts are prices."""
    told = counted(found["total"]) if found["total"][0].isalpha() else None
    total = told or Fraction(_PART.findall(found["total"])[0].replace(",", ""))
    parts = ("$" in found["total"] and _PRICE.findall(found["parts"])) or _PART.findall(found["parts"])
    is_sum = len(parts) > 1 and sum(Fraction(part.replace(",", "")) for part in parts) == total
    is_total = is_sum or (len(parts) == total and _NO_WORD.fullmatch(found["parts"]))
    return (found["total"] if told is None else str(told)) if is_total else None


def unbounded(text: str, prompt: str) -> str:
    """The text without what the question has fixed: "at least" and "at most" before the number of a sentence, if the
    question asks for a bound; a comparative behind it that the question has; the ending of an ordinal, if it asks
    "which".

    >>> unbounded("He needs at least 4 socks.", "What is the least number of socks?")
    'He needs 4 socks.'
    >>> unbounded("It is 5 cm longer.", "How much longer is it?"), unbounded("The 5th.", "Which term is it?")
    ('It is 5 cm.', 'The 5.')
    """
    if ("at " in text or "至" in text) and _ASKED_BOUND.search(prompt) is not None:
        text = _BOUND.sub("", text)
    if prompt and (asked := set(_COMPARATIVE.findall(prompt))):
        text = _COMPARED.sub(lambda found: "" if found[1] in asked else found[0], text)
    return _ORDINAL.sub("", text) if _ASKED_ORDINAL.search(prompt) is not None else text


def unrounded(text: str) -> str:
    """The text without the number of places to which an answer is rounded.

    >>> unrounded("It is 3.14, rounded to 2 decimal places.")
    'It is 3.14.'
    """
    return _ROUNDED.sub("", text) if "decimal place" in text or "significant" in text else text
