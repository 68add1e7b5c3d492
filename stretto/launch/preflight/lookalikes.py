"""Warnings about gold answers with digits of other scripts, which look like 0 to 9 and equal none of them."""

from __future__ import annotations

from stretto.launch.preflight.encoding import place_of
from stretto.worlds.data.task import Question, Questions


def strange_digits(questions: Questions) -> list[str]:
    """A sentence about gold answers such as ``１２`` (full width), which no completion in plain digits equals."""
    found = [(row, strange) for row in (*questions.training, *questions.held_out) if (strange := _strange(row))]
    if not found:
        return []
    row, strange = found[0]
    return [
        f"gold answers with digits other than 0 to 9, which completions in plain digits do not equal: {len(found):,}; "
        f"the first is {place_of(row)}: {strange!r} (U+{ord(strange):04X})"
    ]


def _strange(row: Question) -> str:
    return next((letter for letter in row.answer if not letter.isascii() and letter.isdecimal()), "")
