"""Rows of a dataset that say the same as others: they are read, and told of."""

from __future__ import annotations

from collections.abc import Sequence

from stretto.rollout.task import Question, Questions


def repeated(questions: Questions) -> list[str]:
    """Sentences about rows of files that are held out and trained on, that ask what another row asks and want another
    answer, or that are there twice. (Questions that are made on the spot repeat by chance, and are never held out.)"""
    training = [row for row in questions.training if row.place]
    first: dict[object, Question] = {}
    for row in training:
        first.setdefault(_asked(row), row)
    leaked = [(row, first[_asked(row)]) for row in questions.held_out if row.place and _asked(row) in first]
    leaked = [(row, other) for row, other in leaked if row.place != other.place]
    again = [(row, first[_asked(row)]) for row in training if first[_asked(row)] is not row]
    contrary = [(row, other) for row, other in again if row.answer != other.answer]
    same = [(row, other) for row, other in again if row.answer == other.answer]
    return [
        *_told(leaked, "held-out questions that are trained on as well, so that their accuracy says less"),
        *_told(contrary, "questions that were asked before with another answer"),
        *_told(same, "questions that were asked before with the same answer"),
    ]


def _asked(row: Question) -> object:
    return row.text, tuple(tuple(sorted(message.items())) for message in row.messages)


def _told(pairs: Sequence[tuple[Question, Question]], what: str) -> list[str]:
    if not pairs:
        return []
    row, other = pairs[0]
    return [f"{what}: {len(pairs):,}; the first is {row.place}, as in {other.place}"]
