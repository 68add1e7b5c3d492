"""Questions from a JSONL file: one object a line, with a prompt and an answer."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, Field

from stretto.core.errors import DataError, Problem
from stretto.core.jsonl import Mistakes
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
