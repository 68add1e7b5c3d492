r"""Final answers in forms that say the same as a simpler one, and are read as that.

``\begin{cases} x=1 \\ y=2 \end{cases}`` is ``x=1,y=2``; "x = kπ for all integers k" is ``x = k\pi``; "twenty-five"
is 25; "at least 5" is ``\ge 5``; "2 hours 30 minutes" is a number of minutes. All are whole answers: inside of a
formula nothing is changed.
"""

from __future__ import annotations

import re
from typing import Final

from stretto.rewards.math_units import compound
from stretto.rewards.math_words import date, number_in_words, says_nothing_solves_it

_TEXTS = re.compile(r"\\text\{([^{}]*)\}")
_SYSTEM = re.compile(
    r"(?:\\\{)?\s*\\begin\{(d?cases|array|aligned|gathered|align\*?|split)\}(?:\{[lcr|]*\})?(.*?)\\end\{\1\}(?:\\\})?",
    re.DOTALL,
)
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
_BOUNDS: Final = tuple(
    (re.compile(rf"(?:{words})\s+(?=\S)", re.IGNORECASE), sign)
    for words, sign in (
        ("at least|no less than|not less than|a minimum of", r"\ge "),
        ("at most|no more than|not more than|up to|a maximum of", r"\le "),
        ("(?:more|greater|larger|bigger|higher) than|over|above", ">"),
        ("(?:less|fewer|smaller|lower) than|under|below", "<"),
    )
)
_CHOSEN = re.compile(r"(?:option|choice|statement|answer)\s*\(?([A-J])\)?", re.IGNORECASE)
_POINT = re.compile(r"([A-Z])'?\s*(\([^()]*,.*\))")
_LETTERS = re.compile(r"[A-Z](?:\s*,\s*[A-Z])+")
_PROPORTION = re.compile(r"([0-9.]+) to ([0-9.]+)")


def reformed(text: str) -> str:
    r"""A spelled final answer in its simpler form; itself, where there is none.

    >>> reformed(r"\text{one half}"), reformed("at least 5"), reformed(r"\frac{\pi}{4}+n\pi,n \in \mathbb{Z}")
    ('\\frac{1}{2}', '\\ge 5', '\\frac{\\pi}{4}+k\\pi')
    """
    if r"\begin" in text:
        text = _SYSTEM.sub(_system, text)
    if r"\begin" not in text:
        text = text.replace(r"\\", ",")
    if (declared := _declaration(text)) is not None:
        text = declared
    told = " ".join(_TEXTS.sub(r" \1 ", text).split())
    return _told(told) or _structured(text, told)


def _told(told: str) -> str | None:
    """What is said in words."""
    if (number := number_in_words(told)) is not None:
        return number
    if (day := date(told)) is not None:
        return rf"\text{{{day}}}"
    if says_nothing_solves_it(told):
        return r"\emptyset"
    if (measured := compound(told)) is not None:
        return rf"{measured[0]}\text{{ {measured[1]}}}"
    return None


def _structured(text: str, told: str) -> str:
    for words, sign in _BOUNDS:
        if (found := words.match(told)) is not None:
            return sign + told[found.end() :]
    if (chosen := _CHOSEN.fullmatch(told)) is not None:
        return chosen[1]
    if _LETTERS.fullmatch(told) is not None:
        return told
    if (proportion := _PROPORTION.fullmatch(told)) is not None:
        return f"{proportion[1]}:{proportion[2]}"
    if (point := _POINT.fullmatch(text)) is not None:
        return f"{point[1]}={point[2]}"
    return text


def _system(found: re.Match[str]) -> str:
    """The rows as a list; a matrix, and cases that hold under conditions, stay what they are."""
    rows = [row.strip() for row in re.split(r"\\\\(?:\[[^\]]*\])?", found[2]) if row.strip()]
    if "align" in found[1] or found[1] == "split":
        rows = [row.replace("&", "") for row in rows]
    if any("&" in row or not _SIGN.search(row) for row in rows):
        return found[0]
    joined = ""
    for row in rows:  # a row that begins with a sign goes on with the chain of the row above
        joined += row.rstrip(",;") if not joined or _SIGN.match(row) else "," + row.rstrip(",;")
    return joined


def without_declaration(text: str) -> str:
    """Without "for all x", "where c is a constant" at its end."""
    return text[: found.start()] if (found := _DECLARED.search(text)) is not None and found.start() else text


def _declaration(text: str) -> str | None:
    """Without "k ∈ Z" or "for all integers k" behind it, and with k as the name of the parameter; None: has none."""
    plain = " ".join(_TEXTS.sub(lambda text: text[0] if len(text[1].strip()) == 1 else f" {text[1]} ", text).split())
    found = _DECLARED.search(plain)
    if found is None or not (head := plain[: found.start()].strip()):
        return None
    name = found[1] or found[2] or found[3]
    alone = r"(?<![a-zA-Z\\]){}(?![a-zA-Z])"
    if re.search(alone.format("k"), head) is not None:
        return head
    return re.sub(alone.format(name), "k", head)
