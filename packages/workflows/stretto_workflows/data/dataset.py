"""Questions of a dataset task; questions, or pairs of completions, of a JSONL file: one object a line. A pair::

    {"prompt": "Question: ... Answer:", "chosen": " 5", "rejected": " 15"}

A prompt may be a list of chat messages, as in a dataset of questions; completions are texts.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

from stretto.core.errors import DataError, Mistakes, Problem, several
from stretto.rollout.questions import Pair, Question, Questions
from stretto.rollout.tasks import DatasetTask, JsonlTask
from stretto_workflows.data import jsonl
from stretto_workflows.data.jsonl import mistake
from stretto_workflows.data.rows import Columns, question


def mixed(task: DatasetTask, seed: int) -> Questions:
    """Read the questions of all sources of a dataset task, in order; of held-out ones, one of each source in turn. All
    questions of `held_out_sources` are held out. `seed`: of the run, for sources that generate questions.

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


def questions(task: JsonlTask) -> Questions:
    """Read all rows, in file order. Held out are those of `held_out_file`, or without one the last `held_out` rows.

    Raises:
        DataError: a file cannot be read or has invalid rows, or there are not more rows than `held_out`.
    """
    mistakes = Mistakes()
    with mistakes:
        rows = read_rows(Path(task.file), task)
    with mistakes:
        held_out = read_rows(Path(task.held_out_file), task) if task.held_out_file is not None else []
    mistakes.done()
    if task.held_out_file is not None:
        training = rows
    else:
        if len(rows) <= task.held_out:
            found = f"{several(len(rows), 'row')}, and held_out = {task.held_out} of them are for evaluation"
            raise DataError([Problem(task.file, found, "give more rows, or a smaller task.held_out")])
        training, held_out = rows[: -task.held_out], rows[-task.held_out :]
    return Questions(training, held_out, lambda: [row for row in training if row.demonstration is not None])


def read_rows(path: Path, task: JsonlTask) -> list[Question]:
    """Read all questions of a JSONL file, with the columns that `task` names.

    Raises:
        DataError: the file is missing, empty or not text, or some of its rows are invalid.
    """
    columns = Columns.of(task)
    return jsonl.read_rows(path, lambda row, number, place: question(row, number, place, columns))


@dataclass(frozen=True)
class Fields:
    """Keys of a row that hold its prompt and its two completions."""

    prompt: str = "prompt"
    chosen: str = "chosen"
    rejected: str = "rejected"


def read_pairs(path: Path, fields: Fields) -> list[Pair]:
    """Read all pairs of completions of a JSONL file; a pair's id is its line number. `fields`: keys of a row.

    Raises:
        DataError: the file is missing, empty or not text, or some of its rows are invalid.
    """
    return jsonl.read_rows(path, lambda row, number, place: _pair(row, number, place, fields))


def _pair(row: dict[str, Any], number: int, place: str, fields: Fields) -> Pair:
    jsonl.require(row, (fields.prompt, fields.chosen, fields.rejected), place)
    mistakes = Mistakes()
    with mistakes:
        text, messages = jsonl.prompt(row[fields.prompt], f"{place}: {fields.prompt}")
    with mistakes:
        chosen = jsonl.text(row[fields.chosen], f"{place}: {fields.chosen}")
    with mistakes:
        rejected = jsonl.text(row[fields.rejected], f"{place}: {fields.rejected}")
    mistakes.done()
    if chosen == rejected:
        remedy = f"{fields.chosen!r} and {fields.rejected!r} must differ"
        raise mistake(place, f"both completions are {jsonl.shown(chosen)}", remedy)
    return Pair(Question(id=str(number), text=text, answer=chosen, messages=messages, place=place), rejected)
