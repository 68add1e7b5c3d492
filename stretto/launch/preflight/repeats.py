"""Warnings about rows of a dataset that repeat the question of another row."""

from __future__ import annotations

from collections.abc import Sequence

from stretto.worlds.data.task import Question, Questions


def repeated(questions: Questions) -> list[str]:
    """Sentences about rows that are held out and trained on, that repeat a question with another answer, or that are
    duplicates. (Generated questions repeat by chance, and never among the held-out ones.)"""
    training, held_out = ([row for row in rows if row.place] for rows in (questions.training, questions.held_out))
    both = {row.place for row in training}  # one file may be given as both
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
    """Rows with the question of an earlier row, and that row."""
    first = {_asked(row): row for row in reversed(rows)}
    return [(row, first[_asked(row)]) for row in rows if first[_asked(row)] is not row]


def _asked(row: Question) -> object:
    return row.text, tuple(tuple(sorted(message.items())) for message in row.messages)


def _warning(pairs: Sequence[tuple[Question, Question]], what: str) -> list[str]:
    if not pairs:
        return []
    row, other = pairs[0]
    return [f"{what}: {len(pairs):,}; the first is {row.place}, as in {other.place}"]
