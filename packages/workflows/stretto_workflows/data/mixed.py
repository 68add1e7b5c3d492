"""Questions of a dataset task: all of its sources."""

from __future__ import annotations

from itertools import zip_longest

from stretto.core.errors import Mistakes
from stretto.rollout.questions import Question, Questions
from stretto.rollout.tasks import DatasetTask


def questions(task: DatasetTask, seed: int) -> Questions:
    """Read the questions of all sources, in order.

    Raises:
        DataError: lists the mistakes of all sources.
    """
    training: list[Question] = []
    held_out: list[list[Question]] = []
    notes: list[str] = []
    mistakes = Mistakes()
    sources = (*task.sources, *task.held_out_sources)
    read: dict[int, tuple[list[Question], list[Question], list[str]]] = {}
    for place, source in enumerate(sources):
        if (first := sources.index(source)) == place:  # a source that is listed twice is read once
            with mistakes:
                read[place] = source.questions(seed)
                notes += read[place][2]
        if first not in read:
            continue
        asked, kept, _ = read[first]
        if place < len(task.sources):
            training += asked
        else:
            kept = [*asked, *kept]
        held_out.append(kept)
    mistakes.done()
    weights = {source.title: source.weight for source in task.sources if source.weight is not None}
    return Questions(
        training,
        [row for rows in zip_longest(*held_out) for row in rows if row is not None],  # one of each source in turn
        lambda: [row for row in training if row.demonstration is not None],
        weights=weights,
        notes=tuple(notes),
    )
