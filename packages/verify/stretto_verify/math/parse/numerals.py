"""Numbers in words: "forty-two", "one hundred and five", "two thirds", "two and a half", "three point one four", 十."""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Final

_ONES: Final = (
    *("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"),
    *("thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen"),
)
_TENS: Final = ("twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")
_SMALL: Final = {word: number for number, word in enumerate(_ONES)} | {
    ten: 10 * number for number, ten in enumerate(_TENS, start=2)
}
_LARGE: Final = {"thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
_IRREGULAR: Final = {"one": "first", "two": "second", "three": "third", "five": "fifth", "eight": "eighth"} | {
    "nine": "ninth",
    "twelve": "twelfth",
}
#: The words of denominators, in the singular.
_PARTS: Final = {"half": 2, "quarter": 4, "hundredth": 100, "thousandth": 1000} | {
    _IRREGULAR.get(word, f"{word.removesuffix('y')}ieth" if word.endswith("y") else f"{word}th"): number
    for word, number in _SMALL.items()
    if number > 2
}
_MOST_WORDS: Final = 16
_NAMES: Final = "|".join(
    sorted([*_SMALL, *_LARGE, "hundred", "dozen", *_PARTS, *(f"{part}s" for part in _PARTS)], key=len, reverse=True)
)
_SPELT = re.compile(
    rf"\b(?:{'|'.join(_SMALL)}|(?:half )?an? (?:dozen|hundred|{'|'.join(_LARGE)}))\b"
    rf"(?:[ -](?:and )?(?:an? )?(?:{_NAMES}|halves)\b)*",
    re.IGNORECASE,
)

_CHINESE: Final = {digit: number for number, digit in enumerate("零一二三四五六七八九")} | {"〇": 0, "两": 2, "兩": 2}
_PLACES: Final = {"十": 10, "百": 100, "千": 1000}
_MYRIADS: Final = {"万": 10**4, "萬": 10**4, "亿": 10**8, "億": 10**8}
_IN_CHINESE = re.compile(  # with a word that counts
    r"(?:\\text\s*\{)?\s*([负負])?([0-9]{1,15}|[零〇一二两兩三四五六七八九十百千万萬亿億]{1,16})\s*[个個只隻条條张張本人名位件棵颗枚种種次组組块塊]?\s*\}?[\s。.]*"
)


def counted(words: str) -> Fraction | None:
    """Value of a number written in words; None if the text is no such number.

    >>> str(counted("twelve")), str(counted("Two hundred and twenty-one")), str(counted("minus two thirds"))
    ('12', '221', '-2/3')
    >>> str(counted("two and a half")), str(counted("three point one four")), str(counted("half a dozen"))
    ('5/2', '157/50', '6')
    >>> counted("one two")
    """
    parts = re.split(r"[\s-]+", words.strip().lower())
    if len(parts) > _MOST_WORDS or not parts:
        return None
    if parts[0] in ("minus", "negative"):
        found = _amount(parts[1:])
        return None if found is None else -found
    return _amount(parts)


def in_figures(text: str) -> str:
    """The text with its numbers in words written as digits; "one" alone stays, since it may be a pronoun.

    >>> in_figures("It lasted twenty-five hours, no one knows why.")
    'It lasted 25 hours, no one knows why.'
    """
    return _SPELT.sub(_figures, text)


def _figures(found: re.Match[str]) -> str:
    value = None if found[0].lower() == "one" else counted(found[0])
    return found[0] if value is None else str(value)


def counted_in_chinese(text: str) -> int | None:
    """Value of a whole number in Chinese, or of digits with a Chinese word that counts; None for other texts.

    >>> [counted_in_chinese(text) for text in ("五", "十五", "一百零五", "三万五千", "5个", "五五", "不")]
    [5, 15, 105, 35000, 5, None, None]
    """
    if (found := _IN_CHINESE.fullmatch(text)) is None:
        return None
    value = int(found[2]) if found[2].isdecimal() and found[2].isascii() else _in_places(found[2])
    return -value if value is not None and found[1] else value


def _in_places(signs: str) -> int | None:
    """Value of Chinese digits with their places (``三百零五``); None if they stand in no order that makes a number."""
    total = group = 0
    digit: int | None = None
    place, largest = 10**4, 10**16
    for sign in signs:
        if sign in _CHINESE:
            if digit:
                return None
            digit = _CHINESE[sign]
        elif sign in _PLACES and _PLACES[sign] < place and (digit or sign == "十"):
            place = _PLACES[sign]
            group, digit = group + (digit or 1) * place, None
        elif sign in _MYRIADS and _MYRIADS[sign] < largest and (group or digit):
            largest, place = _MYRIADS[sign], 10**4
            total, group, digit = total + (group + (digit or 0)) * largest, 0, None
        else:
            return None
    return total + group + (digit or 0)


def _amount(parts: list[str]) -> Fraction | None:
    if "point" in parts:
        at = parts.index("point")
        whole, digits = _whole(parts[:at]), [_SMALL.get(part, 10) for part in parts[at + 1 :]]
        if whole is None or not digits or max(digits) > 9:
            return None
        return whole + Fraction(int("".join(map(str, digits))), 10 ** len(digits))
    if (whole := _whole(parts)) is not None:
        return Fraction(whole)
    if parts[:1] == ["half"] and len(parts) == 3 and (whole := _whole(parts[1:])) is not None:
        return Fraction(whole, 2)  # half a dozen
    if (part := _fraction(parts)) is not None:
        return part
    for at, word in enumerate(parts):
        if word == "and" and (whole := _whole(parts[:at])) is not None and (part := _fraction(parts[at + 1 :])):
            return whole + part
    return None


def _fraction(parts: list[str]) -> Fraction | None:
    """Value of ``one half`` or ``three quarters``; None for other words. Several parts must be plural."""
    if not parts:
        return None
    *above, below = parts
    plural = "halves" if below == "halves" else below
    parted = "half" if below == "halves" else below.removesuffix("s")
    count = 1 if above in ([], ["a"], ["an"]) else _whole(above)
    if parted not in _PARTS or count is None or (not above and parted != "half"):
        return None
    return Fraction(count, _PARTS[parted]) if (plural != parted) == (count != 1) else None


def _whole(parts: list[str]) -> int | None:
    """Value of a whole number such as ``two hundred and five thousand``, given as its words; None for other words."""
    total = group = 0
    before = ""  # kind of the last word: a digit, ten, hundred, large
    largest = 10**15
    for word in parts:
        if word == "and" and before in ("hundred", "large"):
            before = f"{before} and"
        elif word in ("a", "an") and not before:
            group, before = 1, "digit"
        elif word in _SMALL:
            small = _SMALL[word]
            kind = "ten" if small >= 20 else "digit"
            if before.removesuffix(" and") not in ("", "hundred", "large") and not (before == "ten" and 0 < small < 10):
                return None
            group, before = group + small, kind
        elif word == "hundred" and 0 < group < 100 and before in ("digit", "ten"):
            group, before = 100 * group, "hundred"
        elif word == "dozen" and group and before in ("digit", "ten"):
            group, before = 12 * group, "dozen"
        elif word in _LARGE and group and before in ("digit", "ten", "hundred") and _LARGE[word] < largest:
            total, group, largest, before = total + group * _LARGE[word], 0, _LARGE[word], "large"
        else:
            return None
    is_whole = before in ("digit", "ten", "hundred", "dozen", "large") and parts not in (["a"], ["an"])
    return total + group if is_whole else None
