r"""Rewrite two forms of final answers to simpler ones: systems of equations, and declared integers.

``\begin{cases} x=1 \\ y=2 \end{cases}`` becomes ``x=1,y=2``; "x = nπ for all integers n" becomes ``x = k\pi``. Only
whole answers are rewritten, not parts of a formula.
"""

from __future__ import annotations

import re
from typing import Final

from stretto_verify.math.parse.units import united

_COMMAND = re.compile(r"\\[a-zA-Z]+")
_TEXTS = re.compile(r"\\text\{([^{}]*)\}")
_ALONE = re.compile(r"\s*(?:\S|\(?[0-9.,]+\)?)\s*")
_SYSTEM = re.compile(
    r"(?:\\\{)?\s*\\begin\{(d?cases|array|aligned|gathered|align\*?|split)\}(?:\{[lcr|]*\})?(.*?)\\end\{\1\}(?:\\\})?",
    re.DOTALL,
)
_TWO_SYSTEMS = re.compile(r"(\\end\{d?cases\}(?:\\\})?)\s*,?\s*(?=(?:\\\{)?\\begin\{d?cases\})")
_IF = re.compile(r"^\s*\\text\{\s*(?:if|for|when|where)\s*\}\s*")
_PAIR = re.compile(r"\([^()]+,[^()]+\)[,;.]?")
_SIGN = re.compile(r"[=<>]|\\(?:le|ge|in|neq|approx|equiv)(?![a-z])")
_SETS: Final = (
    r"(?:\\mathbb\s*\{?\s*[ZNRQC]\s*\}?|\\text\{\s*[ZNRQC]\s*\}|\\?[ZNRQC](?![a-zA-Z]))(?:[\^_](?:\{[^{}]*\}|.))*"
)
_SEVERAL: Final = r"(?:all|any|every|some|each|arbitrary)"
_DECLARED = re.compile(
    rf"[,;\s(]*(?:where|with|for(?: {_SEVERAL})?)?[\s,]*([a-zA-Z])\s*\\in\s*{_SETS}[\s)]*$"
    r"|[,;\s(]+(?:(?:where|with|for)\s+)?([a-zA-Z]) (?:is|being) (?:an? )?(?:\w+ )?(?:integers?|constant|number)[\s)]*$"
    rf"|[,;\s(]+(?:where|with|for) {_SEVERAL}(?: \w+)?(?: integers?| constants?| numbers?)? ([a-zA-Z])[\s)]*$"
)

_PERIOD = re.compile(r"(?:[+-]|\\pm(?![a-z]))\s*[0-9]*\s*([kmn])\s*\\pi(?![a-zA-Z])")
_NAME = re.compile(r"[a-zA-Z]+")
_BUILT = re.compile(rf"\\\{{\s*(.+?)\s*(?:\\mid(?![a-z])|\||:)(?=\s*([a-zA-Z])\s*\\in)(\s*.\s*\\in\s*{_SETS})\s*\\\}}")
_COMPONENT = re.compile(r"\s*([-+]?)\s*((?:\\[a-zA-Z]+|[^-+ijk()\\]|\([^()]*\))*?)\s*\{?([ijk])\}?(?![a-zA-Z^_])\s*")
_CONDITION = re.compile(
    r"(?:[,;(]\s*|\s+(?=where|with|for|if|when))(?:(?:where|with|for|if|when|and)\s+)*(?:all\s+)?([a-zA-Z])\s*"
    r"(?:(?:<|>|\\(?:le|ge|neq)(?![a-z]))\s*-?[0-9]+|=\s*-?[0-9]+(?:\s*,\s*-?[0-9]+)*\s*,\s*\\ldots)[\s)]*$"
)


def reformed(text: str) -> str:
    r"""Rewrite a final answer in canonical spelling: a system of equations becomes a list, a sum of unit vectors a
    tuple, a product of units one unit, and a free integer gets the name k. Any other answer is unchanged.

    >>> reformed(r"\begin{cases}x=1\\y=2\end{cases}"), reformed(r"\frac{\pi}{4}+n\pi,n \in \mathbb{Z}")
    ('x=1,y=2', '\\frac{\\pi}{4}+k\\pi')
    """
    if r"\text" in text or r"\mu" in text or r"\Omega" in text:
        text = united(text)
    if r"\begin" in text:
        text = _SYSTEM.sub(_system, _TWO_SYSTEMS.sub(r"\1;", text))
    if r"\begin" not in text:
        text = text.replace(r"\\", ",")
    if (built := _BUILT.fullmatch(text)) is not None and _alone(built[2]).search(built[1]) and built[1] != built[2]:
        text = built[1] + built[3]  # {f(k) | k in Z}
    if (vector := _vector(text)) is not None:
        return vector
    return _periodic(text) if (declared := _declaration(text)) is None else declared


