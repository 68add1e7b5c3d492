"""Questions from a JSONL file: one object a line, with a prompt and an answer.

Every mistake of the file is reported with its line, the first twenty of them in full.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, Field

from stretto.core.errors import DataError, Problem, nearest
from stretto.rollout.task import Question, Questions

_SHOWN = 20
_LARGEST_ROW = 1 << 20
_ROLES = ("system", "user", "assistant")


class JsonlTask(BaseModel, extra="forbid", frozen=True):
    """Questions and answers from a file."""

    kind: Literal["jsonl"]
    file: str = Field(description="JSONL file, relative to the recipe's folder")
    prompt_field: str = "prompt"
    answer_field: str = "answer"
    demonstration_field: str = Field("demonstration", description="used by the warm start where a row has it")
    held_out: int = Field(64, ge=1, description="rows at the end of the file that are kept for evaluation")
    held_out_file: str | None = Field(None, description="a second file in place of the last rows")

    def questions(self, seed: int) -> Questions:
        """The rows in file order; `seed` plays no part, the order of asking is the prompt stream's."""
        rows = read_rows(Path(self.file), self)
        if self.held_out_file is not None:
            training, held_out = rows, read_rows(Path(self.held_out_file), self)
        else:
            if len(rows) <= self.held_out:
                found = f"{len(rows)} rows, and held_out = {self.held_out} of them are for evaluation"
                raise DataError([Problem(self.file, found, "give more rows, or a smaller task.held_out")])
            training, held_out = rows[: -self.held_out], rows[-self.held_out :]
        return Questions(training, held_out, [row for row in training if row.demonstration is not None])


def read_rows(path: Path, task: JsonlTask) -> list[Question]:
    """All questions of a file.

    Raises:
        DataError: the file is missing, empty or not text, or some of its rows are not what they should be.
    """
    questions: list[Question] = []
    problems: list[Problem] = []
    for number, line in enumerate(_lines(path), start=1):
        if not line.strip():
            continue
        try:
            questions.append(_question(line, f"{path}:{number}", str(number), task))
        except _Mistake as mistake:
            problems.append(mistake.problem)
    if len(problems) > _SHOWN:
        more = len(problems) - _SHOWN
        problems = [*problems[:_SHOWN], Problem(str(path), f"{more} more rows like these")]
    if not questions and not problems:
        problems = [Problem(str(path), "no rows", "one JSON object a line is needed")]
    if problems:
        raise DataError(problems)
    return questions


def _lines(path: Path) -> list[str]:
    if not path.exists():
        raise DataError([Problem(str(path), "no such file", "task.file is relative to the recipe's folder")])
    try:
        return path.read_text(encoding="utf-8-sig").split("\n")  # a text may hold other ends of lines, such as U+2028
    except (OSError, UnicodeDecodeError) as error:
        raise DataError([Problem(str(path), f"cannot be read: {error}", "a UTF-8 text file is needed")]) from None


class _Mistake(Exception):
    """A row that is not what it should be; its problem is collected with those of the other rows."""

    def __init__(self, place: str, found: str, remedy: str = "") -> None:
        self.problem = Problem(place, found, remedy)
        super().__init__(self.problem)


def _question(line: str, place: str, number: str, task: JsonlTask) -> Question:
    row = _object(line, place)
    for name in (task.prompt_field, task.answer_field):
        if name not in row:
            raise _Mistake(place, f"no field {name!r}", nearest(name, row) if row else "the object is empty")
    text, messages = _prompt(row[task.prompt_field], f"{place}: {task.prompt_field}")
    demonstration = row.get(task.demonstration_field)
    if demonstration is not None:
        demonstration = _text(demonstration, f"{place}: {task.demonstration_field}")
    answer = row[task.answer_field]
    if isinstance(answer, int | float) and not isinstance(answer, bool) and math.isfinite(answer):
        answer = str(answer)
    answer = _text(answer, f"{place}: {task.answer_field}")
    return Question(id=number, text=text, answer=answer, demonstration=demonstration, messages=messages, place=place)


def _object(line: str, place: str) -> dict[str, Any]:
    if len(line) > _LARGEST_ROW:
        raise _Mistake(place, f"a row of {len(line):,} characters", f"at most {_LARGEST_ROW:,} are allowed")
    try:
        row = json.loads(line, parse_constant=_no_number)
    except (ValueError, RecursionError) as error:  # JSONDecodeError, or a number of thousands of digits
        raise _Mistake(place, f"broken JSON ({error})", "one object a line is needed") from None
    if not isinstance(row, dict):
        raise _Mistake(place, f"{_shown(row)} in place of an object", "one object a line is needed")
    return row


def _no_number(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def _prompt(prompt: object, place: str) -> tuple[str, tuple[dict[str, str], ...]]:
    if not isinstance(prompt, list):
        return _text(prompt, place), ()
    if not prompt:
        raise _Mistake(place, "an empty list of messages", "at least one message is needed")
    for position, message in enumerate(prompt):
        here = f"{place}[{position}]"
        if not isinstance(message, dict) or set(message) != {"role", "content"}:
            raise _Mistake(here, _shown(message), 'a message is {"role": ..., "content": ...}')
        if message["role"] not in _ROLES:
            raise _Mistake(f"{here}.role", _shown(message["role"]), nearest(str(message["role"]), _ROLES))
        _text(message["content"], f"{here}.content")
    return "\n".join(message["content"] for message in prompt), tuple(prompt)


def _text(value: object, place: str) -> str:
    if not isinstance(value, str) or not value.strip():
        raise _Mistake(place, _shown(value), "a text is needed")
    if "\0" in value or any("\ud800" <= letter <= "\udfff" for letter in value):
        raise _Mistake(place, _shown(value), "holds a NUL or half of a surrogate pair, which no text has")
    return value


def _shown(value: object) -> str:
    text = json.dumps(value, ensure_ascii=True, default=repr)
    return text if len(text) <= 60 else text[:57] + "..."
