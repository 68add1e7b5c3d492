r"""Parse expressions: plain numbers here, all others by math-verify's LaTeX parser."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

import sympy
from latex2sympy2_extended.latex2sympy2 import ConversionConfig, latex2sympy

from stretto_verify.math.parse.structure import Unreadable

_DECIMAL = re.compile(r"([+-]?)\s*([0-9]+)(?:\.([0-9]*))?")
_FRACTION = re.compile(r"([+-]?)\s*(?:\\frac\{\s*(-?[0-9]+)\s*\}\{\s*(-?[0-9]+)\s*\}|([0-9]+)\s*/\s*([0-9]+))")
_MIXED = re.compile(r"([+-]?)\s*([0-9]+)\s+([0-9]+)\s*/\s*([0-9]+)")
_REPEATING = re.compile(
    r"([+-]?)([0-9]+)\.([0-9]*?)(?:\\(?:overline|bar|dot)\s*\{?([0-9]+)\}?|([0-9]{1,3}?)\5{2,}\s*\\ldots|(?<=\.)([0-9]{2,6})\6\s*\\ldots)"
)
_PRODUCT = re.compile(  # a product that the parser would read as a mixed number: (2)(3) as 5
    r"((?<![0-9.a-zA-Z_^{\\])[0-9]+(?:\.[0-9]+)?|\\(?:frac|binom)\{(?!d|\\partial)[^{}]*\}\{[^{}]*\}(?=\s*(?:\\frac|\()))\s*(?=\\binom|\(|(?<=\})\\frac)"
    r"|(?<=[0-9)}]\\pi)\s*(?=\()|(?<=\))\s*(?=\\frac)|(?<=[)\]])\s*(?=[(\[])"
)
_PRIMED = re.compile(r"(?:_\{?([0-9a-zA-Z]+)\}?|(?<=[a-zA-Z]))('+)")
_KEEP_CASE = ConversionConfig(lowercase_symbols=False)


@dataclass(frozen=True)
class Number:
    """A plain number: its exact value, and its number of decimal places (None for a fraction)."""

    value: Fraction
    places: int | None

    @property
    def significant(self) -> int:
        """Number of significant digits of a decimal or whole number, zeros at its end included; of a fraction, those of
        its whole part."""
        return len(str(abs(self.value.numerator * 10 ** (self.places or 0) // self.value.denominator)))


def number(latex: str) -> Number | None:
    """Value of ``-12``, ``3.50``, ``1/2``, ``\\frac{1}{2}``, ``2 1/2``, ``0.\\bar{3}``; None if the text is no plain
    number."""
    latex = latex.strip()
    if (found := _DECIMAL.fullmatch(latex)) is not None:
        digits = found[3] or ""
        value = Fraction(int(found[2] + digits), 10 ** len(digits))
        return Number(-value if found[1] == "-" else value, len(digits))
    if (found := _REPEATING.fullmatch(latex)) is not None:
        start, block = found[3], found[4] or found[5] or found[6]
        value = Fraction(
            int(found[2] + start + block) - int(found[2] + start), 10 ** len(start) * (10 ** len(block) - 1)
        )
        return Number(-value if found[1] == "-" else value, None)
    if (found := _MIXED.fullmatch(latex)) is not None and int(found[4]):
        value = int(found[2]) + Fraction(int(found[3]), int(found[4]))
        return Number(-value if found[1] == "-" else value, None)
    if (found := _FRACTION.fullmatch(latex)) is not None:
        above, below = int(found[2] or found[4]), int(found[3] or found[5])
        if below:
            value = Fraction(above, below)
            return Number(-value if found[1] == "-" else value, None)
    return None


@lru_cache(maxsize=1 << 14)
def expression(latex: str) -> sympy.Basic:
    """Parse a scalar, in LaTeX, with math-verify's parser.

    Raises:
        Unreadable: the parser cannot read it.
    """
    if (plain := number(latex)) is not None:
        return sympy.Rational(plain.value.numerator, plain.value.denominator)
    if "'" in latex:  # the parser would drop it
        latex = _PRIMED.sub(lambda found: rf"_{{{found[1] or ''}{'prime' * len(found[2])}}}", latex)
        if "'" in latex:
            raise Unreadable(f"a prime in {latex[:60]!r} that belongs to no name")
    latex = _PRODUCT.sub(lambda factor: rf"{factor[1] or ''}\cdot ", latex)
    try:
        found = latex2sympy(latex, is_real=None, conversion_config=_KEEP_CASE, normalization_config=None)
    # The parser raises bare exceptions, and sympy any kind of exception on the result.
    except Exception as error:
        raise Unreadable(f"cannot read {latex[:60]!r}: {type(error).__name__}") from error
    if not isinstance(found, sympy.Expr):
        raise Unreadable(f"{latex[:60]!r} is {type(found).__name__}")
    return found
