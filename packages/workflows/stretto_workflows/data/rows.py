"""Conversion of a dataset's row to a question."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any, Self

from stretto.core.errors import Mistakes
from stretto.rollout.questions import Question
from stretto.rollout.tasks import JsonlTask, RowsSource
from stretto_workflows.data import jsonl
from stretto_workflows.data.jsonl import LARGEST_ROW


@dataclass(frozen=True)
class Columns:
    """The keys of a row that hold id, prompt, answer and demonstration, and how its prompt is made.

    `system_prompt`: system message for rows that have none; None: none. `render(row, place)`, if given, makes the
    prompt, and the key `prompt` is not read. `as_chat`: the tokenizer's chat template, if any, applies to plain texts
    too. `template_arguments`: of the chat template, (name, value). `source`: name of the source, which begins the ids
    of its questions. `key`: what stands before the names of its keys in an override of the recipe, "task." or "".
    `seen`: by id, the place of each earlier row, for errors.
    """

    prompt: str = "prompt"
    answer: str = "answer"
    demonstration: str = "demonstration"
    id: str | None = None  # None: ids of rows are not checked
    system_prompt: str | None = None
    as_chat: bool = False
    template_arguments: tuple[tuple[str, object], ...] = ()
    render: Callable[[Mapping[str, Any], str], str] | None = None
    source: str = ""
    key: str = ""  # what is before the names of its fields in an override of the recipe
    seen: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, config: JsonlTask | RowsSource, **further: Any) -> Self:
        """The columns that a section of a recipe names. `further`: fields that no section has, such as `render`."""
        return cls(
            prompt=config.prompt_field,
            answer=config.answer_field,
            demonstration=config.demonstration_field,
            id=config.id_field,
            system_prompt=config.system_prompt,
            as_chat=config.chat_template == "auto",
            key="task." if isinstance(config, JsonlTask) else "",
            template_arguments=tuple(config.template_arguments.items()),
            **further,
        )


def _written(row: Mapping[str, Any], names: Sequence[str], columns: Columns) -> str:
    """Text of the overrides that name the columns of a row for those of `names` that it lacks: the most similar column,
    else the only one with a text that has no other use; "" if the row lacks none."""
    if not (lacking := [name for name in names if name not in row]):
        return ""
    used = {columns.prompt, columns.answer, columns.demonstration, columns.id}
    left = [name for name, value in row.items() if isinstance(value, str) and name not in used]
    keys = {columns.prompt: "prompt_field", columns.answer: "answer_field"}
    close = {name: get_close_matches(name, left, n=1) for name in lacking}
    only = left if len(left) == len(lacking) == 1 else ["NAME"]
    return " ".join(f"{columns.key}{keys[name]}={(close[name] or only)[0]}" for name in lacking)


def question(row: Mapping[str, Any], number: int, place: str, columns: Columns) -> Question:
    """Convert a row to a question, and add its own id, if `columns` names one, to `columns.seen`. Other columns than
    prompt and gold answer become the question's `fields`; a `system_prompt` is put before messages without one, and
    makes a chat of a plain text. `number`: of the row in the dataset, for the question's id. `place`: for errors.

    Raises:
        DataError: keys are missing or have invalid values, or another row has its id; names each mistake.
    """
    mistakes = Mistakes()
    text, messages, answer = "", tuple[dict[str, str], ...](), ""
    with mistakes:
        if columns.id is not None:
            jsonl.note_id(row, columns.id, place, columns.seen)
    with mistakes:
        names = (columns.answer,) if columns.render is not None else (columns.prompt, columns.answer)
        jsonl.require(row, names, place, _written(row, names, columns))
    with mistakes:
        if columns.render is not None or columns.prompt in row:
            given = row[columns.prompt] if columns.render is None else columns.render(row, place)
            text, messages = jsonl.prompt(given, f"{place}: {columns.prompt}")
    with mistakes:
        if columns.answer in row:
            answer = gold(row[columns.answer], f"{place}: {columns.answer}")
    with mistakes:
        if (demonstration := row.get(columns.demonstration)) is not None:
            demonstration = jsonl.text(demonstration, f"{place}: {columns.demonstration}")
    mistakes.done()
    further = {name: value for name, value in row.items() if name not in (columns.prompt, columns.answer)}
    chat = messages or ({"role": "user", "content": text},)
    if columns.system_prompt is not None and chat[0]["role"] != "system":
        messages = chat = ({"role": "system", "content": columns.system_prompt}, *chat)
    return Question(
        id=f"{columns.source}:{number}" if columns.source else str(number),
        text=text,
        answer=answer,
        demonstration=demonstration,
        messages=messages,
        place=place,
        fields=json.dumps(further, default=str) if further else "",
        as_chat=chat if columns.as_chat else (),
        template_arguments=columns.template_arguments,
        source=columns.source,
    )


def gold(answer: object, place: str) -> str:
    """Convert a gold answer, a text or a finite number, to text; raises a DataError at `place` for anything else."""
    is_whole = isinstance(answer, int) and not isinstance(answer, bool)  # it may be beyond any float
    if is_whole or (isinstance(answer, float) and math.isfinite(answer)):
        answer = str(answer)
    return jsonl.text(answer, place, LARGEST_ROW)  # it may be the tests of a program
