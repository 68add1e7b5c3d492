r"""Numbers, dates and refusals that are told in words: "twenty-five", "one half", "20 June", "no real solutions"."""

from __future__ import annotations

import re
from typing import Final

_COUNTED: Final = [
    "zero",
    "one",
    "two",
    "three",
    "four",
    "five",
    "six",
    "seven",
    "eight",
    "nine",
    "ten",
    "eleven",
    "twelve",
    "thirteen",
    "fourteen",
    "fifteen",
    "sixteen",
    "seventeen",
    "eighteen",
    "nineteen",
]
_TENS: Final = ["twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]
_SMALL: Final = {name: value for value, name in enumerate(_COUNTED)} | {
    name: 10 * value for value, name in enumerate(_TENS, start=2)
}
_LARGE: Final = {"thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
MAGNITUDES: Final = {"hundred": 100, "dozen": 12, **_LARGE}
_PARTS: Final = {
    name: value
    for value, names in {
        2: "half halves",
        3: "third thirds",
        4: "quarter quarters fourth fourths",
        5: "fifth fifths",
        6: "sixth sixths",
        8: "eighth eighths",
        10: "tenth tenths",
        100: "hundredth hundredths",
    }.items()
    for name in names.split()
}
_MONTHS: Final = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
]
_MONTH: Final = "|".join(f"{month}|{month[:3]}\\.?" for month in _MONTHS)
DATE: Final = re.compile(
    rf"(?P<month>{_MONTH})\s+(?P<day>[0-9]{{1,2}})(?:st|nd|rd|th)?(?:,?\s+(?P<year>[0-9]{{4}}))?(?![0-9])"
    rf"|(?P<first>[0-9]{{1,2}})(?:st|nd|rd|th)?\s+(?:of\s+)?(?P<second>{_MONTH})(?:,?\s+(?P<third>[0-9]{{4}}))?(?![0-9])"
)
_NOTHING: Final = re.compile(
    r"(?:there (?:is|are) )?no (?:(?:real|such|possible|valid) )?(?:solutions?|roots?)(?: exists?)?|(?:the )?empty set",
    re.IGNORECASE,
)

_JOINTS: Final = re.compile(r"(?<=hundred)(?:,|\s+and\b)|(?<=thousand)(?:,|\s+and\b)|(?<=million)(?:,|\s+and\b)|[\s-]+")


def number_in_words(text: str) -> str | None:
    r"""What a text of number words only says, as LaTeX; None for every other text.

    >>> number_in_words("one hundred and twenty-five"), number_in_words("Two thirds"), number_in_words("minus four")
    ('125', '\\frac{2}{3}', '-4')
    """
    words = _JOINTS.sub(" ", text.lower()).split()
    if words[:1] in (["minus"], ["negative"]):
        found = number_in_words(" ".join(words[1:]))
        return None if found is None else f"-{found}"
    if len(words) > 1 and words[-1] in _PARTS:
        above = 1 if words[:-1] in (["a"], ["an"]) else _counted(words[:-1])
        return None if above is None else rf"\frac{{{above}}}{{{_PARTS[words[-1]]}}}"
    found_number = _counted(words)
    return None if found_number is None else str(found_number)


def _counted(words: list[str]) -> int | None:
    """The number that words count, where they are how that number is said."""
    total = current = 0
    for word in words:
        if word in _SMALL:
            current += _SMALL[word]
        elif word == "hundred":
            current *= 100
        elif word in _LARGE:
            total, current = total + current * _LARGE[word], 0
        else:
            return None
    return total + current if words and said(total + current) == words else None


def said(number: int) -> list[str]:
    """The words of a number below a thousand million million, without "and".

    >>> " ".join(said(12_345))
    'twelve thousand three hundred forty five'
    """
    if number < 20:
        return [_COUNTED[number]]
    if number < 100:
        return [_TENS[number // 10 - 2], *(said(number % 10) if number % 10 else [])]
    name, size = [("hundred", 100), *_LARGE.items()][0 if number < 1000 else (len(str(number)) - 1) // 3]
    return [*said(number // size), name, *(said(number % size) if number % size else [])]


def date(text: str) -> str | None:
    """One spelling per date: "june 20", "june 20 2024"; None for what is no date.

    >>> date("20th of June"), date("Jun. 20, 2024"), date("20")
    ('june 20', 'june 20 2024', None)
    """
    found = DATE.fullmatch(text.strip())
    if found is None:
        return None
    month, day, year = (
        found[one] or found[two] for one, two in (("month", "second"), ("day", "first"), ("year", "third"))
    )
    name = next(full for full in _MONTHS if full.startswith(month.rstrip(".")))
    return " ".join([name.lower(), str(int(day)), *([year] if year else [])])


def says_nothing_solves_it(text: str) -> bool:
    """Is it "no solution", "there are no real solutions", "the empty set"?"""
    return _NOTHING.fullmatch(text.strip()) is not None
