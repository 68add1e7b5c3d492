r"""Rewrite the notations of programs and of other typesetters to LaTeX, before the spelling is made canonical.

``Matrix([[1, 2]])`` and ``[1, 2; 3, 4]`` become matrices, ``{'x': 1, 'y': 2}`` becomes ``x=1,y=2``, ``3+4j`` becomes
``3+4i``, ``1_000`` becomes ``1000``, "5th of June" becomes "June 5". Only whole answers are rewritten.
"""

from __future__ import annotations

import re
from typing import Final

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
_EXCLAIMED = re.compile(r"(?<![\\A-Za-z])([A-Z][a-z]+|[a-z]{4,}|no|yes)[!?]+(\}?[\s*]*)$")


_MONTHS: Final = (
    *("January", "February", "March", "April", "May", "June", "July"),
    *("August", "September", "October", "November", "December"),
)
_MONTH: Final = "|".join(f"{month[:3]}(?:{month[3:]})?" if month[3:] else month for month in _MONTHS)
_DAY: Final = r"([0-9]{1,2})(?:st|nd|rd|th)?"
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
    if (made := _CONSTRUCTED.fullmatch(text)) is not None:
        return made[1]
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
    if (date := _DATES.fullmatch(text)) is not None:
        month = next(month for month in _MONTHS if month.startswith((date[2] or date[3])[:3]))
        return f"{month} {date[1] or date[4]}" + (f", {date[5]}" if date[5] else "")
    if (of_all := _CONDITIONED.fullmatch(text)) is not None:
        return rf"\{{{of_all[1]}\}}"
    if text.split() in (["{}"], ["{", "}"]):
        return r"\emptyset"
    if _UNDERSCORED.fullmatch(text) is not None:
        return text.replace("_", "")
    return _EXCLAIMED.sub(r"\1\2", _REPEATING.sub(r"\1.\\overline{\2}", text))
