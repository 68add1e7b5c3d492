r"""Units of measurement: products of powers such as ``m/s^2`` and ``ft*lb``, and their conversion.

A unit accounts for all of its factors: ``m/s/s`` is not ``m/s``, and "ft-lb" is not "ft". The prefixes of the SI have
their case: mg is not Mg.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from fractions import Fraction
from functools import lru_cache
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
    "kg": "kg kilogram kilograms kilo kilos",
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
    "decade": "decade decades",
    "century": "century centuries",
    "mi/h": "mph",
    "km/h": "kmh kmph",
    "degree": "deg degree degrees",
    "rad": "rad radian radians",
    "cent": "cent cents",
    "dollar": "dollar dollars usd",
    "N": "newton newtons",
    "J": "joule joules",
    "W": "watt watts",
    "Hz": "hz hertz",
    "acre": "acre acres",
    "gal": "gal gallon gallons",
    "ton": "ton tons",
    "Mg": "tonne tonnes",
    "quart": "quart quarts",
    "pint": "pint pints",
    "cup": "cup cups",
    "tablespoon": "tablespoon tablespoons tbsp",
    "teaspoon": "teaspoon teaspoons tsp",
}
#: Words for units, in any case; the canonical name of each.
KNOWN: Final = {spelling: unit for unit, spellings in _SPELLINGS.items() for spelling in spellings.split()}
#: Size of each unit, as a number and the units that it is measured in; those that are not here measure themselves.
_SIZES: Final[Mapping[str, tuple[str, str]]] = {
    "l": ("1/1000", "m^3"),
    "min": ("60", "s"),
    "h": ("3600", "s"),
    "d": ("86400", "s"),
    "week": ("604800", "s"),
    "ft": ("12", "in"),
    "yd": ("36", "in"),
    "mi": ("63360", "in"),
    "lb": ("16", "oz"),
    "yr": ("12", "month"),
    "decade": ("120", "month"),
    "century": ("1200", "month"),
    "dollar": ("100", "cent"),
    "Hz": ("1", "1/s"),
    "N": ("1000", "g*m/s^2"),
    "J": ("1000", "g*m^2/s^2"),
    "W": ("1000", "g*m^2/s^3"),
    "Pa": ("1000", "g/m/s^2"),
    "V": ("1000", "g*m^2/A/s^3"),
    "ohm": ("1000", "g*m^2/A^2/s^3"),
    "C": ("1", "A*s"),
    "Wh": ("3600000", "g*m^2/s^2"),
    "F": ("1/1000", "A^2*s^4/g/m^2"),
    "T": ("1000", "g/A/s^2"),
    "B": ("8", "bit"),
    "bar": ("100000000", "g/m/s^2"),
}
_PREFIX_SYMBOLS: Final = "TGMkdcmµnp"
#: Powers of ten of the prefixes, by symbol.
_PREFIXES: Final = {"": 0, "u": -6} | dict(zip(_PREFIX_SYMBOLS, (12, 9, 6, 3, -1, -2, -3, -6, -9, -12), strict=True))
_PREFIX_NAMES: Final = ("tera", "giga", "mega", "kilo", "deci", "centi", "milli", "micro", "nano", "pico")
_PREFIX_WORDS: Final = dict(zip(_PREFIX_NAMES, _PREFIX_SYMBOLS, strict=True))
_METRIC_SYMBOLS: Final = "m g s A K N J W C V F T H mol Hz Pa Wb eV cal Wh bar B VA Gy Bq lm lx cd"
#: Symbols that take a prefix, and the canonical name of each.
_METRIC: Final = {
    **{symbol: symbol for symbol in _METRIC_SYMBOLS.split()},
    "L": "l",
    "l": "l",
    "Ω": "ohm",
    "ohm": "ohm",
    "b": "bit",
    "Ws": "J",
    "VA": "VA",
}
_METRIC_WORDS: Final = {
    "meter": "m",
    "metre": "m",
    "gram": "g",
    "second": "s",
    "ampere": "A",
    "amp": "A",
    "kelvin": "K",
    "mole": "mol",
    "newton": "N",
    "joule": "J",
    "watt": "W",
    "coulomb": "C",
    "volt": "V",
    "farad": "F",
    "tesla": "T",
    "henry": "H",
    "pascal": "Pa",
    "hertz": "Hz",
    "liter": "l",
    "litre": "l",
    "ohm": "ohm",
    "calorie": "cal",
    "byte": "B",
    "bit": "bit",
    "electronvolt": "eV",
    "watthour": "Wh",
    "weber": "Wb",
}
_OTHER: Final = frozenset(["atm", "rpm", "psi", "dB", "KiB", "MiB", "GiB", "TiB", "mmHg"])
#: Words in front of a unit that make it another one: nautical miles.
_OF_ANOTHER: Final = frozenset(["nautical", "light", "fluid", "troy", "metric", "imperial"])
#: Words for powers of the unit beside them.
POWERS: Final = {"sq": 2, "square": 2, "squared": 2, "cu": 3, "cubic": 3, "cubed": 3}
_BEHIND: Final = frozenset(("squared", "cubed"))

#: Suffix of the unit of an amount in two units (converted to the smaller), so that it differs from a plain number.
TWO_UNITS: Final = " and more"
#: First sign of a unit whose factors have two readings: it is equal to itself alone.
UNCLEAR: Final = "?"

_FACTOR: Final = re.compile(
    r"\s*(?:([*/-])|\bper\b)?\s*(\()?\s*([A-Za-zµΩ]+)\.?(?:\s*\^\s*\{?\s*(-?[1-9])\s*\}?)?\s*(\))?"
)

_JOINED: Final = re.compile(r"[*/^-]")


def product(text: str, power: str | None = None) -> str:
    r"""Canonical name of a unit: its factors in order, those below a slash behind it; "" if a part of the text is no
    unit. "?" and the text, if the unit has two readings (J/mol K). `power`: exponent of the last factor; None: none.

    >>> product("m/s/s"), product("meters per second squared"), product("ft-lb"), product("sq ft"), product("apples")
    ('m/s^2', 'm/s^2', 'ft*lb', 'ft^2', '')
    """
    return _product(text.replace(r"\cdot", "*"), power or "")


@lru_cache(maxsize=1 << 12)
def _product(text: str, power: str) -> str:
    powers = Counter[str]()
    at, below, inside, unclear, raised, last = 0, False, False, False, 1, ""
    text = text.strip(" .")
    text = text[1:] if text.startswith("1/") else text
    while at < len(text):
        if (found := _FACTOR.match(text, at)) is None:
            return ""
        is_per = found[1] == "/" or (found[1] is None and "per" in found[0][: found.start(3) - found.start()])
        at, word = found.end(), found[3]
        if word == "per" and not is_per:
            return ""
        if word.lower() in _BEHIND and last:
            powers[last] += (-1 if below else 1) * (POWERS[word.lower()] - 1)
            continue
        if word.lower() in POWERS:
            raised *= POWERS[word.lower()]
            below = is_per or below
            continue
        if word.lower() in _OF_ANOTHER:
            following = _FACTOR.match(text, at)
            name = unit_named(following[3]) if following is not None and not following[1] else ""
            at, last = (following.end() if following is not None else at), f"{word.lower()} {name}" if name else ""
        else:
            last = "in" if word == "in" and _JOINED.search(text) else unit_named(word)
        if not last or (found[2] and not is_per):
            return ""
        unclear |= not is_per and below and not inside and raised == 1 and bool(powers)  # J/mol K has two readings
        below, inside = is_per or (below and (inside or raised > 1)), (found[2] is not None or inside) and not found[5]
        exponent = int(found[4] or (power if at == len(text) and power else 1)) * raised
        for name, own in _factors(last).items():
            powers[name] += (-1 if below else 1) * exponent * own
        raised = 1
    if unclear:
        return UNCLEAR + "".join(text.split())
    return _joined(powers) if raised == 1 else ""


def unit_named(word: str) -> str:
    """Canonical name of one unit; "" if it is unknown. Symbols have their case; words, and symbols that are none in
    their own case (KM), match in any.

    >>> [unit_named(word) for word in ("mA", "MA", "Kg", "mg", "Mg", "megawatts", "apples")]
    ['mA', 'MA', 'kg', 'mg', 'Mg', 'MW', '']
    """
    if (exact := _SYMBOLS.get(word)) is not None:
        return exact
    lower = word.lower()
    if lower in KNOWN:
        return KNOWN[lower]
    return _WORDS.get(lower) or _WORDS.get(lower.removesuffix("s"), "")


def _prefixed(prefix: str, name: str) -> str:
    """Canonical name of a metric unit with a prefix: ``km``, ``kW``."""
    return ("µ" if prefix == "u" else prefix) + name


_SYMBOLS: Final[Mapping[str, str]] = {
    **{prefix + symbol: _prefixed(prefix, name) for symbol, name in _METRIC.items() for prefix in _PREFIXES},
    **{name: name for name in (*_OTHER, *_SPELLINGS) if name != "in"},
    **{word: unit for word, unit in KNOWN.items() if len(word) < 4},
}
_WORDS: Final[Mapping[str, str]] = {
    prefix + word: _prefixed(short, name)
    for word, name in _METRIC_WORDS.items()
    for prefix, short in {"": "", **_PREFIX_WORDS}.items()
}
_SCALES: Final = {
    _prefixed(prefix, name): (name, Fraction(10) ** power)
    for name in {*_METRIC.values()}
    for prefix, power in _PREFIXES.items()
    if prefix and _prefixed(prefix, name) not in _SIZES
}


def _joined(powers: Mapping[str, int]) -> str:
    above = [_raised(name, power) for name, power in sorted(powers.items()) if power > 0]
    below = [_raised(name, -power) for name, power in sorted(powers.items()) if power < 0]
    return "/".join(["*".join(above) or "1", *below])


def _raised(name: str, power: int) -> str:
    return name if power == 1 else f"{name}^{power}"


def _factors(unit: str) -> Counter[str]:
    """Powers of the factors of a canonical unit, by name; negative below a slash."""
    powers = Counter[str]()
    for place, part in enumerate(unit.split("/")):
        for factor in part.split("*"):
            name, _, power = factor.partition("^")
            if name != "1":
                powers[name] += (-1 if place else 1) * int(power or 1)
    return powers


@lru_cache(maxsize=1 << 12)
def conversion(unit: str, other: str) -> Fraction | None:
    """Factor that converts values in `unit` to values in `other`, 1 for equal names; else None if they measure
    different quantities, or one is the base of a numeral or has two readings.

    >>> str(conversion("m^2", "cm^2")), str(conversion("km/h", "m/s")), conversion("m", "s")
    ('10000', '5/18', None)
    """
    if unit == other:
        return Fraction(1)
    if UNCLEAR in unit + other or "base" in unit + other:
        return None
    one, two = (_size(name.removesuffix(TWO_UNITS)) for name in (unit, other))
    return one[1] / two[1] if one[0] == two[0] else None


def _size(unit: str) -> tuple[Mapping[str, int], Fraction]:
    """Powers of the basic units that a canonical unit is measured in, by name, and its size in them."""
    powers, size = Counter[str](), Fraction(1)
    for name, power in _factors(unit).items():
        of_name, scale = _SCALES.get(name, (name, Fraction(1))) if name not in _SIZES else (name, Fraction(1))
        number, measured = _SIZES.get(of_name, ("1", of_name))
        size *= (scale * Fraction(number)) ** power
        for base, own in _factors(measured).items():
            powers[base] += power * own
    return {base: power for base, power in powers.items() if power}, size
