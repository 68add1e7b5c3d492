r"""Units: what stands behind a number and is no part of it.

A unit is not asked for, so an answer without one is right. Of two known units the one must be a multiple of the other,
and the numbers with them: 5 m is 500 cm, and not 5 cm. Words that are no unit (``5 apples``) say nothing.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from fractions import Fraction
from typing import Final

_SPELLINGS: Final = {
    "m": "m meter meters metre metres",
    "cm": "cm centimeter centimeters centimetre centimetres",
    "mm": "mm millimeter millimeters millimetre millimetres",
    "km": "km kilometer kilometers kilometre kilometres",
    "in": "inch inches",
    "ft": "ft foot feet",
    "yd": "yd yard yards",
    "mi": "mile miles mi",
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
    "mi/h": "mph",
    "km/h": "kmh kmph",
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
_KINDS: Final[Mapping[str, Mapping[str, int | str]]] = {  # how many of the kind's first unit one of each is
    "length": {"m": 1, "cm": "1/100", "mm": "1/1000", "km": 1000},
    "imperial length": {"in": 1, "ft": 12, "yd": 36, "mi": 63360},
    "mass": {"g": 1, "kg": 1000, "mg": "1/1000"},
    "imperial mass": {"oz": 1, "lb": 16},
    "volume": {"l": 1, "ml": "1/1000"},
    "time": {"s": 1, "min": 60, "h": 3600, "d": 86400, "week": 604800},
    "long time": {"month": 1, "yr": 12},
    "money": {"cent": 1, "dollar": 100},
}
_SIZES: Final = {unit: (kind, Fraction(size)) for kind, units in _KINDS.items() for unit, size in units.items()}

_IN_TEXT = re.compile(
    r"^(?P<body>.*[^\s,;=<>+\-*/^])\s*\\text\{(?P<words>[^{}]*)\}\s*(?:\^\s*\{?(?P<power>-?[0-9])\}?)?$", re.DOTALL
)
_PLAIN = re.compile(
    r"^(?P<body>.*[0-9})!%])(?P<space>\s*)(?P<words>[A-Za-z]+(?:[ /.]+[A-Za-z]+)*)\.?\s*"
    r"(?:\^?\s*\{?(?P<power>[23])\}?)?$",
    re.DOTALL,
)
_CIRCLE = re.compile(r"^(?P<body>[^\\]*[0-9})])\s*\^\s*\{?\\circ\s*\}?\s*(?P<scale>[CF]?)$")
_BASE = re.compile(
    r"^(?P<open>\()?(?P<body>-?[0-9A-Z]*[0-9][0-9A-Z]*)(?(open)\)|)_\{?(?:\\text\{)?(?P<base>[0-9]{1,2}|two|eight|ten)\}*$"
)  # 101_2
_BASE_WORDS: Final = {"two": "2", "eight": "8", "ten": "10"}
_DENIED = re.compile(
    r"\b(?:not|wrong|incorrect|false|if|or|so|than|otherwise|impossible|times|plus|minus|divided|over|factorial)\b",
    re.IGNORECASE,
)
_COMPOUND = re.compile(
    r"([0-9.]+)\s*([A-Za-z]+)\s*,?\s*(?:and\s+)?([0-9.]+)\s*([A-Za-z]+)(?:\s*,?\s*(?:and\s+)?([0-9.]+)\s*([A-Za-z]+))?"
)


def without_unit(text: str) -> tuple[str, str]:
    r"""The text before its unit, and the unit: a canonical name with its power, or "" where none is known.

    >>> without_unit(r"15\text{ cm}^{2}"), without_unit("90^\\circ"), without_unit("5 apples"), without_unit("3x")
    (('15', 'cm^2'), ('90', 'degree'), ('5', ''), ('3x', ''))
    """
    if (based := _BASE.match(text)) is not None:
        return based["body"], f"base {_BASE_WORDS.get(based['base'], based['base'])}"
    if (circle := _CIRCLE.match(text)) is not None:
        return circle["body"].strip(), "degree" + circle["scale"]
    if (found := _IN_TEXT.match(text)) is not None and not _DENIED.search(found["words"]):
        return found["body"].strip(), _unit(found["words"], found["power"])
    found = _PLAIN.match(text)
    if found is not None and _are_unit(found["words"], bool(found["space"])):
        return found["body"].strip(), _unit(found["words"], found["power"])
    return text, ""


def compound(text: str) -> tuple[str, str] | None:
    r"""Several units of one kind as a sum in the smallest of them, or None.

    >>> compound("2 hours 30 minutes"), compound(r"5\text{ ft }3\text{ in}"), compound("2 apples 3 pears")
    (('2\\cdot 60+30', 'min'), ('5\\cdot 12+3', 'in'), None)
    """
    found = _COMPOUND.fullmatch(re.sub(r"\\text\{([^{}]*)\}", r" \1 ", text).strip())
    if found is None:
        return None
    groups = [group for group in found.groups() if group is not None]
    units = [KNOWN.get(word.lower(), "in" if word == "in" else "") for word in groups[1::2]]
    factors = [ratio(unit, units[-1]) for unit in units]
    if None in factors or sorted(factors, reverse=True) != factors or len(set(factors)) < len(factors):  # type: ignore[type-var]
        return None
    terms = [f"{amount}\\cdot {factor}" for amount, factor in zip(groups[0:-2:2], factors, strict=False)]
    return "+".join([*terms, groups[-2]]), units[-1]


def ratio(one: str, other: str) -> Fraction | None:
    """How many of `other` make one of `one`; None where they measure different things.

    >>> ratio("m^2", "cm^2"), ratio("km/h", "m/s"), ratio("m", "kg")
    (Fraction(10000, 1), Fraction(5, 18), None)
    """
    first, second = _size(one), _size(other)
    return first[1] / second[1] if first is not None and second is not None and first[0] == second[0] else None


def _size(unit: str) -> tuple[str, Fraction] | None:
    kinds, size = "", Fraction(1)
    for sign, part in zip((1, -1), unit.split("/"), strict=False):
        name, _, power = part.partition("^")
        if name not in _SIZES or not (power or "1").isdigit():
            return None
        kinds += f"{_SIZES[name][0]}^{sign * int(power or 1)} "
        size *= _SIZES[name][1] ** (sign * int(power or 1))
    return kinds, size


def _are_unit(words: str, apart: bool) -> bool:
    """Are letters behind a number words, and not variables? ``3x`` and ``2ab`` are products."""
    if _DENIED.search(words):
        return False
    parts = re.split(r"[ /.]+", words.lower())
    if parts in (["squared"], ["cubed"]):
        return False
    if all(part in KNOWN or part in _POWERS or part in ("per", "of") for part in parts):
        return apart or len(words) > 1
    return apart and all(len(part) >= 4 or part in KNOWN or part in ("per", "of", "the", "in") for part in parts)


def _unit(words: str, power: str | None) -> str:
    above, _, below = re.sub(r"\s+per\s+", "/", words.strip(" .").lower()).partition("/")
    if not below:
        return _named(above, power)
    names = _named(above, None), _named(below, power)
    return "/".join(names) if all(names) else ""


def _named(words: str, power: str | None) -> str:
    parts = [part for part in re.split(r"[\s.]+", words) if part]
    for part in parts:
        power = power or _POWERS.get(part)
    names = [KNOWN[part] for part in parts if part in KNOWN]
    if len(names) != 1 or len(parts) > 2:
        return ""
    return f"{names[0]}^{power}" if power and power != "1" else names[0]
