"""Warnings about odd rows of a dataset: repeated questions, digits of another script."""

from __future__ import annotations

from collections.abc import Sequence

from stretto.launch.preflight.encoding import place_of
from stretto.worlds.data.task import Question, Questions


def repeated(questions: Questions) -> list[str]:
    """Return warnings about questions that are both held out and trained on, that a later row repeats with another
    answer, or that it repeats with the same answer. Generated questions are exempt."""
    training, held_out = ([row for row in rows if row.place] for rows in (questions.training, questions.held_out))
    both = {row.place for row in training}  # one file may be given for both
    held_out = [row for row in held_out if row.place not in both]
    first = {_asked(row): row for row in reversed(training)}
    leaked = [(row, first[_asked(row)]) for row in held_out if _asked(row) in first]
    again = [*_again(training), *_again(held_out)]
    contrary = [(row, other) for row, other in (*leaked, *again) if row.answer != other.answer]
    same = [(row, other) for row, other in again if row.answer == other.answer]
    return [
        *_warning(leaked, "held-out questions that are also trained on, which biases the held-out accuracy"),
        *_warning(contrary, "questions that an earlier row has with another answer"),
        *_warning(same, "questions that an earlier row has with the same answer"),
    ]


def _again(rows: Sequence[Question]) -> list[tuple[Question, Question]]:
    """List (row, earlier row) for each row that repeats the question of an earlier one."""
    first = {_asked(row): row for row in reversed(rows)}
    return [(row, first[_asked(row)]) for row in rows if first[_asked(row)] is not row]


def _asked(row: Question) -> object:
    return row.text, tuple(tuple(sorted(message.items())) for message in row.messages)


def _warning(pairs: Sequence[tuple[Question, Question]], what: str) -> list[str]:
    if not pairs:
        return []
    row, other = pairs[0]
    return [f"{what}: {len(pairs):,}; the first is {row.place}, as in {other.place}"]


def strange_digits(questions: Questions) -> list[str]:
    """Return a warning if gold answers have digits such as ``１２`` (full width): no completion in plain digits equals
    them."""
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
