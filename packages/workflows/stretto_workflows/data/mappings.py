r"""Ready mappings: which columns of a public dataset are the prompt and the gold answer.

    name           datasets of this shape                              reward
    gsm8k          openai/gsm8k                                        last_number, math
    math           hendrycks MATH, HuggingFaceH4/MATH-500              math
    deepscaler     agentica-org/DeepScaleR-Preview-Dataset             math
    dapo           BytedTsinghua-SIA/DAPO-Math-17k, AIME-2024          math
    aime           Maxwell-Jia/AIME_2024, math-ai/aime25               math
    deepcoder      agentica-org/DeepCoder-Preview-Dataset              code
    livecodebench  livecodebench/code_generation_lite                  code
    humaneval      openai_humaneval                                    code

A mapped row keeps its other columns, which a user's reward function may take as parameters.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from stretto.core.errors import Mistakes, nearest
from stretto_workflows.data.jsonl import mistake, prompt, require, shown, text
from stretto_workflows.data.rows import gold

Values = Mapping[str, Any]
#: By key of a mapped row ("prompt", "answer", "demonstration"): makes its value; raises DataError if it cannot.
Parts = Mapping[str, Callable[[], Any]]

_BOX = re.compile(r"\\(?:boxed|fbox)\s*(?:\{|(?P<bare>-?[0-9.]+|[a-zA-Z]))")
_STARTER = "\n\nComplete this code:\n```python\n{}\n```"


@dataclass(frozen=True)
class _Mapped:
    """Mapping of the rows of one dataset to `prompt`, `answer` and possibly `demonstration`.

    `of`: called with a row and its place ("rows.jsonl:7"), for errors; returns a function for each of these keys, which
    makes its value. `reward`: built-in reward for these gold answers. `distinct`: the dataset repeats its rows, and
    each is taken once. `continued`: the completion continues the prompt's text, so the prompt is not a chat message.
    """

    of: Callable[[Values, str], Parts]
    reward: str = "math"
    distinct: bool = False
    continued: bool = False


def mapped(name: str, row: Values, place: str) -> Values:
    """Return a copy of a row with `prompt`, `answer` and possibly `demonstration` set by the mapping `name`, a key of
    `MAPPINGS`. `place`: for errors.

    Raises:
        DataError: the row lacks columns that the mapping needs, or their values are invalid; names each bad column.
    """
    values, mistakes = {**row}, Mistakes()
    for key, part in MAPPINGS[name].of(row, place).items():
        with mistakes:
            values[key] = part()
    mistakes.done()
    return values


def _gsm8k(row: Values, place: str) -> Parts:
    """Parts of a row of GSM8K: ``answer`` is a worked solution, the demonstration, with the gold answer in its last
    line, ``#### 72``."""
    require(row, ("question", "answer"), place)
    worked = _text(row, "answer", place)

    def final() -> str:
        _, mark, number = worked().rpartition("####")
        if not mark or not number.strip():
            raise mistake(
                f"{place}: answer", shown(worked()[-40:]), "a solution that ends with '#### NUMBER' is needed"
            )
        return number.strip()

    return {"prompt": _text(row, "question", place), "answer": final, "demonstration": worked}


def _math(row: Values, place: str) -> Parts:
    r"""Parts of a row of MATH: the gold answer is the column ``answer``, or without one the last ``\boxed{}`` of the
    solution, which is the demonstration."""
    require(row, ("problem", "solution"), place)
    solution = _text(row, "solution", place)

    def final() -> str:
        answer = row.get("answer")
        if answer is None or answer == "":  # 0 is an answer
            answer = _boxed(solution())
        if answer is None:
            raise mistake(f"{place}: solution", shown(solution()[-40:]), r"a solution with a \boxed{} is needed")
        return gold(answer, f"{place}: answer")

    return {"prompt": _text(row, "problem", place), "answer": final, "demonstration": solution}


def _deepscaler(row: Values, place: str) -> Parts:
    require(row, ("problem", "answer"), place)
    solution = {"demonstration": _text(row, "solution", place)} if row.get("solution") else {}  # many have an empty one
    return {"prompt": _text(row, "problem", place), "answer": _gold(row, "answer", place), **solution}


def _dapo(row: Values, place: str) -> Parts:
    """Parts of a row in verl's form: the prompt is a chat, the gold answer is in ``reward_model.ground_truth``."""
    require(row, ("prompt", "reward_model"), place)
    model = row["reward_model"]

    def final() -> str:
        if not isinstance(model, Mapping) or "ground_truth" not in model:
            raise mistake(f"{place}: reward_model", shown(model), "an object with 'ground_truth' is needed")
        return gold(model["ground_truth"], f"{place}: reward_model.ground_truth")

    def chat() -> Any:
        given = row["prompt"]
        if isinstance(given, list):
            given = [dict(message) if isinstance(message, Mapping) else message for message in given]
        prompt(given, f"{place}: prompt")
        return given

    return {"prompt": chat, "answer": final}


