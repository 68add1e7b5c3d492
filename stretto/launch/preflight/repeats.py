"""Rows of a dataset that say the same as others: they are read, and told of."""

from __future__ import annotations

from collections.abc import Sequence

from stretto.worlds.data.task import Question, Questions


def repeated(questions: Questions) -> list[str]:
    """Sentences about rows of files that are held out and trained on, that ask what another row asks and want another
    answer, or that are there twice. (Questions that are made on the spot repeat by chance, and are never held out.)"""
    training, held_out = ([row for row in rows if row.place] for rows in (questions.training, questions.held_out))
    both = {row.place for row in training}  # one file may be meant to be both
    held_out = [row for row in held_out if row.place not in both]
    first = {_asked(row): row for row in reversed(training)}
    leaked = [(row, first[_asked(row)]) for row in held_out if _asked(row) in first]
    again = [*_again(training), *_again(held_out)]
    contrary = [(row, other) for row, other in (*leaked, *again) if row.answer != other.answer]
    same = [(row, other) for row, other in again if row.answer == other.answer]
    return [
        *_told(leaked, "held-out questions that are trained on as well, so that their accuracy says less"),
        *_told(contrary, "questions that were asked before with another answer"),
        *_told(same, "questions that were asked before with the same answer"),
    ]


def _again(rows: Sequence[Question]) -> list[tuple[Question, Question]]:
    """Rows that ask what an earlier one does, with that one."""
    first = {_asked(row): row for row in reversed(rows)}
    return [(row, first[_asked(row)]) for row in rows if first[_asked(row)] is not row]


def _asked(row: Question) -> object:
    return row.text, tuple(tuple(sorted(message.items())) for message in row.messages)


def _told(pairs: Sequence[tuple[Question, Question]], what: str) -> list[str]:
    if not pairs:
        return []
    row, other = pairs[0]
    return [f"{what}: {len(pairs):,}; the first is {row.place}, as in {other.place}"]
