r"""Units: what stands behind a number and is no part of it.

A unit is not asked for, so an answer without one is right. Two different known units are two different answers; words
that are no unit (``5 apples``) say nothing.
"""

from __future__ import annotations

import re
from typing import Final

_SPELLINGS: Final = {
    "m": "m meter meters metre metres",
    "cm": "cm centimeter centimeters centimetre centimetres",
    "mm": "mm millimeter millimeters millimetre millimetres",
    "km": "km kilometer kilometers kilometre kilometres",
    "in": "inch inches",
    "ft": "ft foot feet",
    "yd": "yd yard yards",
    "mi": "mile miles",
    "g": "g gram grams gm",
    "kg": "kg kilogram kilograms",
    "mg": "mg milligram milligrams",
    "lb": "lb lbs pound pounds",
    "oz": "oz ounce ounces",
    "l": "l liter liters litre litres",
    "ml": "ml milliliter milliliters",
    "s": "s sec second seconds",
    "min": "min minute minutes",
    "h": "h hr hrs hour hours",
    "d": "day days",
    "week": "week weeks",
    "month": "month months",
    "yr": "yr year years",
    "mph": "mph",
    "km/h": "kmh kmph km/h",
    "m/s": "m/s",
    "degree": "deg degree degrees",
    "rad": "rad radian radians",
    "cent": "cent cents",
    "dollar": "dollar dollars usd",
    "n": "newton newtons",
    "j": "joule joules",
    "w": "watt watts",
    "hz": "hz",
    "acre": "acre acres",
    "gal": "gal gallon gallons",
}
KNOWN: Final = {spelling: unit for unit, spellings in _SPELLINGS.items() for spelling in spellings.split()}
_POWERS: Final = {"sq": "2", "square": "2", "squared": "2", "cu": "3", "cubic": "3", "cubed": "3"}

_IN_TEXT = re.compile(
    r"^(?P<body>.*[^\s,;=<>+\-*/^])\s*\\text\{(?P<words>[^{}]*)\}\s*(?:\^\s*\{?(?P<power>-?[0-9])\}?)?$", re.DOTALL
)
_PLAIN = re.compile(
    r"^(?P<body>.*[0-9})!%])(?P<space>\s*)(?P<words>[A-Za-z]+(?:[ /.]+[A-Za-z]+)*)\.?\s*"
    r"(?:\^?\s*\{?(?P<power>[23])\}?)?$",
    re.DOTALL,
)
_CIRCLE = re.compile(r"^(?P<body>[^\\]*[0-9})])\s*\^\s*\{?\\circ\s*\}?\s*(?P<scale>[CF]?)$")
_BASE = re.compile(r"^(?P<body>-?[0-9A-Z]*[0-9][0-9A-Z]*)_\{?(?P<base>[0-9]{1,2})\}?$")  # 101_2


def without_unit(text: str) -> tuple[str, str]:
    r"""The text before its unit, and the unit: a canonical name with its power, or "" where none is known.

    >>> without_unit(r"15\text{ cm}^{2}"), without_unit("90^\\circ"), without_unit("5 apples"), without_unit("3x")
    (('15', 'cm^2'), ('90', 'degree'), ('5', ''), ('3x', ''))
    """
    if (based := _BASE.match(text)) is not None:
        return based["body"], f"base {based['base']}"
    if (circle := _CIRCLE.match(text)) is not None:
        return circle["body"].strip(), "degree" + circle["scale"]
    if (found := _IN_TEXT.match(text)) is not None:
        return found["body"].strip(), _unit(found["words"], found["power"])
    found = _PLAIN.match(text)
    if found is not None and _are_unit(found["words"], bool(found["space"])):
        return found["body"].strip(), _unit(found["words"], found["power"])
    return text, ""


def _are_unit(words: str, apart: bool) -> bool:
    """Are letters behind a number words, and not variables? ``3x`` and ``2ab`` are products."""
    parts = re.split(r"[ /.]+", words.lower())
    if all(part in KNOWN or part in _POWERS or part in ("per", "of") for part in parts):
        return apart or len(words) > 1
    return apart and all(len(part) >= 4 or part in KNOWN or part in ("per", "of", "the", "in") for part in parts)


def _unit(words: str, power: str | None) -> str:
    parts = re.split(r"[\s.]+", words.strip(" .").lower())
    for part in parts:
        power = power or _POWERS.get(part)
    names = [KNOWN[part] for part in parts if part in KNOWN]
    if len(names) != 1 or len(parts) > 2:
        return ""
    return f"{names[0]}^{power}" if power and power != "1" else names[0]
