"""Pairs of completions from a JSONL file: one object a line, with a prompt, the chosen completion and the rejected one.

    {"prompt": "Question: ... Answer:", "chosen": " 5", "rejected": " 15"}

A prompt may be a list of chat messages, as in a dataset of questions; completions are texts.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stretto.core.jsonl import Mistakes, mistake
from stretto.worlds.data import jsonl
from stretto.worlds.data.task import Question


@dataclass(frozen=True)
class Pair:
    """A question with its chosen completion (`answer`) and the rejected one.

    Example: ``Pair(Question(id="1", text="3+8=", answer="11"), rejected="12")``
    """

    question: Question  # its answer is the chosen completion
    rejected: str


@dataclass(frozen=True)
class Fields:
    """Keys of a row that hold its prompt and its two completions."""

    prompt: str = "prompt"
    chosen: str = "chosen"
    rejected: str = "rejected"


def read_pairs(path: Path, fields: Fields) -> list[Pair]:
    """Read all pairs of a JSONL file.

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
