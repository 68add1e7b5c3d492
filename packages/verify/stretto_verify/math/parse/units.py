r"""Units after a number.

The gold answer or the final answer may lack its unit. Two known units must be the same, or measure the same quantity
(``5 m`` is ``500 cm``). Other words after a number (``5 apples``) are ignored.
"""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Final

from stretto_verify.math.parse.measures import KNOWN, POWERS, TWO_UNITS, UNCLEAR, conversion, product, unit_named
from stretto_verify.math.parse.numerals import counted

#: Words after a number that scale it.
MAGNITUDES: Final = {
    "hundred": 100,
    "dozen": 12,
    "thousand": 10**3,
    "million": 10**6,
    "billion": 10**9,
    "trillion": 10**12,
    "lakh": 10**5,
    "crore": 10**7,
    "googol": 10**100,
}
#: Words of numbers that may follow another number.
NUMBER_WORD: Final = (
    r"(?:one|two|three|four|five|six|seven|eight|nine|ten|eleven|twelve|thirteen|fourteen|fifteen|sixteen|seventeen"
    r"|eighteen|nineteen|twenty|thirty|forty|fifty|sixty|seventy|eighty|ninety|an? (?:hundred|half|third|quarter))\b"
)
#: Comparatives that may follow an amount: 5 cm longer.
COMPARATIVE: Final = (
    "more|less|fewer|greater|larger|smaller|bigger|higher|lower|older|younger|longer|shorter|taller|heavier|lighter"
)
#: Sizes of the words that a question may have given, so that "3 dozen" is 3, too; those of the others may not be left
#: out.
LEFT_OUT: Final = frozenset([1, Fraction(1, 100), 12, 100, 10**3, 10**6, 10**9, 10**12])

#: Symbols of units. Case matters: mW is not MW. Symbols that could be the letter of a choice or a line (J, MN) are left
#: out.
SYMBOL: Final = re.compile(
    r"[kMGTdcmµn]?(?:Pa|mol|eV|Hz|Wb|cal|bar|W)|[kdcmµn]?[NVLsmg]|[kmµn][JAFC]|[MG]J|atm|rpm|psi|dB|kB|[kMGT]?iB|[GT]B"
)
_CLOSE_SYMBOL: Final = re.compile(r"[kMGm]?(?:Pa|Hz|eV|mol)")  # 2kPa, but not 2mV

#: Symbols that could be the letter of a choice: units in a product only.
_IN_PRODUCT: Final = frozenset("ABCDEFGHIJ")
_PRODUCT: Final = re.compile(
    r"^(?P<body>(?:(?!\\text).)*?[0-9)}!%])\s*(?P<unit>\\(?:text\{|frac\{\s*\\text|mu(?![a-z])|Omega(?![a-z])).*)$",
    re.DOTALL,
)
_NESTED: Final = r"\{((?:[^{}]|\{[^{}]*\})*)\}"
_PLAIN_PRODUCT: Final = re.compile(  # 10 ft-lb, 5 kg*m/s^2, outside of texts
    r"^(?P<body>[^\\]*[0-9])\s(?P<unit>(?=.*(?:[a-zµ]{2}|[A-Z]))[A-Za-zµΩ]+(?:(?:-|\s?(?:/|\\cdot)\s?|\s)[A-Za-zµΩ]+"
    r"(?:\^\{?-?[1-9]\}?)?)+)$"
)

_INCHES: Final = re.compile(r"^((?:sq|square|cu|cubic)\s+)?in$", re.IGNORECASE)

