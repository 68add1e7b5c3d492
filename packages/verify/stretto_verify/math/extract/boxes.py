"""Boxed answers: the last box that is not denied, joined with the other boxes of its list."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from stretto_verify.math.extract.corrections import withdrawn
from stretto_verify.math.extract.denials import denied
from stretto_verify.math.extract.glued import with_glued
from stretto_verify.math.parse.structure import says_nothing

_BOX = re.compile(r"(?:\\(?:boxed|fbox|framebox)\s*|(?<![A-Za-z\\])boxed)(?=\{)")
_BARE_BOX = re.compile(r"\\(?:boxed|fbox)\s+(-?[0-9.]+|[a-zA-Z])")
_JOINED = re.compile(r"(?<![a-zA-Z])(?:and|or)(?![a-zA-Z])|,|;")
_PARTED = re.compile(
    r"\b(?:wait|actually|instead|rather|better|on reflection|revis\w+|correct\w*|sorry|mistake\w*"
    r"|wrong|hmm|no|not|but)\b|[.?!][\s$\\]+(?:[A-Z]|$)|\n\s*\(?[a-z0-9]\)",
    re.IGNORECASE,
)
_LATER = re.compile(  # words by which a box replaces the one before
    r"\b(?:final(?:ly)?|lastly|then|next|later|so|hence|thus|therefore)\b|最[后後终終]|然[后後]|所以|因此|故",
    re.IGNORECASE,
)
_LAST = re.compile(r"\bfinal(?:ly)?\b", re.IGNORECASE)
_SENTENCE = re.compile(  # states an answer ("The answer is 9", "Option B"); no formula
    r"(?!.*\\(?:text|mathrm|mbox|begin|operatorname)|[a-z ]*=|(?:sin|cos|tan|ln|log|max|min|gcd|lcm|exp|sqrt|pi|inf)\b)"
    r"(?!.*\?\s*$)(?=.*(?:\b(?:is|are|equals?|get|got|obtain|choose|pick|select|answer|option|choice)\b|:))"
    r"\s*(?:\*\*)?(?:[a-z']{2,}[:,.]?|[a-z](?= (?:is|equals|think|choose|get|got)\b))\s+\S"
    r"|\s*[\u4e00-\u9fff]{2,}\s*[:：是为]",
    re.DOTALL | re.IGNORECASE,
)
_OF_TWO = re.compile(  # the sum of 2 and
    r"\b(?:between|of|either|from)\s+\$?(?!\\boxed)[^\s$]{1,12}\$?,?\s+(?:and|or|to)\s*$", re.IGNORECASE
)
_STRICT_SIGNS = ("<", ">", *(rf"\{name}" for name in ("gt", "lt", "gg", "ll", "ngtr", "nless")))
_STRICT = re.compile(r"(?:[\w)}|]\s+|[)}|]|(?<![\w<\\/])[a-zA-Z])(?:[<>]|\\(?:gt|lt|gg|ll|ngtr|nless))$")
_WORD = re.compile(r"\b(?:and|or)\b")
_DOLLAR = re.compile(r"(?<!\\)\$")


class _Box(NamedTuple):
    """Position of a box in a text (start, end), and its content."""

    start: int
    end: int
    content: str


def boxed(text: str) -> str | None:
    r"""Content of the last box that is neither empty nor denied: joined by commas with the other boxes of its list, or
    if it is alone, with what belongs to it beside the box (`with_glued`). "" if all are denied or the text after the
    last one withdraws it, None if there is no box with content.

    >>> boxed(r"first \boxed{3}, and then \boxed{4} and \boxed{5}."), boxed(r"not \boxed{3}")
    ('3, 4, 5', '')
    """
    found = [box for box in _boxes(text) if box.content.strip()]
    if not found:
        bare = _BARE_BOX.findall(text)
        return bare[-1] if bare else None
    found = [box for box in found if not (denied(text, box.start, box.end) or _is_passed(text, box.start))]
    if not found or withdrawn(found[-1].content, text[found[-1].end :]):
        return ""
    kept = [found[-1]]
    for box in reversed(found[:-1]):
        if not _belong_together(text[box.end : kept[0].start]):
            break
        kept.insert(0, box)
    contents = [_inner(box.content) for box in kept]
    if len(kept) == 1:
        return with_glued(contents[0], text[: kept[0].start], text[kept[0].end :])
    return ", ".join(dict.fromkeys(contents))


def _is_passed(text: str, start: int) -> bool:
    """Whether a strict inequality sign or words before the box that begins at `start` make it no final answer: ``x >
    \\boxed{12}``, or "the sum of 2 and" before the box."""
    before = text[max(0, start - 40) : start].rstrip(" $")
    if before.endswith(("and", "or", "to")) and _OF_TWO.search(before) is not None:
        return True
    return before.endswith(_STRICT_SIGNS) and _STRICT.search(before) is not None


def last_box(text: str) -> int:
    """Index at which the last box of the text begins, closed or not, inside another box or not; -1 if there is none."""
    return max(
        [found.start() for found in re.finditer(r"\\(?:boxed|fbox|framebox)|(?<![A-Za-z\\])boxed\{", text)], default=-1
    )


def only_box(text: str) -> str | None:
    """Content of the box that is the whole text but for spaces, dollar signs, dots and stars around it; None for other
    texts."""
    bare = text.strip("$ \n.*")
    found = list(_boxes(bare))
    is_only = len(found) == 1 and found[0][:2] == (0, len(bare)) and bare.endswith("}")
    return found[0].content.strip() if is_only else None


def _inner(content: str) -> str:
    """Content of a box without dollar signs (a sentence keeps them). If it is only boxes, what `boxed` finds in
    them, or ""."""
    inner = list(_boxes(content))
    beside = content
    for box in reversed(inner):
        beside = beside[: box.start] + beside[box.end :]
    if inner and says_nothing(beside.replace("=", "")):
        return boxed(content) or ""
    return content.strip() if is_sentence(content) else _DOLLAR.sub("", content.strip())


def is_sentence(content: str) -> bool:
    """Whether the content of a box is a sentence that states an answer: "the answer is 9"."""
    return _SENTENCE.match(content) is not None


def _boxes(text: str) -> Iterator[_Box]:
    """Yield the outermost boxes. An unclosed box is the last one. Its content ends with its line, and is "" if the text
    breaks off there; with a further box in the line it is left out."""
    at = 0
    while (found := _BOX.search(text, at)) is not None:
        end = _brace_end(text, found.end())
        if end < 0:
            line, *rest = text[found.end() + 1 :].rstrip().split("\n")
            if not _BOX.search(line):
                yield _Box(found.start(), len(text), line.rstrip("$. ") if rest or line.endswith(("$", ".")) else "")
            return
        yield _Box(found.start(), end + 1, text[found.end() + 1 : end])
        at = end + 1


def _brace_end(text: str, start: int) -> int:
    level = 0
    for at in range(start, len(text)):
        if text[at] in "{}" and (at - len(text[:at].rstrip("\\"))) % 2:
            continue  # \{, but not the brace behind \\
        if text[at] == "{":
            level += 1
        elif text[at] == "}":
            level -= 1
            if level == 0:
                return at
    return -1


def _belong_together(between: str) -> bool:
    if _PARTED.search(between) or (_LAST.search(between) and not _WORD.search(between)):
        return False
    if _JOINED.search(between) is not None:
        return len(between) < 70
    return len(between) < 10 and _LATER.search(between) is None
