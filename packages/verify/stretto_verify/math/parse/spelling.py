r"""Bring final answers into one canonical spelling, so that `reading` needs to know few forms; the notations of
programs and of other typesetters become LaTeX first.

The result is LaTeX without decoration: ``\dfrac12``, ``½`` and ``\tfrac{1}{2}`` become ``\frac{1}{2}``; ``pi/2``
becomes ``\pi/2``; ``x^(3)`` becomes ``x^{3}``; "1 and 2" becomes "1,2". Nothing with a value is dropped: unknown text
stays, and the reader refuses it.

``Matrix([[1, 2]])`` and ``[1, 2; 3, 4]`` become matrices, ``{'x': 1, 'y': 2}`` becomes ``x=1,y=2``, ``3+4j`` becomes
``3+4i``, ``1_000`` becomes ``1000``, "5th of June" becomes "June 5". Only whole answers are rewritten.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache
from math import gcd
from typing import Final

from stretto_verify.math.parse.rare import common

_CONSTRUCTED = re.compile(
    r"\s*(?:[a-z]{2,8}\.)?(?:Immutable|Dense)*(?:Matrix|array|asarray)\(\s*(\[.*\])\s*\)\s*", re.DOTALL
)
_ROWS = re.compile(r"\s*\[([^\[\](){}\\]*;[^\[\](){}\\]*)\]\s*")
_TRANSPOSED = re.compile(
    r"\s*([\[(][^\[\](){}]*,[^\[\](){}]*[\])])\s*\^\s*\{?\s*(?:T|\\top|\\intercal|\\(?:mathsf|mathrm|text|rm)\s*\{?\s*T\s*\}?)"
    r"\s*\}?\s*"
)
_ENTRY: Final = r"""["']?([a-zA-Z])["']?\s*:\s*([^,:{}"']+)"""
_NAMED = re.compile(rf"\s*\\?\{{\s*{_ENTRY}(?:,\s*{_ENTRY})+\\?\}}\s*")
_COMPLEX = re.compile(r"\s*(\(?\s*-?\s*[0-9.]+\s*[-+]\s*[0-9.]*)\s*j(\s*\)?)\s*")
_CONDITIONED = re.compile(r"\s*\{(\s*[a-z]\s*(?:\||:|\\mid(?![a-z])).*[<>=].*)\}\s*", re.DOTALL)
_UNDERSCORED = re.compile(r"\s*[-+]?[0-9]{1,3}(?:_[0-9]{3})+(?:\.[0-9]+)?\s*")
_REPEATING = re.compile(r"(?<![0-9.])([0-9]*)\.\(([0-9]+)\)(?![0-9(])")
_ALONE = re.compile(r"\s*\\text(?:bf|it|rm|sf|tt|normal)?\s*\{([^{}\\]*)\}[\s.]*")
_TEXTS = re.compile(r"\\text\{([^{}]*)\}")
_TITLE = re.compile(r"\s*(?:[Tt]he )?(?:[Ff]inal )?[Aa]nswer(?: is|:)\s+")
_WORDLESS = re.compile(r"\s*(?:[a-z]\s*[=<>≤≥])?[^A-Za-z]*[0-9][^A-Za-z]*")
_LABELLED = re.compile(r"(?:^|[;,\n]|\\q?quad)\s*(?:\\text\s*\{\s*)?\(([1-6a-f])\)\s*\}?\s*:?")
_REMAINDER = re.compile(r"\s*([0-9]{1,15})\s*(?:\\b?mod(?![a-z])|\bmod\b)\s*([1-9][0-9]{0,14})\s*")
_EXCLAIMED = re.compile(r"(?<![\\A-Za-z])([A-Z][a-z]+|[a-z]{4,}|no|yes)[!?]+(\}?[\s*]*)$")
_ASKED = re.compile(r"(?<=[\w)\]}%°$])\s*\?+(?=[\s})$*.]*$)")  # no sign of mathematics, unlike "!"; not behind "="

_MONTHS: Final = (
    *("January", "February", "March", "April", "May", "June", "July"),
    *("August", "September", "October", "November", "December"),
)
_MONTH: Final = "|".join(f"{month[:3]}(?:{month[3:]})?" if month[3:] else month for month in _MONTHS)
_DAY: Final = r"([0-9]{1,2})(?:st|nd|rd|th)?"
_AT_A_DATE = re.compile(
    rf"[Oo]n (?=(?:the )?[0-9]|[A-Z][a-z]+day\b|{_MONTH})|[Ii]n (?={_MONTH})"
    r"|[Aa]t (?=noon|midnight|[0-9]{1,2}:[0-9]|[0-9]{1,2} ?[ap]\.?m)"
)
_DATES = re.compile(  # 5 June, the 5th of June 1990, Jun. 5
    rf"\s*(?:(?:the )?{_DAY} (?:of )?({_MONTH})\.?|({_MONTH})\.? {_DAY})(?:,?\s+([0-9]{{4}}))?[\s.]*"
)


def plain(text: str) -> str:
    r"""Rewrite a text from another notation to LaTeX; a text in none of the module's notations is unchanged.

    >>> plain("Matrix([[1], [2]])"), plain("[1 2; 3 4]"), plain("3.5 - 4j"), plain("{'x': 1, 'y': 2}")
    ('[[1], [2]]', '[[1,2],[3,4]]', '3.5 - 4i', 'x=1,y=2')
    >>> plain("the 5th of June"), plain("Jun 5"), plain("5 June 1990")
    ('June 5', 'June 5', 'June 5, 1990')
    >>> plain("1_000_000"), plain("0.(3)"), plain("New York!"), plain("(1, 2)^T"), plain("[1; 2]")
    ('1000000', '0.\\overline{3}', 'New York', '(1, 2)', '[1; 2]')
    """
    if r"\text" in text and (alone := _ALONE.fullmatch(text)) is not None:
        inner = _TITLE.sub("", alone[1])
        text = inner if _WORDLESS.fullmatch(inner) or _DATES.fullmatch(inner) else text
    if (made := _CONSTRUCTED.fullmatch(text)) is not None:
        return made[1]
    if "mod" in text and (remainder := _REMAINDER.fullmatch(text)) is not None:
        return str(int(remainder[1]) % int(remainder[2]))
    if text.lstrip().startswith(("(1)", "(a)", r"\text")) and (parts := _parts(text)) is not None:
        return parts
    if (rows := _ROWS.fullmatch(text)) is not None:
        cells = [re.split(r"\s*,\s*|\s+", row.strip()) for row in rows[1].split(";")]
        if len({len(row) for row in cells}) == 1 < len(cells[0]) and all(all(row) for row in cells):
            return f"[{','.join('[' + ','.join(row) + ']' for row in cells)}]"
    if (turned := _TRANSPOSED.fullmatch(text)) is not None:
        return turned[1]
    if _NAMED.fullmatch(text) is not None:
        return ",".join(f"{name}={value.strip()}" for name, value in re.findall(_ENTRY, text))
    if (number := _COMPLEX.fullmatch(text)) is not None:
        return f"{number[1]}i{number[2]}"
    if text[:2] in ("on", "On", "in", "In", "at", "At"):
        text = _AT_A_DATE.sub("", text)
    if (date := _DATES.fullmatch(_TEXTS.sub(r"\1", text))) is not None:
        month = next(month for month in _MONTHS if month.startswith((date[2] or date[3])[:3]))
        return f"{month} {date[1] or date[4]}" + (f", {date[5]}" if date[5] else "")
    if (of_all := _CONDITIONED.fullmatch(text)) is not None:
        return rf"\{{{of_all[1]}\}}"
    if text.split() in (["{}"], ["{", "}"]):
        return r"\emptyset"
    if _UNDERSCORED.fullmatch(text) is not None:
        return text.replace("_", "")
    return _ASKED.sub("", _EXCLAIMED.sub(r"\1\2", _REPEATING.sub(r"\1.\\overline{\2}", text)))


def _parts(text: str) -> str | None:
    """``(1) 5; (2) 7``, the answers to the parts of a question, as ``a=5,b=7``; None for other forms."""
    labels = list(_LABELLED.finditer(text))
    names = [label[1] for label in labels]
    if len(labels) < 2 or text[: labels[0].start()].strip() or not "123456 abcdef".count("".join(names)):
        return None
    if names[0] not in "1a":
        return None
    ends = [label.start() for label in labels[1:]] + [len(text)]
    values = [text[label.end() : end].strip(" .,;\n") for label, end in zip(labels, ends, strict=True)]
    if not all(values) or any(("," in value and value[0] not in "([") or "=" in value for value in values):
        return None
    return ",".join(f"{name}={value}" for name, value in zip("abcdef", values, strict=False))


_LETTERS: Final = str.maketrans(
    {
        **dict(zip("０１２３４５６７８９", "0123456789", strict=True)),
        "−": "-",
        "–": "-",
        "—": "-",
        "‐": "-",
        "×": r"\times ",
        "·": r"\cdot ",
        "⋅": r"\cdot ",
        "÷": "/",
        "∕": "/",
        "≤": r"\le ",
        "≥": r"\ge ",
        "≠": r"\neq ",
        "≈": r"\approx ",
        "≡": r"\equiv ",
        "∞": r"\infty ",
        **dict.fromkeys("ΩΩ", r"\Omega "),
        "π": r"\pi ",
        "∪": r"\cup ",
        "∩": r"\cap ",
        "∈": r"\in ",
        "±": r"\pm ",
        **dict.fromkeys("°º˚", r"^\circ "),
        "∶": ":",
        "…": r"\ldots ",
        "∅": r"\emptyset ",
        "％": "%",
        **{
            sign: rf"\frac{{{above}}}{{{below}}}"
            for below, signs in {2: "½", 3: "⅓⅔", 4: "¼¾", 5: "⅕⅖⅗⅘", 6: "⅙⅚", 8: "⅛⅜⅝⅞"}.items()
            for above, sign in zip((n for n in range(1, below) if gcd(n, below) == 1), signs, strict=True)
        },
        "⁄": "/",
        **{sign: rf"\mathbb{{{name}}}" for sign, name in zip("ℝℤℕℚ", "RZNQ", strict=True)},
        "∫": r"\int ",
        "∖": r"\setminus ",
        **{
            letter: rf"\{name} "
            for letter, name in zip(
                "αβγδθλφω", ["alpha", "beta", "gamma", "delta", "theta", "lambda", "phi", "omega"], strict=True
            )
        },
        "，": ",",
        "（": "(",
        "）": ")",
        **{sign: rf"\\{name} " for sign, name in zip("⌊⌋⌈⌉", ["lfloor", "rfloor", "lceil", "rceil"], strict=True)},
        "⟨": "(",
        "⟩": ")",
        "\u00a0": " ",
        "\u2009": " ",
        "\u202f": " ",
        "‘": "'",
        "’": "'",
        **dict.fromkeys("€£¥₹₽₩₿", ""),
        "¢": r"\text{ cents}",
    }
)
_SMALL = re.compile("[⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿ]+|[₀₁₂₃₄₅₆₇₈₉]+")
_DIGITS: Final = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿ₀₁₂₃₄₅₆₇₈₉", "0123456789+-n0123456789")
_RADICAL = re.compile(r"([√∛∜])\s*(?:\(([^()]*)\)|([0-9]+|[a-zA-Z]))")
_RADICALS = {"√": r"\sqrt", "∛": r"\sqrt[3]", "∜": r"\sqrt[4]"}
_GROUP = r"\{((?:[^{}]|\{[^{}]*\})*)\}"
_NAMES = "arcsin|arccos|arctan|sinh|cosh|tanh|sin|cos|tan|cot|sec|csc|log|ln|pi|theta|alpha|beta"


def _russian(found: re.Match[str]) -> str:
    """LaTeX of the Russian names ``tg``, ``ctg``, ``arctg`` and ``arcctg``: ``\\cot`` for ``\\ctg``."""
    arc, co = found[1] or found[3], found[2] or found[4]
    return f"\\{arc or ''}{'cot' if co else 'tan'} "


def _index(found: re.Match[str]) -> str:
    """An index in letters, ``_{\\text{B}}`` or ``_\\odot``, as one name: ``_{B}``."""
    return f"_{{{found[1] or found[2]}}}"


def _aligned(found: re.Match[str]) -> str:
    """LaTeX of small digits: ``²³`` as ``^{23}``, ``₂`` as ``_{2}``."""
    return f"{'_' if found[0] <= '₉' and found[0] >= '₀' else '^'}{{{found[0].translate(_DIGITS)}}}"


def _per(found: re.Match[str]) -> str:
    """A unit times a unit with a negative exponent, ``\\text{m}\\cdot\\text{s}^{-2}``, as ``\\text{m/s}^{2}``."""
    return rf"\text{{{found[1].strip()}/{found[2].strip()}}}" + (f"^{{{found[3]}}}" if found[3] != "1" else "")


def _both(found: re.Match[str]) -> str:
    """``x>0 and x<3`` as ``0<x<3``; unchanged if both bounds are on one side, or if only a comma joins two bounds that
    leave nothing between them (two ranges)."""
    one, other = (_bound(found.groups()[start : start + 6]) for start in (0, 7))
    if one[0] != other[0] or one[1] == other[1]:
        return found[0]
    (_, _, is_low_open, low), (_, _, is_high_open, high) = (one, other) if one[1] else (other, one)
    if found[7].strip() == ",":
        known = _FRACTION.fullmatch(low) and _FRACTION.fullmatch(high)
        if not known or Fraction(low) >= Fraction(high):
            return found[0]
    return f"{low}{'<' if is_low_open else _AT_MOST}{one[0]}{'<' if is_high_open else _AT_MOST}{high}"


def _bound(parts: Sequence[str | None]) -> tuple[str, bool, bool, str]:
    """Name, whether it is bounded from below, whether the end is open, and the bound: of ``x>0``, or of ``0<x``.
    `parts`: the six groups of `_BOUNDED`."""
    name, sign, bound = parts[:3] if parts[0] else (parts[5], parts[4], parts[3])
    is_greater = _GREATER.fullmatch(str(sign)) is not None
    is_open = re.fullmatch(r"[<>]|\\[lg]t", str(sign)) is not None
    return str(name), is_greater == bool(parts[0]), is_open, str(bound)


def _share(found: re.Match[str]) -> str:
    """First factor, with the sign of multiplication, of ``68% of 250``, ``2/3 of 90`` or ``20% off 90`` as a product;
    `found` ends before the second."""
    part = found[1] or rf"\frac{{{found[2]}}}{{100}}"
    return rf"{part}\cdot " if found[3] == "of" else rf"(1-{part})\cdot "


def _french(found: re.Match[str]) -> str:
    """French interval with an open end, ``]0,1[`` or ``[0,1[``, as ``(0,1)`` or ``[0,1)``; others are unchanged."""
    return {"[": "[", "]": "("}[found[1]] + found[2] + {"[": ")", "]": "]"}[found[3]]


_AT_MOST: Final = r"\le "
_GREATER = re.compile(r">=?|\\(?:gt|ge|geq|geqslant)")
_INEQUALITY: Final = r"([<>]=?|\\(?:lt|gt|leqslant|geqslant|leq|geq|le|ge)(?![a-z]))"
_BOUND: Final = r"(-?\s*(?:[0-9]+(?:\.[0-9]+|/[0-9]+)?|\\[dt]?frac\{[^{}]+\}\{[^{}]+\}|\\sqrt\{[^{}]+\}|\\pi(?![a-z])))"
_BOUNDED: Final = rf"(?:([a-zA-Z])\s*{_INEQUALITY}\s*{_BOUND}|{_BOUND}\s*{_INEQUALITY}\s*([a-zA-Z]))"
_FRACTION = re.compile(r"-?[0-9]+(?:\.[0-9]+|/[1-9][0-9]*)?")
_ASSIGNED: Final = r"\b[a-z]\s*=\s*-?\s*[0-9./]+\s*"
_SHARE: Final = (
    r"(?<![0-9.,/}])(?:([0-9]+/[0-9]+|\\frac\{[0-9]+\}\{[0-9]+\})|([0-9]+(?:\.[0-9]+)?)\s*%)\s*"
    r"(?:\\text\s*\{\s*)?(off?)(?:\s*\}|\s)\s*(?=[0-9])"
)
_OPERATORS: Final = {"plus": "+", "minus": "-", "times": r"\cdot "}
_SIGN: Final = r"(?:\{[^{}]*\}|[0-9a-zA-Z])"  # of an exponent or an index
_FONT: Final = r"\\math(?:bf|it|rm|sf|tt|normal)"
_REPLACED: Final = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (
            r"\\(?:displaystyle|textstyle|limits|nolimits|bigl?|bigr|Bigl?|Bigr|biggl?|biggr|mathstrut|strut)(?![a-zA-Z])",
            "",
        ),
        (r"\\!", ""),
        (r"^\s*\\(?:bf|it|rm|sf|tt|[lL]arge|LARGE|[hH]uge)(?![a-zA-Z])", ""),
        (r"^\s*(?:[→⇒∴]|[-=]>|\\(?:[Rr]ightarrow|Longrightarrow|implies|therefore|to)(?![a-zA-Z]))\s*", ""),
        (r"^\s*(?:[Tt]herefore|[Tt]hus|[Hh]ence|[Ss]o|[Cc]onsequently|[Aa]ns(?:wer)?)\s*[,:.]\s*", ""),
        (r"^\s*<([^<>]*,[^<>]*)>\s*$", r"(\1)"),
        (
            r"(?<=\^\\circ)\s*\\(?:text|mathrm)\s*\{\s*([CF])\s*\}|(?<=\^\{\\circ\})\s*\\(?:text|mathrm)\s*\{\s*([CF])\s*\}",
            r"\1\2",
        ),
        (rf"{_FONT}\s+([0-9]+|[a-zA-Z])", r"\\text{\1}"),
        (rf"{_FONT}\s*(?=\{{(?:[^{{}}]|\{{[^{{}}]*\}})*\\[a-zA-Z])|\\mathbf\s*(?=\{{[^{{}}]*[\^=+])", ""),
        (r"\\text\s*\{\s*([-+=,;])?\s*\}", r" \1"),
        (r"\^\s*\{?\s*\\(?:text|mathrm|textrm)\s*\{\s*(?:st|nd|rd|th)\s*\}\s*\}?\s*$", ""),
        (r"\\text\s*\{\s*([0-9]+)(?:st|nd|rd|th)\s*\}", r"\1"),
        (r"\\text\s*\{\s*\(?\s*(?:since|because)\s[^{}]*\}\s*$", ""),
        (r"^\s*(?:(?:USD|EUR|GBP|INR|Rs\.?)\s*(?=[0-9])|US(?=\s*\\\$))", ""),
        (
            rf"^\s*{_BOUNDED}\s*(\\text\s*\{{\s*and\s*\}}|and|\\(?:land|wedge)(?![a-z])|,(?:\s*\\text\s*\{{\s*and\s*\}})?)"
            rf"\s*{_BOUNDED}\s*$",
            _both,
        ),
        (r"\{([^{}]+)\\choose(?![a-z])([^{}]+)\}", r"\\binom{\1}{\2}"),
        (r"\{([,:])\}", r"\1"),
        (r"\\m?(?:left|right|middle)\s*(?![a-zA-Z])\.?", ""),
        (r"\\(?:underline|boldsymbol|bm|pmb|vec|hat)\s*(?=\{)", ""),
        (r"\\math(?:bf|it|rm|sf)\s*\{\s*([ijk])\s*\}(?=\s*(?:[-+]|$))", r"\1 "),
        (r"\\colon(?![a-z])", ":"),
        (rf"\\abs\s*{_GROUP}", r"|\1|"),
        (r"\\lbrace(?![a-z])", r"\\{"),
        (r"\\rbrace(?![a-z])", r"\\}"),
        (r"\\langle(?![a-z])", "("),
        (r"\\rangle(?![a-z])", ")"),
        (
            r"\\(?:math(?:rm|it|bf|sf|tt|normal)|text(?:rm|it|bf|sf|tt|normal)|mbox|hbox|operatorname)\s*\*?\s*\{",
            r"\\text{",
        ),
        (r"\\text\s+\{", r"\\text{"),
        (r"_\s*\{?\s*\\(?:text\s*\{\s*([A-Za-z0-9]+)\s*\}|(odot|oplus|perp|star)(?![a-z]))\s*\}?", _index),
        (rf"\\text\s*\{{\s*({_NAMES})\s*\}}", r"\\\1 "),
        (r"\\?(?:text\s*\{\s*(arc)?(c)?tg\s*\}|(?<=\\)(arc)?(c)?tg(?![a-z]))", _russian),
        (r"\\text\s*\{\s*(gcd|lcm|max|min)\s*\}(?=\s*\()", r"\\\1 "),
        (r"\\(max|min|gcd)\s*\\\{([^{}]*)\\\}", r"\\\1(\2)"),
        (r"\\lg(?![a-z])", r"\\log_{10}"),
        (r"(?<![a-zA-Z])\\?log\s*_\s*(?:e|\{\s*(?:e|\\text\{\s*e\s*\})\s*\})(?![a-z])", r"\\ln "),
        (r"\\frac\s*\{\s*\\text\{([^{}]*)\}\s*\}\s*\{\s*\\text\{([^{}]*)\}\s*\}", r"\\text{\1/\2}"),
        (r"\\text\{([^{}]*)\}\s*/\s*\\text\{\s*([^{}]*)\}", r"\\text{\1/\2}"),
        (
            r"\\text\{([^{}]*)\}\s*(?:\\cdot)?\s*\\text\{([^{}]*)\}\s*\^\s*\{?\s*-\s*([1-3])\s*\}?+(?!\s*(?:\\cdot\s*)?\\text)",
            _per,
        ),
        (rf"(\\(?:sum|prod|int)\s?|(?<![a-zA-Z\\])[a-zA-Z])\^({_SIGN})_({_SIGN})", r"\1_\3^\2"),
        (r"(?<![A-Za-z0-9}\\])C\s*_\s*\{?([0-9a-z]+)\}?\s*\^\s*\{?([0-9a-z]+)\}?", r"\\binom{\1}{\2}"),
        (r"\{?\}?[_^]\s*\{?([0-9a-z]+)\}?\s*C\s*_\s*\{?([0-9a-z]+)\}?", r"\\binom{\1}{\2}"),
        (r"(?<!\[[0-9a-z])([\[\]])(\s*[^\[\],;\s][^\[\],;]*[,;]\s*[^\[\],;\s][^\[\],;]*)(?<!\\sqrt)([\[\]])", _french),
        (r"(?<=[)\]])\s*U\s*(?=[(\[])", r"\\cup "),
        (r"\\text\s*\{\s*([eixyn])\s*\}", r"\1 "),
        (
            rf"({_ASSIGNED}(?:,|\band\b)\s*{_ASSIGNED}),?\s*(?:\\text\s*\{{\s*or\s*\}}|\bor\b)\s*(?=[a-z]\s*=)",
            r"\1;",
        ),
        (r"\\text\s*\{\s*\(?([A-J]|[0-9]+)\)?\s+(?:and|or)\s+\(?([A-J]|[0-9]+)\)?\s*\}", r"\1,\2"),
        (r"\\text\s*\{\s*\$?\s*,?\s*(?:and|or|oder|und)\s*\}", ", "),
        (r",?\s*(?<![a-zA-Z\\])(?:and|or)(?![a-zA-Z])\s*,?", ", "),
        (r"(?<=[0-9)])\s*or(?=[A-Za-z(])|\\(?:(?:land|wedge|lor|vee)(?![a-z])|&)", ","),
        (r"(?<![\]}a-zA-Z^_])\{([0-9]+)\}\{([0-9]+)\}", r"\1\2"),
        (r"\\(?:d|t|c)frac", r"\\frac"),
        (r"\\(?:d|t)binom", r"\\binom"),
        (r"(?<![0-9a-zA-Z.])([0-9]{1,3})C([0-9]{1,3})(?![0-9a-zA-Z.])", r"\\binom{\1}{\2}"),
        (r"(?<![0-9a-zA-Z.])([0-9]+)\s+choose\s+([0-9]+)(?![0-9a-zA-Z.])", r"\\binom{\1}{\2}"),
        (r"(?<=[0-9])\s+(plus|minus|times)\s+(?=[0-9])", lambda found: _OPERATORS[found[1]]),
        (r"(?<=[0-9])\s*x\s*(?=10\s*\^)", r"\\times "),
        (r"\\leqslant|\\leq(?![a-z])|<=|=<", r"\\le "),
        (r"\\geqslant|\\geq(?![a-z])|>=", r"\\ge "),
        (r"\\lt(?![a-z])", "<"),
        (r"\\gt(?![a-z])", ">"),
        (r"==+", "="),
        (r"=>", r"\\Rightarrow "),
        (r"!=|\\ne(?![a-z])|\\not\s*=|<>", r"\\neq "),
        (r"\\(?:iff|Leftrightarrow|implies|Longrightarrow)(?![a-z])", r"\\Rightarrow "),
        (r"\\(?:simeq|sim|thickapprox)(?![a-z])", r"\\approx "),
        (r"\\(?:dots[a-z]?|cdots|hdots|ddots)(?![a-z])|\.\.\.+", r"\\ldots "),
        (r"\\(?:overline|widehat|overleftrightarrow|overrightarrow)\s*\{\s*([A-Z]{2})\s*\}", r"\1"),
        (r"\\(?:varnothing|empty)(?![a-z])", r"\\emptyset "),
        (r"\\degree(?:s)?(?![a-z])|\^\s*\{\s*\\circ\s*\}|\^\s*\{\s*o\s*\}", r"^\\circ "),
        (r"\\\$\s*([0-9][0-9.,]*)(?!\s*\\text)$", r" \1\\text{ dollars}"),
        (r"\\\$", " "),
        (r"\\(?:euro|pounds|yen)(?![a-z])(?:\{\})?", ""),
        (r"\\%", "%"),
        (_SHARE, _share),
        (r"\\pmod\s*(?:\{[^{}]*\}|[0-9a-z])|\(\s*\\?(?:b?mod|text\s*\{\s*mod\s*\})[^()]*\)", ""),
        (r"\*\*", "^"),
        (r"\\ast(?![a-z])|\*", r"\\cdot "),
        (r"\\div(?![a-z])", "/"),
        (r"(?<![a-zA-Z\\])sqrt\s*\{", r"\\sqrt{"),
        (r"(?<![a-zA-Z\\])sqrt\s*([0-9]+)", r"\\sqrt{\1}"),
        (rf"(?<![a-zA-Z\\])({_NAMES})(?![a-zA-Z])", r"\\\1 "),
        (r"(?<=[0-9])pi(?![a-z])", r"\\pi "),
        (r"(?<![a-zA-Z\\])(?:(?:plus |positive )?[iI]nfinity|infty|inf|oo)(?![a-zA-Z])", r"\\infty "),
        (r"(?<![0-9a-zA-Z.])([0-9]+(?:\.[0-9]+)?)[eE]([+-]?[0-9]+)(?![0-9a-zA-Z.])", r"\1\\cdot 10^{\2}"),
        (r"^\s*([01]?[0-9]|2[0-3])\s?h\s?([0-5][0-9])\s*$", r"\1:\2"),
        (r"\^\s*(-?[0-9]{2,}|-[0-9a-z])", r"^{\1}"),
        (r"\\frac\s*([0-9a-z])\s*([0-9a-z])", r"\\frac{\1}{\2}"),
        (r"\\frac\s*([0-9a-z])\s*\{", r"\\frac{\1}{"),
        (rf"\\frac\s*{_GROUP}\s*([0-9a-z])", r"\\frac{\1}{\2}"),
        (r"\\sqrt\s*(\[[^\[\]]*\])?\s*([0-9a-zA-Z])", r"\\sqrt\1{\2}"),
        (r"(?<![0-9])\.(?=[0-9]|\\overline)", "0."),
        (r"(?<=[0-9])\s*(?:per ?cent(?:age)?|pct)(?!\s+point|[a-z])|\\text\{\s*(?:percent(?:age)?|pct)\s*\}", "%"),
        (r"^\s*(?:minus|negative)\s+(?=[0-9\\(])", "-"),
        (r"\s+", " "),
    )
)
#: Beginnings of expressions up to their bracket, and what replaces them and the closing bracket.
_BRACKETED: Final = (
    (re.compile(r"(?<![a-zA-Z\\])\\?sqrt\s*\("), r"\sqrt{", "}"),
    (re.compile(r"(?<![a-zA-Z\\])\\?exp\s*\("), "e^{", "}"),
    (re.compile(r"(?<![a-zA-Z\\])\\?abs\s*\("), "|", "|"),
    (re.compile(r"(?<![a-zA-Z\\])\\?frac\s*\("), r"\frac{", "}"),
    (re.compile(r"(?:\^|\*\*)\s*\("), "^{", "}"),
)
_MARK = re.compile(r"(?<!\\)\\[()\[\]]")
_EDGES = " \t\n,;:"
_MODULO = re.compile(r"\s*\\bmod(?![a-z])\s*\{?[0-9a-z]+\}?\s*$")
_QUAD = re.compile(r"(?<=[0-9)])\s*\\q?quad(?![a-z])\s*(?=-?[0-9]|[a-z]\s*=|\(-?[0-9])")  # between items of a list
_SPACING = re.compile(r"(?<!\\)\\(?:[,;:> ]|(?:quad|qquad|thinspace)(?![a-z]))|~|(?<!\\)\\\s*$")
_THOUSANDS = re.compile(
    r"(?<=[0-9])(?:,?\\[!,]|\{,\}|,\\ |\{,\\!\}|\{\\small,\}|\\text\{,\}|')\s*(?=[0-9]{3}(?![0-9]))"
)
_DECIMAL_COMMA = re.compile(r"(?<=[0-9])\{,\}(?=[0-9]+(?![0-9]|\{,))(?![0-9]{3}(?![0-9]))")
_WHOLE_COMMA = re.compile(
    r"^([-+]?(?:[0-9]{4,}(?=,[0-9]{1,2}$)|0(?=,[0-9]{3})|[0-9]+(?=,0[0-9]$))),(?=[0-9]+$)"
)  # 1000,99
_ROW_SPACE = re.compile(r"\\\\\s*\[-?[0-9.]+\s*(?:pt|em|ex|mm|cm|in|px|mu|\\[a-z]+)\]")
_SUM_OF_MONEY = re.compile(r"^\s*\$\s*([0-9][0-9.,]*)(?=[^$]*$)")
#: Numbers of which nothing is rewritten.
PLAIN_NUMBER: Final = re.compile(r"-?[0-9]{1,40}(?:\.[0-9]{1,40})?")
_DOUBLED = re.compile(r"\\\\(?=[a-zA-Z(){}\[\]%$])")


@lru_cache(maxsize=1 << 12)
def spelled(text: str) -> str:
    r"""The final answer in canonical spelling: LaTeX without decoration, with commas for "and"; unknown text stays.

    >>> spelled(r"$\dfrac12\,$."), spelled("-1 + exp(16)"), spelled(r"\(12\text{ and }13\)")
    ('\\frac{1}{2}', '-1 + e^{16}', '12, 13')
    """
    if PLAIN_NUMBER.fullmatch(text) is not None:
        return text
    text = _DECIMAL_COMMA.sub(".", _ROW_SPACE.sub(r"\\\\", plain(text)))
    text = _SMALL.sub(_aligned, text)
    text = _THOUSANDS.sub(",", _SUM_OF_MONEY.sub(r"\\$\1", text.translate(_LETTERS)))
    if "quad" in text:
        text = _QUAD.sub(",", text)
    text = _WHOLE_COMMA.sub(r"\1.", unwrapped(_SPACING.sub(" ", text)))
    if r"\begin" not in text:
        text = _DOUBLED.sub(r"\\", text)
    text = _RADICAL.sub(lambda found: f"{_RADICALS[found[1]]}{{{found[2] or found[3]}}}", text)
    for form, opening, closing in _BRACKETED:
        text = _rebracketed(text, form, opening, closing)
    if "mod" not in text:  # without a modulus a congruence is an equality
        text = text.replace(r"\equiv", "=")
    elif r"\equiv" in text:
        text = _MODULO.sub("", text)
    text = common(text)
    for pattern, replacement in _REPLACED:
        text = pattern.sub(replacement, text)
    return _trimmed(text.replace("$", ""))


def _trimmed(text: str) -> str:
    """The text without outer punctuation and spaces; a leading decimal point and an ellipsis stay."""
    text = text.strip(_EDGES)
    return text if text.endswith("..") else text.rstrip(_EDGES + ".")


def unwrapped(text: str) -> str:
    r"""The text without markup of mathematics or emphasis: ``$…$``, ``\(…\)``, ``**…**``, quotes."""
    text = text.strip(' "`“”\n')
    if not text.startswith(r"\\"):
        text = _MARK.sub(" ", text)
    for mark in ("**", "__"):
        text = text.removeprefix(mark).removesuffix(mark)
    if len(text) > 2 and text[0] in "'*" and text[0] == text[-1] and text.count(text[0]) == 2:
        text = text[1:-1]
    return _trimmed(text.replace("$$", " "))


def compact(text: str) -> str:
    """The text without spaces (except between digits), for a comparison before any parsing."""
    return re.sub(r"(?<![0-9])\s+|\s+(?![0-9])", "", text)


def closing_at(text: str, start: int) -> int:
    """Index of the bracket that closes the bracket at `start`, counting brackets of any kind; -1 if there is none."""
    level = 0
    for at in range(start, len(text)):
        if text[at] in "([{":
            level += 1
        elif text[at] in ")]}":
            level -= 1
            if level == 0:
                return at
    return -1


def _rebracketed(text: str, form: re.Pattern[str], opening: str, closing: str) -> str:
    """The text with `opening` in place of each match of `form`, which ends with a bracket, and `closing` in place of
    that bracket's partner: ``sqrt(x)`` becomes ``\\sqrt{x}``. From a bracket without a partner on, nothing changes."""
    at = 0
    while (found := form.search(text, at)) is not None:
        end = closing_at(text, found.end() - 1)
        if end < 0:
            return text
        text = text[: found.start()] + opening + text[found.end() : end] + closing + text[end + 1 :]
        at = found.start() + len(opening)
    return text
