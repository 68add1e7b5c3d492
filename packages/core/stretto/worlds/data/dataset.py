"""Questions, or pairs of completions, from a JSONL file: one object a line. A pair::

    {"prompt": "Question: ... Answer:", "chosen": " 5", "rejected": " 15"}

A prompt may be a list of chat messages, as in a dataset of questions; completions are texts.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, Field

from stretto.core.errors import DataError, Problem
from stretto.core.jsonl import Mistakes, mistake
from stretto.worlds.data import jsonl
from stretto.worlds.data.rows import Columns, question
from stretto.worlds.data.task import Question, Questions


class JsonlTask(BaseModel, extra="forbid", frozen=True):
    """Questions and gold answers from a file."""

    kind: Literal["jsonl"]
    file: str = Field(description="JSONL file, relative to the recipe's folder")
    prompt_field: str = Field("prompt", description="key of the question: a text, or chat messages")
    answer_field: str = Field("answer", description="key of the gold answer")
    demonstration_field: str = Field(
        "demonstration", description="key of the demonstration for the warm start; rows may lack it"
    )
    id_field: str | None = Field(None, description="key of a unique name of the row")
    held_out: int = Field(64, ge=1, description="number of last rows that are kept for evaluation")
    held_out_file: str | None = Field(None, description="file of the evaluation questions, in place of the last rows")

    chat_template: Literal["none", "auto"] = Field(
        "none",
        description="how prompts that are texts become token ids; auto: with the tokenizer's chat template, if "
        "it has one",
    )
    system_prompt: str | None = Field(
        None, description="system message of every chat; turns prompts that are texts into chats"
    )
    template_arguments: dict[str, bool | int | float | str] = Field(
        {}, description='arguments of the chat template, such as "{ enable_thinking = false }"'
    )

    def questions(self, seed: int) -> Questions:
        """Read all rows, in file order; `seed` is not used, since the prompt stream shuffles.

        Raises:
            DataError: a file cannot be read or has invalid rows, or there are not more rows than `held_out`.
        """
        mistakes = Mistakes()
        with mistakes:
            rows = read_rows(Path(self.file), self)
        with mistakes:
            held_out = read_rows(Path(self.held_out_file), self) if self.held_out_file is not None else []
        mistakes.done()
        if self.held_out_file is not None:
            training = rows
        else:
            if len(rows) <= self.held_out:
                found = f"{len(rows)} rows, and held_out = {self.held_out} of them are for evaluation"
                raise DataError([Problem(self.file, found, "give more rows, or a smaller task.held_out")])
            training, held_out = rows[: -self.held_out], rows[-self.held_out :]
        return Questions(training, held_out, lambda: [row for row in training if row.demonstration is not None])


def read_rows(path: Path, task: JsonlTask) -> list[Question]:
    """Read all questions of a JSONL file, with the columns that `task` names.

    Raises:
        DataError: the file is missing, empty or not text, or some of its rows are invalid.
    """
    columns = Columns(
        prompt=task.prompt_field,
        answer=task.answer_field,
        demonstration=task.demonstration_field,
        id=task.id_field,
        system_prompt=task.system_prompt,
        as_chat=task.chat_template == "auto",
        template_arguments=tuple(task.template_arguments.items()),
    )
    return jsonl.read_rows(path, lambda row, number, place: question(row, number, place, columns))


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
