r"""Spellings that are rare in final answers: ``\surd``, ``\bigcup``, ``101_{(2)}``, ``\text{Option B}``, ``1/2
(\text{or }0.5)``.

They are looked for only in a text that has one of their signs, since each pattern takes time.
"""

from __future__ import annotations

import re
from typing import Final

_SIGNS = re.compile(
    r"\\(?:bigcup|[lr]brack|[lr]paren|sfrac|nicefrac|surd|root|[ij]math|cr(?![a-z])|check|black|square|Box|qed|mathrm|mathsf"
    r"|text|approx)|[✓✔✅∎□■]|base|octal|half|quarter|third|inary|decimal|ption|hoice|nswer:|floor|\b0[xbo][0-9A-Fa-f]|_\{1,|_\{\(|_\{[0-9]+\+|[A-J]\)\s*$"
)
_BRACKETS: Final = {"lbrack": "[", "rbrack": "]", "lparen": "(", "rparen": ")"}
_SYSTEMS: Final = {"binary": 2, "octal": 8, "decimal": 10, "hexadecimal": 16}
_MARKED: Final = {"x": 16, "b": 2, "o": 8}
_PARTS: Final = {"half": 2, "third": 3, "quarter": 4}
_REPLACED: Final = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"(?:\\(?:checkmark|blacksquare|square|Box|qed)(?![a-zA-Z])|[✓✔✅∎□■])\s*$", ""),
        (r"\\(?:text|mathrm)\s*\{\s*(?:only|\(?in (?:interval|set) notation\)?)\s*\}\s*$", ""),
        (r"\\bigcup(?![a-zA-Z])", r"\\cup "),
        (r"\\[lr](?:brack|paren)(?![a-zA-Z])\s*", lambda found: _BRACKETS[found[0].strip()[1:]]),
        (r"\\(?:sfrac|nicefrac)(?![a-z])", r"\\frac"),
        (r"\\surd(?![a-z])", r"\\sqrt"),
        (r"\\root\s*([0-9])\s*\\of(?![a-z])", r"\\sqrt[\1]"),
        (r"\\([ij])math(?![a-z])", r"\1"),
        (r"\\cr(?![a-z])", r"\\\\"),
        (r"^\s*([A-J])\)\s*$", r"\1"),
        (r"\\math(?:rm|sf)\s*\{\s*\\mu\s*([A-Za-z]+)\s*\}", r"\\mu \\text{\1}"),
        (
            r"(?<=[0-9}\s])\\math(?:rm|sf)\s*\{([A-Za-z0-9^{}()\s/-]*\\cdot(?![a-z])[^{}]*(?:\{[^{}]*\}[^{}]*)*)\}",
            lambda found: rf"\text{{{found[1]}}}".replace(r"\cdot", "*"),
        ),
        (
            r"\\(?:text|mathrm)\s*\{\s*([0-9A-F]+)\s*\}\s*_|(?<=[0-9A-F])\\(?:text|mathrm)\s*\{\s*([A-F]+)\s*\}\s*_",
            r"\1\2_",
        ),
        (r"_\{([0-9]{1,2})\}(?=[\s}(]*(?:\\text\s*\{)?[\s(]*(?:in\s+)?(?:base|binary|octal|hexa|deci))", r"_\1"),
        (r"_\s*\{\s*(?:\(([0-9]{1,2})\)|\\(?:text|mathrm)\s*\{\s*base\s*\}\s*([0-9]{1,2}))\s*\}", r"_{\1\2}"),
        (
            r"(?<=[0-9A-F])\s*(?:\\(?:text|mathrm)\s*\{)?\s*\(?\s*(?:in\s+)?base[\s}]+([0-9]{1,2}|two|three|four|five|six|seven|eight|nine|ten|twelve|sixteen)\)?\s*\}?\s*$",
            r"_{\1}",
        ),
        (
            r"(?<=[0-9])\s*\\text\s*\{\s*and (?:an? |one )(half|third|quarter)\s*\}",
            lambda found: rf"\frac{{1}}{{{_PARTS[found[1]]}}}",
        ),
        (
            r"(?<=[0-9A-F])\s*(?:\\(?:text|mathrm)\s*\{)?\s*\(?\s*(?:in\s+)?(binary|octal|decimal|hexadecimal)\)?\s*\}?\s*$",
            lambda found: f"_{{{_SYSTEMS[found[1]]}}}",
        ),
        (r"_\{?([0-9]{1,2})\}?_\{\1\}$", r"_{\1}"),  # 101_2 in binary
        (r"^\s*0([xbo])([0-9A-Fa-f]+)\s*$", lambda found: f"{found[2].upper()}_{{{_MARKED[found[1]]}}}"),
        (
            r"^(\s*(?:\\(?:text|mathrm)\s*\{\s*)?)(?:[Oo]ption|[Cc]hoice|[Aa]nswer:)\s+(?=\(?[A-J](?:[).:]|\s*\}?\s*$))",
            r"\1",
        ),
        (r"(?<=\S)\s*\(\s*\\(?:text|mathrm)\s*\{\s*or\s*\}([^()]*)\)\s*$", r",\1"),
        (
            r"(?<=\S)\s*\\(?:text|mathrm)\s*\{\s*\(\s*or(?:\s+([^(){}]+)|\s*\}([^()]*)\\(?:text|mathrm)\s*\{\s*)\)\s*\}\s*$",
            r",\1\2",
        ),
        (r"(?<=\S)\s*\(\s*(?:\\approx|≈)\s*([^()]*)\)\s*$", r"\\approx \1"),
        (r"_\{([0-9]+)\+([a-zA-Z])\}", r"_{\2+\1}"),
        (r"^\s*\\text\s*\{\s*(\(?[A-J][).:]+)\s*(-?[0-9][0-9.,/]*)\s*\}\s*$", r"\\text{\1 }\2"),
        (r"([a-z])_\{1,\s*2\}\s*=", r"\1="),
        (
            r"(?<![a-zA-Z])floor\s*\(([^()]*)\)|\\(?:text|mathrm)\{\s*floor\s*\}\s*\(([^()]*)\)",
            r"\\lfloor \1\2\\rfloor ",
        ),
        (r"\\(?:text|mathrm)\s*\{\s*[iI]nfinity\s*\}", r"\\infty "),
        (r"(?<=[0-9}])\s*/\s*\\(?:text|mathrm)\{\s*(?:an? )?([a-z]{3,})\s*\}\s*$", r"\\text{ per \1}"),
    )
)


def common(text: str) -> str:
    r"""Rewrite rare spellings to common ones; other texts are unchanged.

    >>> common(r"\surd 2"), common(r"(0,1)\bigcup(2,3)"), common("101 (base 2)"), common(r"\text{Option B}")
    ('\\sqrt 2', '(0,1)\\cup (2,3)', '101_{2}', '\\text{B}')
    """
    if _SIGNS.search(text) is None:
        return text
    for pattern, replacement in _REPLACED:
        text = pattern.sub(replacement, text)
    return text
