"""Find terms in prose: a number with everything that is added to it, multiplied with it, or its exponent; before that,
approximations and marked answers are rewritten.

A number inside a term is no answer by itself: "the area is 25π" is not 25, and "5 × 10^3 m" is neither 5 nor 10.

An approximation in words is written with a sign: "1/6 (about 0.167)" becomes ``1/6 ≈ 0.167``. The answer in a JSON
object is marked: ``{"answer": "5"}`` becomes "Answer: 5".
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from fractions import Fraction
from unicodedata import normalize

from stretto_verify.math.parse.measures import KNOWN
from stretto_verify.math.parse.numerals import counted
from stretto_verify.math.parse.units import NUMBER_WORD

_ABOUT = r"(?:approximately|approx\.?|about|roughly|around|≈|\\approx(?![a-z]))"
_NEAR = r"\$?\s*(-?[0-9][0-9,]*(?:\.[0-9]+)?\s*(?:\\?%|percent\b|[a-z]{1,3}\b)?)\s*\$?"
_VALUE = r"(?<=[0-9)}$π%])"
_APPROXIMATED = re.compile(
    rf"{_VALUE}\s*(?:\(\s*(?:or |which is )?{_ABOUT}\s*{_NEAR}\)|,?\s*\b(?:or|which is|that is)\s+{_ABOUT}\s*{_NEAR}"
    rf"|\\text\s*\{{\s*(?:\(|,?\s*or\s)\s*{_ABOUT}\s*{_NEAR}\)?\s*\}}"
    rf"|\\text\s*\{{\s*,?\s*(?:or|which is)\s+{_ABOUT}\s*\}}\s*{_NEAR})"
)
_SAME_UNIT = re.compile(  # 2π units, or about 6.28 units
    rf"{_VALUE}(\s[a-z]+[²³]?)\s*,?\s*\(?(?:or |which is )?{_ABOUT}\s*(-?[0-9][0-9,]*(?:\.[0-9]+)?)\1(?!\w)\)?"
)
_RESTATED = re.compile(r"(?<=[0-9)}$π%*]),? (?:i\.e\.|that is|(?:or )?equivalently),? (?=[$\\]{0,2}-?[0-9]|\$\\)")
_IN_BRACKETS = re.compile(r"(?<=[0-9}$%])\s\(or ([^()\n]{1,30})\)")
_CODE = re.compile(  # a formula in marks of code
    r"(?<!`)`(?=[^`\n$]*[^\w`])(?![^`]*(?<![a-zA-Z])(?!sqrt|frac)[A-Za-z]{4})([^`\n$]{1,80})`(?!`)"
)
_DISPLAYED = re.compile(r"\\begin\{equation\*?\}(.*?)\\end\{equation\*?\}", re.DOTALL)
_OPTION = re.compile(  # 4, which corresponds to option (C)
    r"(?:(?<=\b(?:is|be))|(?<=\b(?:are|get))|(?<=[:*]))\s(\$[^$\n]{1,60}\$|[^\s,$\\{}]*[0-9][^\s,$\\{}]{0,40}),?"
    r" (?:(?:which (?:corresponds to|is|matches)|corresponding to)"
    r" (?:option|choice|answer) \$?\(?([A-J])\)?\$?(?!\w)|\((?:option|choice) ([A-J])\))"
)
_IN_PERCENT = re.compile(r"((?<![0-9])\.[0-9]+|/\s?[0-9]+|\}\{[0-9]+\}\$?|\b0\.[0-9]+)\s\(([0-9.]+)\\?%\)")
_HALF_OF_DAY = re.compile(  # 6:30 in the evening
    r"\b([0-9]{1,2}(?::[0-5][0-9]|(?= o'clock)))(?: o'clock)?(\s|\s?\\text\{\s*)in the (morning|afternoon|evening)\b"
)
_CHANCE = re.compile(rf"\b(?:1|one)([ -])in\1({NUMBER_WORD}|[0-9]+)(?![\w-])")
_ANSWER = re.compile(r'"(?:final[ _])?answer"\s*:\s*"((?:[^"\\\n]|\\.)*)"', re.IGNORECASE)
_SIGNED = re.compile(r"(?<=[a-z=:*] )[-−]\$(?=\S)([^$\n+=,<>−-]{1,60})(?<!\s)\$(?![0-9])")  # the answer is -$5$
_POWER_OF_UNIT = re.compile(r"(?<=[a-z])\$\^\s*(\{?[23]\}?)\s*\$")  # cm$^2$
_DIGIT = re.compile(r"(?![0-9])\d")
_MARKS = str.maketrans("٫٬⁄", ".,/")
_NEGATIVE = re.compile(r"(?<![胜勝正])(?:[负負]|マイナス|마이너스)\s?(?=[0-9])")
_MYRIAD = re.compile(
    r"(?<![0-9.,])([0-9]{1,9}(?:\.[0-9]{1,4})?)\s?(?:([万萬億亿]|千(?![克米瓦卡]))|\\text\s*\{\s*([万萬億亿千])\s*\})(?![0-9])"
)
_UNITS_TEXT = """
厘米 cm 公分 cm 毫米 mm 米 m 公里 km 千米 km 公斤 kg 千克 kg 克 g 升 liters 毫升 ml 秒 seconds
小时 hours 小時 hours 分钟 minutes 分鐘 minutes
"""
_CHINESE_UNITS = dict(zip(_UNITS_TEXT.split()[::2], _UNITS_TEXT.split()[1::2], strict=True))
_IN_CHINESE = re.compile(
    rf"(?<=[0-9])\s?(?:{'|'.join(sorted(_CHINESE_UNITS, key=len, reverse=True))})(?![\u4e00-\u9fff])"
)
_POINTED = re.compile(r"(?<![0-9.])[0-9]{1,3}(?:\.[0-9]{3}){2,}(?![0-9]|\.[0-9])")  # 1.234.567
_ENDLESS = re.compile(r"(?<=[a-z] )([-+−]?)∞(?=[\s.;!]|$)")  # is ∞
_PICTURES = re.compile(  # at the end of a line; those that deny or ask stay
    "(?:[ \t]?[\u2705\u2713\u2714\u2611\u2728\u2b50\u263a\ufe0f\U0001f300-\U0001faff])+(?<![🚫👎🤔🛑🤷😕])[ \t]*$",
    re.MULTILINE,
)
_VULGAR = re.compile(r"(?<![^\s(:=$*-])([0-9]{0,9})([½⅓⅔¼¾⅕-⅞])(?![A-Za-z0-9π(√^²³])")  # not in ½π, √½


def in_digits(text: str) -> str:
    """The text with digits of all scripts replaced by 0 to 9, with 1/2 for ½, 1234567 for 1.234.567, no pictures at the
    ends of lines, and with Chinese magnitudes, units and words for minus rewritten (``42万`` as 420000)."""
    text = _POINTED.sub(lambda found: found[0].replace(".", ""), text)
    if text.isascii():
        return text
    text = _ENDLESS.sub(r"$\1\\infty$", _PICTURES.sub("", text))
    text = _VULGAR.sub(lambda found: f"{found[1]} {normalize('NFKC', found[2])}".strip(), text)
    text = _DIGIT.sub(lambda found: str(int(found[0])), text.translate(_MARKS))
    text = _IN_CHINESE.sub(lambda found: f" {_CHINESE_UNITS[found[0].strip()]}", _MYRIAD.sub(_in_full, text))
    return _NEGATIVE.sub("-", text)


def _in_full(found: re.Match[str]) -> str:
    """``42万`` as 420000; unchanged if that is no whole number."""
    whole = Fraction(found[1]) * 10 ** {"千": 3, "万": 4, "萬": 4}.get(found[2] or found[3], 8)
    return str(whole) if whole.denominator == 1 else found[0]


def unquoted(text: str) -> str:
    r"""The text with approximations written as ≈, "or" for "i.e.", ``cm^2`` for ``cm$^2$``, code as a formula, "4,
    which is option (C)" as "(C) 4", "in the morning" as AM, and "Answer:" before the answer of a JSON object.

    >>> unquoted("It is 1/6 (about 0.167)."), unquoted('{"answer": "5"}')
    ('It is 1/6 ≈ 0.167.', '{\nAnswer: 5\n}')
    """
    if "`" in text:
        text = _CODE.sub(r"$\1$", text)
    if r"\begin{eq" in text:
        text = _DISPLAYED.sub(r"\[\1\]", text)
    if "-$" in text or "−$" in text:
        text = _SIGNED.sub(r"$-\1$", text)
    if "$^" in text:
        text = _POWER_OF_UNIT.sub(r"^\1", text)
    if any(words in text for words in ("i.e.", "that is", "equivalently", "(or ")):
        text = _IN_BRACKETS.sub(r" or \1", _RESTATED.sub(" or ", text))
    if "option " in text or "choice " in text:
        text = _OPTION.sub(lambda found: f" ({found[2] or found[3]}) {found[1]}", text)
    if "%)" in text:
        text = _IN_PERCENT.sub(r"\1 or \2%", text)
    if "in the " in text:
        text = _HALF_OF_DAY.sub(lambda found: f"{found[1]}{found[2]}{'AM' if found[3] == 'morning' else 'PM'}", text)
    if "one in " in text or "-in-" in text:
        text = _CHANCE.sub(lambda found: f"1 in {counted(found[2]) or found[2]}", text)
    if any(word in text for word in ("about", "approx", "≈", "roughly", "around")):
        text = _SAME_UNIT.sub(r" ≈ \2\1", text)
        text = _APPROXIMATED.sub(lambda found: f" ≈ {next(filter(None, found.groups())).strip()}", text)
    return _ANSWER.sub(lambda found: f"\nAnswer: {found[1]}\n", text)


_RAISED = "⁰¹²³⁴⁵⁶⁷⁸⁹⁻"
_NUMBER = (
    r"[$€£¥]?(?:(?!0[0-9])(?:[0-9]{1,3}(?:,[0-9]{3})++|[0-9]++)(?:\.[0-9]++)?+|\.[0-9]++)"
    r"(?:[eE][+-]?[0-9]++(?![a-zA-Z]))?+(?:[ ]?\\?%(?=[ ]off?[ ][0-9]))?+"
)
_CALL = r"sqrt|ln|log|exp|sin|cos|tan"
_BRACKETS = r"\((?=[^()\n]*[0-9])[^()a-zA-Z,;:\n]{1,40}+\)"
_FACTOR = (
    rf"(?:[√∛∜]?(?:{_NUMBER}|π|{_BRACKETS})|\\?pi(?![a-zA-Z])"
    r"|\\sqrt(?:\[[0-9]\])?\{[^{}\n]{1,40}+\}|\\[dt]?frac(?:\{[^{}\n]{1,40}+\}){2}"
    rf"|(?<![a-zA-Z\\])(?:{_CALL})[ ]?\([^()\n]{{1,40}}+\)|(?<![a-zA-Z\\'])[a-z](?![a-zA-Z']))"
    rf"(?:[{_RAISED}]++|\^\{{[^{{}}\n]{{1,20}}+\}}|!(?=[ ]?[a-z*/+^-]))?+"
)
_WORDS = (  # words that join two numbers to a calculation, a ratio, a share or a remainder
    "choose|times|plus|minus|divided by|multiplied by|over|mod|modulo|remainder|with remainder|to the power of?|to|by"
    "|out of|off?|in|per|every|for every|with|[rR]"
)
_SIGN = (
    r"(?:[ \t]*+(?:\*\*|[-+−–*/×·⋅÷^±]|\\(?:cdot|times|div|pm)(?![a-z]))[ \t]*+[-−+]?"
    rf"|[ ]?x[ ]?(?=[0-9])|[ ](?:{_WORDS})[ ](?=[-−$]?[0-9]))"
)
_SIDE_BY_SIDE = (
    rf"(?<=[0-9π)}}{_RAISED}])[ ]?(?=[√∛∜π]|\\?pi(?![a-zA-Z])|\\?sqrt)|(?<=[0-9)π])(?=\()"
    r"|(?<=[0-9])(?=[abcnp-rt-z](?![a-zA-Z]))|(?<=[0-9])[ ](?=[0-9])"
)
_BEFORE = r"(?:[<>≤≥±]=?[ ]?|(?<=is )[-−][ ](?=[0-9])|\|)?+[-−+]?"
_UNITS = "|".join(sorted(KNOWN, key=len, reverse=True))
_BEHIND = (  # suffixes that change a number: 3k, 42i, 4.2.1, 0.42..., 5‰; no unit, no ordinal, no words
    rf"(?:(?<=[0-9])(?:(?!(?:{_UNITS}|st|nd|rd|th)(?![a-zA-Z]))[a-zA-Z]{{1,3}}[0-9]*+(?![a-zA-Z])|(?:\.[0-9]++)++|\.\.+|…|‰)"
    r"|[ ]\((?:mod)[ ][^()\n]{1,20}\)|\||[ ]\(?(?:in[ ])?(?:base[ ][0-9]{1,2}|binary|octal|hexadecimal)\b\)?)?+"
)
_TERM = re.compile(
    rf"(?<![0-9A-Za-z_^{{\\.,/$])(?!(?<=[0-9] )[a-z]){_BEFORE}"
    rf"{_FACTOR}(?:(?:{_SIGN}|{_SIDE_BY_SIDE}){_FACTOR})*+{_BEHIND}(?![0-9])"
)
_PLAIN = re.compile(rf"[-−+]?\(?{_NUMBER}\)?(?:[ ]?/[ ]?[0-9]++)?|[^0-9]*")
_DATE = re.compile(r"[0-9]{4}[-/][0-9]{1,2}[-/][0-9]{1,2}|[0-9]{1,2}[-/][0-9]{1,2}[-/][0-9]{2,4}")


def terms(text: str) -> Iterator[tuple[int, int, str]]:
    """Yield each term that is more than a plain number, and no date: start, end, text.

    >>> [term for _, _, term in terms("It is 25π or 5 × 10^3 m, not 2/3, and 4 of them.")]
    ['25π', '5 × 10^3']
    """
    for found in _TERM.finditer(text):
        if _PLAIN.fullmatch(found[0]) is None and _DATE.fullmatch(found[0]) is None:
            yield found.start(), found.end(), found[0]
