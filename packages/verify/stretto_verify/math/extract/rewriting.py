r"""Rewrite a completion before the final answer is searched.

An approximation in words is written with a sign: "1/6 (about 0.167)" becomes ``1/6 ≈ 0.167``. The answer in a JSON
object is marked: ``{"answer": "5"}`` becomes "Answer: 5".
"""

from __future__ import annotations

import re

_ABOUT = r"(?:approximately|approx\.?|about|roughly|around|≈|\\approx(?![a-z]))"
_NEAR = r"\$?\s*(-?[0-9][0-9,]*(?:\.[0-9]+)?\s*(?:\\?%|percent\b|[a-z]{1,3}\b)?)\s*\$?"
_VALUE = r"(?<=[0-9)}$π%])"
_APPROXIMATED = re.compile(
    rf"{_VALUE}\s*(?:\(\s*(?:or |which is )?{_ABOUT}\s*{_NEAR}\)"
    rf"|,?\s*\b(?:or|which is|that is)\s+{_ABOUT}\s*{_NEAR}"
    rf"|\\text\s*\{{\s*(?:\(|,?\s*or\s)\s*{_ABOUT}\s*{_NEAR}\)?\s*\}}"
    rf"|\\text\s*\{{\s*,?\s*(?:or|which is)\s+{_ABOUT}\s*\}}\s*{_NEAR})"
)
_ANSWER = re.compile(r'"(?:final[ _])?answer"\s*:\s*"((?:[^"\\\n]|\\.)*)"', re.IGNORECASE)


def unquoted(text: str) -> str:
    r"""The text with approximations written as ≈, and with the answer of a JSON object marked.

    >>> unquoted("It is 1/6 (about 0.167)."), unquoted('{"answer": "5"}')
    ('It is 1/6 ≈ 0.167.', '{\nAnswer: 5\n}')
    """
    near = _APPROXIMATED.sub(lambda found: f" ≈ {next(filter(None, found.groups())).strip()}", text)
    return _ANSWER.sub(lambda found: f"\nAnswer: {found[1]}\n", near)
