"""Mistakes of a recipe, from pydantic's errors: the place, the value found, and what is allowed."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic_core import ErrorDetails

from stretto.core.errors import Problem, nearest

_HINT = "; did you mean "
_WORD = re.compile(r"'([^']*)'")

#: Names that other systems give to a key, or to a value.
_OTHER_NAMES = {
    "lr": "learning_rate",
    "bs": "rollout.batch_size",
    "train_batch_size": "rollout.batch_size",
    "num_generations": "rollout.group_size",
    "n_samples": "rollout.group_size",
    "max_new_tokens": "sampling.max_tokens",
    "max_completion_length": "sampling.max_tokens",
    "beta": "algorithm.reference.weight",
    "kl_coef": "algorithm.reference.weight",
    "max_steps": "trainer.steps",
    "gradient_checkpointing": "trainer.activation_checkpointing",
    "loss=grpo": 'GRPO is loss = "ppo" with advantages = "group"',
}


def problems_of(place: str, errors: Sequence[ErrorDetails], kind: type[BaseModel]) -> Iterator[Problem]:
    """One problem for each key; pydantic reports a value that fits no member of a union once for each member."""
    problems: dict[str, Problem] = {}
    for problem in (_problem(place, details, kind) for details in errors):
        if (other := problems.get(problem.place)) is not None:
            first = other.remedy.partition(_HINT)[0]
            remedy = f"{first} or {problem.remedy.removeprefix('input should be ')}"
            problem = Problem(problem.place, other.found, remedy)
        problems[problem.place] = problem
    yield from problems.values()


def _problem(place: str, details: ErrorDetails, kind: type[BaseModel]) -> Problem:
    keys, beside = _keys(details["loc"], kind)
    where = f"{place}: {'.'.join(keys)}" if keys else place
    match details["type"]:
        case "extra_forbidden":
            return Problem(where, "unknown key", _alias(keys, beside) or nearest(keys[-1], beside))
        case "missing":
            return Problem(where, "missing")
        case "value_error":
            return Problem(where, str(details["ctx"]["error"]))
        case "union_tag_invalid":
            tag, kinds = details["ctx"]["tag"], details["ctx"]["expected_tags"]
            near = nearest(tag, [kind.strip("'") for kind in kinds.split(", ")])
            remedy = _OTHER_NAMES.get(f"{keys[-1]}={tag}") or (near if near.startswith("did") else "")
            return Problem(where, f"kind {tag!r} is unknown", f"allowed: {kinds}" + (f"; {remedy}" if remedy else ""))
    return Problem(where, f"{details['input']!r}"[:80], details["msg"][0].lower() + details["msg"][1:] + _near(details))


def _near(details: ErrorDetails) -> str:
    """The nearest of the words that are allowed, where another one is given."""
    if details["type"] != "literal_error" or not isinstance(details["input"], str):
        return ""
    near = nearest(details["input"], _WORD.findall(details["ctx"]["expected"]))
    return f"; {near}" if near.startswith(_HINT.removeprefix("; ")) else ""


def _alias(keys: Sequence[str], beside: Sequence[str]) -> str:
    """The remedy for a key that has this name in other systems."""
    known = _OTHER_NAMES.get(keys[-1])
    if known is None:
        return ""
    section, _, key = known.rpartition(".")
    return f"did you mean {key if key in beside and section in ('', *keys) else known!r}?"


def _keys(location: tuple[int | str, ...], kind: type[BaseModel]) -> tuple[list[str], list[str]]:
    """The keys of the file in pydantic's `location`, without its labels of union members ("task.jsonl.file"); and the
    keys that are allowed beside the last one."""
    keys: list[str] = []
    models: list[type[BaseModel]] = [kind]
    beside = list(kind.model_fields)
    for part in map(str, location):
        if labelled := [model for model in models if _kind(model) == part]:
            models = labelled
        elif models or part.isdecimal():  # a section's key, or a place in a list; behind a plain value: a label
            keys.append(part)
            if part.isdecimal():  # in a list of sections, which stay the candidates
                continue
            beside = list(models[0].model_fields) if models else beside
            fields = [model.model_fields[part] for model in models if part in model.model_fields]
            models = _models(fields[0].annotation) if fields else []
    return keys, beside


def _models(annotation: Any) -> list[type[BaseModel]]:
    if get_origin(annotation) in (Union, UnionType, Annotated, tuple, list):
        return [model for part in get_args(annotation) for model in _models(part)]
    return [annotation] if isinstance(annotation, type) and issubclass(annotation, BaseModel) else []


def _kind(model: type[BaseModel]) -> str | None:
    field = model.model_fields.get("kind")
    return get_args(field.annotation)[0] if field and get_origin(field.annotation) is Literal else None