def _vector(text: str) -> str | None:
    """``2i-j+3k``, a sum of the unit vectors, as ``(2,-1,3)``; None for other forms (3+4i is complex)."""
    if ("j" not in text and "k" not in text) or "=" in text:
        return None
    at, parts = 0, dict[str, str]()
    while at < len(text):
        found = _COMPONENT.match(text, at)
        if found is None or found[3] in parts or (at and not found[1]):
            return None
        parts[found[3]] = (found[1].replace("+", "") + (found[2].strip() or "1")).removesuffix(r"\cdot")
        at = found.end()
    if len(parts) < 2:
        return None
    return "(" + ",".join(parts.get(name, "0") for name in ("ijk" if "k" in parts else "ij")) + ")"


def _periodic(text: str) -> str:
    r"""The text with k as the name of the integer of a period, as in ``\frac{\pi}{4}+n\pi``; unchanged if it has other
    names."""
    found = _PERIOD.search(text)
    names = set(_NAME.findall(_COMMAND.sub(" ", text.partition("=")[2] or text)))
    return _alone(found[1]).sub("k", text) if found is not None and names == {found[1]} else text


def _system(found: re.Match[str]) -> str:
    """Rows of a system, found by `_SYSTEM`, as a list; cases with conditions as a list of pairs. Unchanged: matrices,
    and systems with a row or condition of another form."""
    rows = [row.strip() for row in re.split(r"\\\\(?:\[[^\]]*\])?", found[2]) if row.strip()]
    cells = [[cell.strip(" ,;.") for cell in row.split("&")] for row in rows]
    if "align" in found[1] or found[1] == "split" or all(_SIGN.match(row[-1]) for row in cells):
        rows = [row.replace("&", "") for row in rows]
    elif "cases" in found[1] and all(len(row) == 2 and all(row) for row in cells):
        told = [_condition(condition) for _, condition in cells]
        pairs = [f"({value},{condition})" for (value, _), condition in zip(cells, told, strict=True)]
        return found[0] if None in told else ",".join(pairs)
    if any("&" in row or not (_SIGN.search(row) or _PAIR.fullmatch(row)) for row in rows):
        return found[0]
    joined = ""
    for row in rows:  # a row that begins with a sign continues the chain of the row above
        joined += row.rstrip(",;") if not joined or _SIGN.match(row) else "," + row.rstrip(",;")
    return joined


def _condition(text: str) -> str | None:
    """A condition of cases: a relation, or a text; None if it is both or neither, since words would be passed over."""
    bare = _IF.sub("", text[1:-1] if text.startswith("(") and text.endswith(")") else text)
    if (_SIGN.search(bare) is None) != (r"\text" in bare):
        return None
    words = " ".join(_TEXTS.sub(r" \1 ", bare).split())
    return rf"\text{{{words.removeprefix('if ')}}}" if r"\text" in bare else bare


def undeclared(text: str) -> str:
    r"""A final answer in canonical spelling without a declaration at its end: ``c is a constant``, ``n \ge 1``. Any
    other answer is unchanged.

    >>> undeclared(r"2^{n-1},n\ge 1"), undeclared(r"x<5,x>1")
    ('2^{n-1}', 'x<5,x>1')
    """
    plain = _plain(text)
    found = _DECLARED.search(plain) or _CONDITION.search(plain)
    head = plain[: found.start()].strip(" ,;").rstrip(" ,;(") if found is not None else ""
    is_of_the_head = found is not None and next(filter(None, found.groups())) in _COMMAND.sub("", head)
    return head if is_of_the_head and not re.search(r"[<>]|\\(?:le|ge|neq|in)(?![a-z])", head) else text


def _plain(text: str) -> str:
    """The text with ``\\forall`` as "for all", ``\\text{…}`` replaced by its words, and single spaces. A ``\\text{…}``
    of a single letter or number stays as it is."""
    text = text.replace(r"\forall", " for all ")
    return " ".join(_TEXTS.sub(lambda found: found[0] if _ALONE.fullmatch(found[1]) else f" {found[1]} ", text).split())


def _alone(name: str) -> re.Pattern[str]:
    return re.compile(rf"(?<![a-zA-Z\\]){name}(?![a-zA-Z])")


def _declaration(text: str) -> str | None:
    """The text without the declaration of an integer at its end ("n ∈ Z", "for all integers n"), and with k for n
    unless it has a k already; None if there is no declaration, or nothing before it."""
    plain = _plain(text)
    found = _DECLARED.search(plain)
    if found is None or not (head := plain[: found.start()].strip()):
        return None
    return head if _alone("k").search(head) else _alone(found[1] or found[2] or found[3]).sub("k", head)