def _aime(row: Values, place: str) -> Parts:
    """Parts of a row of AIME: column names differ in case between its copies; gold answers are whole numbers from 0 to
    999."""

    def final() -> str:
        answer = row[_either(row, ("answer", "Answer"), place)]
        number = str(answer).strip()
        if isinstance(answer, bool) or not re.fullmatch(r"[0-9]{1,3}", number):
            raise mistake(f"{place}: answer", shown(answer), "a whole number from 0 to 999 is needed")
        return str(int(number))

    def asked() -> str:
        return _text(row, _either(row, ("problem", "Problem", "question"), place), place)()

    return {"prompt": asked, "answer": final}


def _deepcoder(row: Values, place: str) -> Parts:
    require(row, ("problem", "tests"), place)

    def tests() -> str:
        whole = row["tests"] if isinstance(row["tests"], str) else json.dumps(row["tests"])
        if isinstance(row.get("metadata"), Mapping) and row.get("starter_code"):  # as LiveCodeBench: names the function
            whole = json.dumps({"public_test_cases": whole, "metadata": row["metadata"]})
        return gold(whole, f"{place}: tests")

    return {"prompt": _with_starter(row, "problem", place), "answer": tests}


def _livecodebench(row: Values, place: str) -> Parts:
    """Parts of a row of LiveCodeBench: the gold answer has the tests as they are, pickled or not; the reward `code`
    reads them without executing a pickle."""
    require(row, ("question_content", "public_test_cases"), place)
    tests = {name: row[name] for name in ("public_test_cases", "private_test_cases", "metadata") if row.get(name)}
    return {"prompt": _with_starter(row, "question_content", place), "answer": partial(json.dumps, tests)}


def _humaneval(row: Values, place: str) -> Parts:
    """Parts of a row of HumanEval: the prompt is the head of a function, which the completion continues; the gold
    answer is the row's tests as JSON, the demonstration its solution, if any."""
    require(row, ("prompt", "test", "entry_point"), place)
    tests = {name: row[name] for name in ("prompt", "test", "entry_point")}
    solution = {"demonstration": _text(row, "canonical_solution", place)} if row.get("canonical_solution") else {}
    return {"prompt": _text(row, "prompt", place), "answer": partial(json.dumps, tests), **solution}


MAPPINGS: Mapping[str, _Mapped] = {
    "gsm8k": _Mapped(_gsm8k),
    "math": _Mapped(_math),
    "deepscaler": _Mapped(_deepscaler),
    "dapo": _Mapped(_dapo, distinct=True),  # each question a hundred times
    "aime": _Mapped(_aime),
    "deepcoder": _Mapped(_deepcoder, "code"),
    "livecodebench": _Mapped(_livecodebench, "code"),
    "humaneval": _Mapped(_humaneval, "code", continued=True),
}


def _text(row: Values, name: str, place: str) -> Callable[[], str]:
    return lambda: text(row[name], f"{place}: {name}")


def _gold(row: Values, name: str, place: str) -> Callable[[], str]:
    return lambda: gold(row[name], f"{place}: {name}")


def _with_starter(row: Values, name: str, place: str) -> Callable[[], str]:
    starter = row.get("starter_code") or ""
    return lambda: text(row[name], f"{place}: {name}") + (_STARTER.format(starter) if starter else "")


def _either(row: Values, names: tuple[str, ...], place: str) -> str:
    found = next((name for name in names if name in row), None)
    if found is None:
        raise mistake(place, f"none of the fields {', '.join(names)}", nearest(names[0], row) if row else "it is empty")
    return found


def _boxed(solution: str) -> str | None:
    r"""Content of the last box, with balanced braces (``\frac{1}{2}`` of ``\boxed{\frac{1}{2}}``); None without one, or
    if it is blank."""
    last = next(reversed(list(_boxes(solution))), None)
    return last.strip() or None if last is not None else None


def _boxes(solution: str) -> Iterator[str]:
    """Yield the contents of all boxes, in order; one whose brace is never closed is left out."""
    for box in _BOX.finditer(solution):
        if box["bare"] is not None:
            yield box["bare"]
            continue
        depth = 1
        for at in range(box.end(), len(solution)):
            depth += {"{": 1, "}": -1}.get(solution[at], 0) if solution[at - 1] != "\\" else 0
            if depth == 0:
                yield solution[box.end() : at]
                break
