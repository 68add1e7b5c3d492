"""One row of a dataset becomes one question."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from stretto.core.jsonl import LARGEST_ROW, Mistakes
from stretto.worlds.data import jsonl
from stretto.worlds.data.task import Question


@dataclass(frozen=True)
class Columns:
    """The keys of a row that hold id, prompt, answer and so on, and how the prompt is written.

    `render`, if given, writes the prompt in place of the key `prompt`. `seen` has the ids of earlier rows, with their
    places.
    """

    prompt: str = "prompt"
    answer: str = "answer"
    demonstration: str = "demonstration"
    id: str | None = None
    system_prompt: str | None = None
    as_chat: bool = False
    template_arguments: tuple[tuple[str, object], ...] = ()
    render: Callable[[Mapping[str, Any], str], str] | None = None
    source: str = ""
    seen: dict[str, str] = field(default_factory=dict)


def question(row: Mapping[str, Any], number: int, place: str, columns: Columns) -> Question:
    """The question of a row.

    Raises:
        DataError: with each key that is missing, or whose value is invalid.
    """
    mistakes = Mistakes()
    text, messages, answer = "", tuple[dict[str, str], ...](), ""
    with mistakes:
        if columns.id is not None:
            jsonl.unseen(row, columns.id, place, columns.seen)
    with mistakes:
        jsonl.require(row, (columns.answer,) if columns.render is not None else (columns.prompt, columns.answer), place)
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
    """A gold answer, a text or a number, as text; raises a `mistake` for anything else."""
    if isinstance(answer, int | float) and not isinstance(answer, bool) and math.isfinite(answer):
        answer = str(answer)
    return jsonl.text(answer, place, LARGEST_ROW)  # it may be the tests of a program
