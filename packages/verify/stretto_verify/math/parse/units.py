r"""Units after a number.

The gold answer or the final answer may lack its unit. Two known units must be the same, or measure the same quantity
(``5 m`` is ``500 cm``). Other words after a number (``5 apples``) are ignored.
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
#: Quantity that each unit measures, and its size.
_SIZES: Final[Mapping[str, tuple[str, Fraction]]] = {
    unit: (kind, Fraction(size))
    for kind, sizes in {
        "length": {"m": "1", "cm": "0.01", "mm": "0.001", "km": "1000"},
        "long": {"in": "1", "ft": "12", "yd": "36", "mi": "63360"},
        "mass": {"g": "1", "kg": "1000", "mg": "0.001"},
        "weight": {"oz": "1", "lb": "16"},
        "volume": {"l": "1", "ml": "0.001"},
        "time": {"s": "1", "min": "60", "h": "3600", "d": "86400", "week": "604800"},
        "date": {"month": "1", "yr": "12"},
        "money": {"cent": "1", "dollar": "100"},
    }.items()
    for unit, size in sizes.items()
}
#: Suffix of the unit of an amount in two units (converted to the smaller), so that it differs from a plain number.
TWO_UNITS: Final = " and more"
KNOWN: Final = {spelling: unit for unit, spellings in _SPELLINGS.items() for spelling in spellings.split()}
_POWERS: Final = {"sq": "2", "square": "2", "squared": "2", "cu": "3", "cubic": "3", "cubed": "3"}
#: Words after a number that scale it.
MAGNITUDES: Final = {
    "hundred": 100,
    "dozen": 12,
    "thousand": 10**3,
    "million": 10**6,
    "billion": 10**9,
    "trillion": 10**12,
}

#: Symbols of units. Case matters: mW is not MW. Symbols that could be the letter of a choice or a line (J, MN) are left
#: out.
_SYMBOL: Final = re.compile(
    r"[kMGTdcmµn]?(?:Pa|mol|eV|Hz|Wb|cal|bar|W)|[kdcmµn]?[NVLsmg]|[kmµn][JAFC]|[MG]J|atm|rpm|psi|dB|kB|[kMGT]?iB|[GT]B"
)
_CLOSE_SYMBOL: Final = re.compile(r"[kMGm]?(?:Pa|Hz|eV|mol)")  # 2kPa, but not 2mV

#: Symbols that are units in a product, though one alone could be the letter of a choice or a line.
_IN_PRODUCT: Final = frozenset("ACFHKTV") | {"ohm"}
_OF_SYMBOL: Final = {"J": "joule", "N": "newton", "W": "watt"}  # in products
_WRITTEN_OUT: Final = {KNOWN[word]: word for word in _OF_SYMBOL.values()}
_PRODUCT: Final = re.compile(
    r"^(?P<body>(?:(?!\\text).)*?[0-9)}!%])\s*(?P<unit>\\(?:text\{|frac\{\s*\\text|mu(?![a-z])|Omega(?![a-z])).*)$",
    re.DOTALL,
)
_NESTED: Final = r"\{((?:[^{}]|\{[^{}]*\})*)\}"
_FACTOR: Final = re.compile(r"\s*(?:([*/])\s*)?(\()?\s*([A-Za-zµ]+)\s*(?:\^\s*\{?\s*(-?[1-9])\s*\}?)?\s*(\))?\s*")

_UNITS = "|".join(sorted(KNOWN, key=len, reverse=True))
_MONTH = r"(?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec)[a-z]{0,6}\.?"
#: Texts with numbers that are parsed as words: a day, a date, a time of day, an amount in two units.
SPOKEN: Final = re.compile(
    r"(?:Mon|Tues|Wednes|Thurs|Fri|Satur|Sun)day\b"
    rf"|{_MONTH} [0-9]{{1,2}}(?:,? [0-9]{{4}})?(?![0-9])"
    rf"|[0-9]{{1,2}}(?:st|nd|rd|th)? (?:of )?{_MONTH}(?:,? [0-9]{{4}})?(?![0-9])"
    r"|[0-9]{1,2}(?::[0-9]{2})?\s?[apAP]\.?\s?[mM]\b\.?"
    rf"|(?<![0-9.])[0-9.]{{0,12}}[0-9]\s?(?:{_UNITS}),?\s(?:and\s)?[0-9.]{{0,12}}[0-9]\s?(?:{_UNITS})(?![a-zA-Z])"
)

_AMOUNTS = re.compile(
    rf"([0-9]{{1,12}})\s?({_UNITS})(?:,|,?\s)\s?(?:and\s)?([0-9]{{1,12}}(?:\.[0-9]{{1,12}})?)\s?({_UNITS}|in)\.?",
    re.IGNORECASE,
)
_IN_TEXT = re.compile(
    r"^(?P<body>.*[^\s,;=<>+\-*/^])\s*\\text\{(?P<words>[^{}]*)\}\s*(?:\^\s*\{?(?P<power>-?[0-9])\}?)?$", re.DOTALL
)
_PLAIN = re.compile(
    r"^(?P<body>.*[0-9})!%])(?P<space>[^\S\n]*)(?P<words>[A-Za-z]+(?:[ /.]+[A-Za-z]+)*)\.?\s*"
    r"(?:(?:\^\s*\{?|(?<=[A-Za-z]))(?P<power>[23])\}?)?$",
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


def united(text: str) -> str:
    r"""Rewrite the product of units behind a number to one text, with its factors in order; other texts are unchanged.

    >>> united(r"42 \text{m}\text{s}^{-2}"), united(r"8 \text{J mol^{-1} K^{-1}}"), united(r"5 \mu \text{m}")
    ('42\\text{ m/s}^{2}', '8\\text{ K^-1*j*mol^-1}', '5\\text{ µm}')
    """
    if (found := _PRODUCT.match(text)) is None:
        return text
    flat = re.sub(rf"\\frac\s*{_NESTED}\s*{_NESTED}", r"\1/(\2)", found["unit"])
    flat = re.sub(rf"\\text\s*{_NESTED}", r" \1 ", flat).replace(r"\cdot", "*").replace(r"\Omega", "ohm ")
    flat = re.sub(r"\\mu\s*", "µ", flat).replace("·", "*")
    powers: dict[str, int] = {}
    at, below, inside = 0, False, False  # inside brackets behind a slash
    while at < len(flat):
        factor = _FACTOR.match(flat, at)
        if factor is None or not (name := _of_product(factor[3])) or name in powers:
            return text
        sign, opened = factor[1], factor[2] is not None
        if (opened and sign != "/") or (sign is None and below and not inside):
            return text  # J/mol K has two readings
        below, inside = sign == "/" or inside, (opened or inside) and factor[5] is None
        powers[name] = (-1 if below else 1) * int(factor[4] or 1)
        at = factor.end()
    if len(powers) < 2 and "µ" not in flat and "ohm" not in flat and min(powers.values(), default=1) > 0:
        return text
    return found["body"] + _joined(powers)


def _joined(powers: Mapping[str, int]) -> str:
    above = sorted((name, power) for name, power in powers.items() if power > 0)
    below = sorted((name, -power) for name, power in powers.items() if power < 0)
    named = not _IN_PRODUCT & set(powers)  # `_unit` takes a symbol of one letter, such as N, for no unit
    if named and len(above) == 1 == len(below) and above[0][1] == 1:  # the form of simple units
        one, other = (_WRITTEN_OUT.get(name, name) for name in (above[0][0], below[0][0]))
        return rf"\text{{ {one}/{other}}}" + (f"^{{{below[0][1]}}}" if below[0][1] > 1 else "")
    joined = "*".join(name if power == 1 else f"{name}^{power}" for name, power in sorted(powers.items()))
    return rf"\text{{ {joined}}}"


def _of_product(symbol: str) -> str:
    """Canonical name of a factor of a unit; "" if it is unknown."""
    symbol = _OF_SYMBOL.get(symbol, symbol)
    if symbol in _IN_PRODUCT or (len(symbol) > 1 and symbol not in KNOWN and _SYMBOL.fullmatch(symbol)):
        return symbol
    return KNOWN.get(symbol.replace("L", "l"), "µm" if symbol == "µm" else "")


def amount(text: str) -> tuple[str, str] | None:
    """Convert ``2 hours 30 minutes`` to the smaller of its units: value and unit. None if the text is no amount in two
    units.

    >>> amount("2 hours 30 minutes"), amount("30 minutes 2 hours")
    (('150', 'min and more'), None)
    """
    if (found := _AMOUNTS.fullmatch(text)) is None:
        return None
    large, small = KNOWN[found[2].lower()], KNOWN.get(found[4].lower(), "in")
    ratio = conversion(large, small)
    if ratio is None or ratio <= 1:
        return None
    whole = Fraction(found[1]) * ratio + Fraction(found[3])
    return str(whole), small + TWO_UNITS


def conversion(unit: str, other: str) -> Fraction | None:
    """Factor that converts values in `unit` to values in `other`; None if they measure different quantities.

    >>> str(conversion("m^2", "cm^2")), str(conversion("km/h", "m/s")), conversion("m", "s")
    ('10000', '5/18', None)
    """
    one, two = _size(unit), _size(other)
    return one[1] / two[1] if one is not None and two is not None and one[0] == two[0] else None


def _size(unit: str) -> tuple[str, Fraction] | None:
    """Quantity that a unit measures, and its size in the base unit; None for an unknown unit."""
    above, _, below = unit.removesuffix(TWO_UNITS).partition("/")
    kinds, size = [], Fraction(1)
    for part, sign in ((above, 1), *([(below, -1)] if below else [])):
        name, _, power = part.partition("^")
        if name not in _SIZES or not re.fullmatch("-?[0-9]?", power):
            return None
        kind, of_one = _SIZES[name]
        kinds.append(f"{kind}^{power or 1}")
        size *= of_one ** (sign * int(power or 1))
    return "/".join(kinds), size


def without_unit(text: str) -> tuple[str, str]:
    r"""Split a text into the part without its unit, and the unit: its canonical name with its power, "" if it has none
    or is unknown.

    >>> without_unit(r"15\text{ cm}^{2}"), without_unit("90^\\circ"), without_unit("5 apples"), without_unit("3x")
    (('15', 'cm^2'), ('90', 'degree'), ('5', ''), ('3x', ''))
    """
    if (based := _BASE.match(text)) is not None:
        return based["body"], f"base {_BASE_WORDS.get(based['base'], based['base'])}"
    if (circle := _CIRCLE.match(text)) is not None:
        return circle["body"].strip(), f"degree {circle['scale']}".strip()
    if (found := _IN_TEXT.match(text)) is not None and not _DENIED.search(found["words"]):
        return found["body"].strip(), _unit(found["words"], found["power"])
    found = _PLAIN.match(text)
    if found is not None and _are_unit(found["words"], bool(found["space"])):
        return found["body"].strip(), _unit(found["words"], found["power"])
    return text, ""


def _are_unit(words: str, apart: bool) -> bool:
    """Whether the words after a number are a unit; in ``3x`` and ``2ab`` the letters are variables. `apart`: there is a
    space between them and the number."""
    if _DENIED.search(words):
        return False
    raw = re.split(r"[ /.]+", words)
    parts = [part.lower() for part in raw]
    if parts in (["squared"], ["cubed"]):
        return False
    if _CLOSE_SYMBOL.fullmatch(raw[0]) and all(map(_SYMBOL.fullmatch, raw)):
        return True
    if all(part in KNOWN or part in _POWERS or part in ("per", "of") for part in parts):
        return apart or len(words) > 1
    short = (*_POWERS, *KNOWN, "per", "of", "the", "in")
    return apart and all(len(one) >= 4 or one.lower() in short or _SYMBOL.fullmatch(one) for one in raw)


def _unit(words: str, power: str | None) -> str:
    if "*" in words or "^" in words:  # a product (see `united`)
        return words.strip()
    above, _, below = re.sub(r"\s+per\s+", "/", words.strip(" .")).partition("/")
    if not below:
        return _named(above, power)
    names = _named(above, None), _named(below, power)
    return "/".join(names) if all(names) else ""


def _name(part: str) -> str:
    """Canonical name of a unit; "" if it is unknown. Known names match in any case, symbols of two or more letters only
    in their own case."""
    return KNOWN.get(part.lower(), part if len(part) > 1 and _SYMBOL.fullmatch(part) else "")


def _named(words: str, power: str | None) -> str:
    parts = [part for part in re.split(r"[\s.]+", words) if part]
    for part in parts:
        power = power or _POWERS.get(part.lower())
    names = [named for part in parts if (named := _name(part))]
    if len(names) != 1 or len(parts) > 2:
        return ""
    return f"{names[0]}^{power}" if power and power != "1" else names[0]