_UNITS = "|".join(sorted(KNOWN, key=len, reverse=True))
_SHARE = re.compile("percentage point|basis point|per ?mille?")  # units beside percent
_MONTH = r"(?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec)[a-z]{0,6}\.?"
#: Texts with numbers that are parsed as words: a day, a date, a time of day, an amount in two units.
SPOKEN: Final = re.compile(
    r"(?:Mon|Tues|Wednes|Thurs|Fri|Satur|Sun)day\b"
    rf"|{_MONTH} [0-9]{{1,2}}(?:,? [0-9]{{4}})?(?![0-9])"
    rf"|[0-9]{{1,2}}(?:st|nd|rd|th)? (?:of )?{_MONTH}(?:,? [0-9]{{4}})?(?![0-9])"
    r"|[0-9]{1,2}(?::[0-9]{2})?\s?[apAP]\.?\s?[mM]\b\.?|12(?::00)? (?:noon|midnight)\b|[0-9]{1,2} o'clock\b"
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
_CIRCLE = re.compile(
    r"^(?P<body>(?!.*\\(?:sin|cos|tan|cot|sec|csc)(?![a-z])).*\S)\s*\^\s*\{?\\circ\s*\}?\s*(?P<scale>[CF]?)$"
)
_PRIMED = re.compile(r"^(?P<body>.*[0-9])\s*(?P<marks>'{1,2})$")  # minutes, or feet
_BASE = re.compile(
    r"^(?P<open>\()?(?P<body>-?[0-9A-Z]*[0-9][0-9A-Z]*)(?(open)\)|)_\{?(?:\\text\{)?(?P<base>[0-9]{1,2}|[a-z]{3,7})\}*$"
)  # 101_2
LETTER: Final = r"[b-hj-z](?![a-zA-Z'’])"  # no article
_QUANTITY = (
    rf"(?:[$\\]|[-−]?[0-9.]|{LETTER}|{NUMBER_WORD}|(?:twice|half|double|zero|that|this|those|expected|normal|average|par)\b"
    r"|(?:the|its|our) (?:[a-z]+ ){0,2}(?:total|sum|average|mean|median|maximum|minimum|number|value|answer|result"
    r"|limit|target|goal|original)\b)"
)
#: Relations of a value to another quantity.
RELATED: Final = (  # 42 more than x, 42 degrees below normal; not "5 more than Tom", 12 feet above the ground
    rf"(?:(?:{COMPARATIVE})(?: [a-z]+)? than|times|under|off|(?:away|apart) from|past|ahead of|compared (?:to|with)"
    rf"|relative to|on top of|in addition to) {_QUANTITY}|(?:(?:short|shy) of|(?:below|beneath|above(?! zero\b)|beyond)"
    r"(?! (?:the |its |his |her )?(?:ground|water|surface|floor|table|horizon|earth|base|sea level|street)\b))\b"
)
#: Closed classes of words behind a value that leave no value or another one, whatever noun it has: negations, modals,
#: what relates it to another quantity. (Nouns are an open class: what is counted, or a unit.)
OTHER: Final = (
    r"not|never|cannot|(?:can|is|are|was|does)n't|(?-i:may)|might|could|would|should|wrong|incorrect|false|impossible"
    rf"|fails?|excluded|{RELATED}|up to|point (?:zero|{NUMBER_WORD}|[0-9])|at (?:least|most|best|worst)"
    r"|(?:is|are|was|were) (?:only |just |merely )?an?"
    r"|(?:than|plus|minus) (?:the|an?|its|our|another|each|every|any|all|some|what|it|one|half|twice)"
)
_CHANGED = re.compile(rf"\s*{NUMBER_WORD}|[^,.;:!?(\n]*\b(?:{OTHER})\b", re.IGNORECASE)
_DENIED = re.compile(
    rf"^\W*(?:squared|cubed|doubled|halved|tripled|twice)\b|^\s*{NUMBER_WORD}|\b(?:{OTHER}|if|or|so|than|otherwise|times|plus|minus|divided|over|choose|factorial"
    r"|too|halves|(?:third|fifth|sixth|seventh|eighth|ninth|tenth|hundredth|thousandth)s"
    r"|(?:st|nd|rd|th) (?:[a-z]+ )?(?:primes?|powers?|roots?|multiple|square|cube|composite|fibonacci|triangular)"
    r"|of (?:the |an? )?(?:[a-z]+ )?(?:half|third|quarter|rest)|counting"
    rf"|(?:{COMPARATIVE.removeprefix('more|')}|short|score)(?=\s*$)|less (?:{NUMBER_WORD})"
    r"|(?:and|or) (?:an? )?(?:half|third|quarter|one|two|three|four|five|six|seven|eight|nine|ten|twenty|thirty"
    r"|forty))\b",
    re.IGNORECASE,
)


def united(text: str) -> str:
    r"""Rewrite the product of units behind a number to one text, with its factors in order; other texts are unchanged.

    >>> united(r"42 \text{m}\text{s}^{-2}"), united(r"8 \text{J mol^{-1} K^{-1}}"), united(r"5 \mu \text{m}")
    ('42\\text{ m/s^2}', '8\\text{ J/K/mol}', '5\\text{ µm}')
    """
    if (found := _PRODUCT.match(text)) is None:
        return text
    flat = re.sub(rf"\\frac\s*{_NESTED}\s*{_NESTED}", r"\1/(\2)", found["unit"])
    flat = re.sub(rf"\\text\s*{_NESTED}", r" \1 ", flat).replace(r"\Omega", "ohm ").replace("·", "*")
    unit = product(re.sub(r"\\mu\s*", "µ", flat))
    return text if not unit or unit in _IN_PRODUCT else rf"{found['body']}\text{{ {unit}}}"


def amount(text: str) -> tuple[str, str] | None:
    """Convert ``2 hours 30 minutes`` to the smaller of its units: value and unit. None if the text is no amount in two
    units, of which the first is the larger.

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


def without_unit(text: str) -> tuple[str, str]:
    r"""Split a text into the part without its unit, and the unit: its canonical name with its power, "" if it has none
    or is unknown. ``101_2`` has the unit "base 2", and one with two readings (``5'``) begins with "?".

    >>> without_unit(r"15\text{ cm}^{2}"), without_unit("90^\\circ"), without_unit("5 apples"), without_unit("3x")
    (('15', 'cm^2'), ('90', 'degree'), ('5', ''), ('3x', ''))
    """
    if (based := _BASE.match(text)) is not None:
        base = based["base"] if based["base"].isdigit() else counted(based["base"])
        return (text, "") if base is None else (based["body"], f"base {base}")
    if (circle := _CIRCLE.match(text)) is not None:
        return circle["body"].strip(), f"degree {circle['scale']}".strip()
    if text.endswith("'") and (primed := _PRIMED.match(text)) is not None:
        return primed["body"], UNCLEAR + primed["marks"]
    if (found := _IN_TEXT.match(text)) is not None and not _DENIED.search(found["words"]):
        return found["body"].strip(), _unit(found["words"], found["power"])
    if (found := _PLAIN.match(text)) is not None and _are_unit(found["words"], bool(found["space"])):
        return found["body"].strip(), _unit(found["words"], found["power"])
    if (found := _PLAIN_PRODUCT.match(text) if " " in text else None) is not None and (unit := product(found["unit"])):
        return found["body"].strip(), unit
    return text, ""


def is_changed(words: str) -> bool:
    """Whether words behind a value, up to a comma, leave no value or another one."""
    return _CHANGED.match(words) is not None


def _are_unit(words: str, apart: bool) -> bool:
    """Whether the words after a number are a unit, or (`apart`) other words such as "apples"; in ``3x`` and ``2ab`` the
    letters are variables. `apart`: there is a space between them and the number."""
    if _DENIED.search(words):
        return False
    raw = re.split(r"[ /.]+", words)
    parts = [part.lower() for part in raw]
    if parts in (["squared"], ["cubed"]):
        return False
    if _CLOSE_SYMBOL.fullmatch(raw[0]) and all(map(SYMBOL.fullmatch, raw)):
        return True
    if all(part in KNOWN or part in POWERS or part in ("per", "of") for part in parts):
        return apart or len(words) > 1
    short = (*POWERS, *KNOWN, "per", "of", "the", "in")
    return apart and all(
        len(one) >= 4 or one.lower() in short or SYMBOL.fullmatch(one) or (len(one) > 2 and unit_named(one))
        for one in raw
    )


def _unit(words: str, power: str | None) -> str:
    """Canonical name of the unit that the words behind a number mean; "" if they mean none. `power`: exponent behind
    the words; None: none.

    All words may be one unit ("meters per second"). Otherwise it is the first ("meters long"), or the second of two
    ("more meters"), if it is the only unit among them.
    """
    words = words.strip(" .")
    if words.startswith(UNCLEAR):  # see `united`
        return words
    if (share := _SHARE.match(words)) is not None:
        return share[0]
    if words in _IN_PRODUCT:
        return ""
    if unit := product(_INCHES.sub(r"\1inch", words), power):
        return unit
    first, *others = re.split(r"[\s./]+", words)
    if len(others) == 1 and not unit_named(first):
        first, others = others[0], []
    return product(first, power) if not any(map(unit_named, others)) and first not in _IN_PRODUCT else ""
