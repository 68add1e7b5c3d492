"""Turning pydantic's errors into problems of a recipe: place, value found, and what is allowed."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterator, Sequence
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from stretto.core.errors import Problem, nearest
from stretto.doors.door import Door
from stretto.doors.loading import is_own, with_colon

_HINT = "; did you mean "
#: Sections whose keys are suggested first.
_COMMON = ("trainer", "rollout", "sampling", "task", "engine", "rewards", "evaluation")
_MOST_KEYS = 8  # names listed in a message, at most
_NEAR = 0.85  # similarity of two names (difflib)
_WORD = re.compile(r"'([^']*)'")

#: Names of keys in other systems ("key=value": of values), with the name or advice for stretto.
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
    "section=preferences": "a recipe with preferences is one of `stretto dpo`",
    "loss=dpo": "DPO learns from pairs, by `stretto dpo`; from Python by a function, as in examples/own_loss.py",
    "loss=sft": 'demonstrations are learnt by `stretto sft`; from Python by "cross_entropy" of a stretto.Trainer',
    "loss=grpo": 'GRPO is loss = "ppo" with advantages = "group"',
    "loss=dapo": 'DAPO is loss = { kind = "ppo", clip_high = 0.28 }, and in [rollout] filter = "zero_variance"',
}


def problems_of(place: str, errors: Sequence[ErrorDetails], kind: type[BaseModel]) -> Iterator[Problem]:
    """Convert pydantic's `errors` (`ValidationError.errors`) to one problem per key. A value that fits no member of a
    union has an error per member; these become one problem. `place`: file or argument in which the settings were given,
    in front of each key in the problems. `kind`: model class that was validated."""
    problems: dict[str, Problem] = {}
    for problem in (_problem(place, details, kind) for details in errors):
        if (other := problems.get(problem.place)) is not None:
            first = other.remedy.partition(_HINT)[0]
            remedy = f"{first} or {problem.remedy.removeprefix('input should be ')}"
            problem = Problem(problem.place, other.found, remedy)
        problems[problem.place] = problem
    yield from problems.values()


def _problem(place: str, details: ErrorDetails, kind: type[BaseModel]) -> Problem:
    keys, beside, models, door = _keys(details["loc"], kind)
    where = f"{place}: {'.'.join(keys)}" if keys else place
    match details["type"]:
        case "extra_forbidden":
            return Problem(
                where,
                "unknown key",
                _OTHER_NAMES.get(f"section={keys[-1]}")
                or _alias(keys, beside)
                or _elsewhere(keys, details["input"], kind)
                or nearest(keys[-1], beside),
            )
        case "missing":
            return Problem(where, "missing")
        case "union_tag_not_found":
            allowed = sorted(str(_kind(model)) for model in models)
            return Problem(
                f"{where}.kind", "missing", f"allowed: {', '.join(allowed)}{_guessed(details['input'], models)}"
            )
        case "model_type" | "model_attributes_type" | "dict_type" if models:
            return Problem(where, shown(details["input"]), _a_section(details["input"], models))
        case "tuple_type" | "list_type":
            given = details["input"]
            short = isinstance(given, str | float) or (isinstance(given, int) and abs(given) < 1 << 64)
            such = f": [{json.dumps(given)}]" if short and len(str(given)) < 80 else ""
            return Problem(where, shown(given), f"a list is needed{such}")
        case "value_error":
            return Problem(where, str(details["ctx"]["error"]))
        case "union_tag_invalid":
            tag, kinds = details["ctx"]["tag"], details["ctx"]["expected_tags"]
            near = nearest(tag, [kind.strip("'") for kind in kinds.split(", ")])
            own = [near] if near.startswith("did") else []
            own += [with_colon(tag)] if door is not None else []
            known = _OTHER_NAMES.get(f"{keys[-1]}={tag}")
            remedy = "; ".join([f"allowed: {kinds}", *([known] if known else own)])
            return Problem(where, f"kind {tag!r:.80} is unknown", remedy)
    given = details["input"]
    is_name = door is not None and details["type"] == "literal_error" and isinstance(given, str)
    remedy = details["msg"][0].lower() + details["msg"][1:] + _near(details)
    return Problem(where, shown(given), remedy + (f"; {with_colon(given)}" if is_name else ""))


def shown(value: object) -> str:
    """The first 80 characters of a value's `repr`, for a message; words for an integer that Python does not write, and
    for what holds one."""
    try:
        return repr(value)[:80]
    except ValueError:
        held = "" if isinstance(value, int) else f"a {type(value).__name__} with "
        return f"{held}an integer of thousands of digits"


def _near(details: ErrorDetails) -> str:
    """Suggest the most similar allowed word for a text that is none of the allowed ones, as the end of a message
    ("; did you mean ..."); "" if none is similar, or the error is another one."""
    if details["type"] != "literal_error" or not isinstance(details["input"], str):
        return ""
    near = nearest(details["input"], _WORD.findall(details["ctx"]["expected"]))
    return f"; {near}" if near.startswith(_HINT.removeprefix("; ")) else ""


def _alias(keys: Sequence[str], beside: Sequence[str]) -> str:
    """Suggest stretto's key for the unknown key `keys[-1]`, if other systems call it so (``lr``); "" for other names.
    `beside`: keys allowed in the same section."""
    known = _OTHER_NAMES.get(keys[-1])
    if known is None:
        return ""
    section, _, key = known.rpartition(".")
    return f"did you mean {key if key in beside and section in ('', *keys) else known!r}?"


def _elsewhere(keys: Sequence[str], value: object, kind: type[BaseModel]) -> str:
    """Hint for a key that was given outside of any section, such as "did you mean 'trainer.steps'?": up to three keys
    of `kind`'s sections with its name or a similar one. "" if there is none, or `keys` and `value` are of a section."""
    if len(keys) != 1 or isinstance(value, dict):
        return ""
    sections = {name: _models(field.annotation) for name, field in kind.model_fields.items()}
    known = [(name, key) for name, models in sections.items() for model in models for key in model.model_fields]
    near = difflib.get_close_matches(keys[0], {key for _, key in known}, n=2, cutoff=_NEAR)
    exact = {pair for pair in known if pair[1] == keys[0]}
    found = exact if any(name in _COMMON for name, _ in exact) else {pair for pair in known if pair[1] in near}
    meant = sorted(found, key=lambda pair: (_rank(pair[0]), pair))
    return f"did you mean {' or '.join(repr(f'{name}.{key}') for name, key in meant[:3])}?" if meant else ""


def _rank(section: str) -> int:
    return _COMMON.index(section) if section in _COMMON else len(_COMMON)


def _guessed(section: object, models: Sequence[type[BaseModel]]) -> str:
    """Hint for a section without its kind: the kind that has all of the given keys; "" unless exactly one has them."""
    given = set(section) if isinstance(section, dict) else set()
    fitting = [model for model in models if given and given <= set(model.model_fields)]
    return f"; its other keys are those of {_kind(fitting[0])!r}" if len(fitting) == 1 else ""


def _a_section(value: object, models: Sequence[type[BaseModel]]) -> str:
    """Advice, never "", for a plain `value` in place of a section: the kinds or keys that `models`, the allowed
    sections, have; and, for a number in place of a section with a weight, how to write it as one."""
    kinds = [name for name in map(_kind, models) if name]
    keys = [key for key in models[0].model_fields if key != "kind"]
    with_keys = f" with {', '.join(keys)}" if len(keys) <= _MOST_KEYS else ""
    several = len(models) > 1
    said = f"one of {', '.join(kinds)}, or a section, is needed" if several else f"a section{with_keys} is needed"
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return said + (f", such as {{ weight = {value} }}" if is_number and "weight" in keys and not several else "")


def _keys(
    location: tuple[int | str, ...], kind: type[BaseModel]
) -> tuple[list[str], list[str], list[type[BaseModel]], Door[Any] | None]:
    """Decode pydantic's `location`.

    Returns:
        The keys as written in the file, without pydantic's labels of union members; the keys allowed in the same
            section as the last one; the section classes that the value of the last one may have; and the door of that
            key, or None.
    """
    keys: list[str] = []
    models: list[type[BaseModel]] = [kind]
    beside = list(kind.model_fields)
    door: Door[Any] | None = None
    is_label = False  # a kind may have the name of one of its keys
    for part in map(str, location):
        labelled = [model for model in models if _kind(model) == part and not is_label]
        if is_label := bool(labelled):
            models = labelled
        elif door is not None and is_own(part):
            models = [door.model(part)]
        elif models or part.isdecimal():  # key of a section, or index in a list; else a label after a plain value
            keys.append(part)
            if part.isdecimal():  # item of a list of sections: `models` stays
                continue
            beside = list(models[0].model_fields) if models else beside
            fields = [model.model_fields[part] for model in models if part in model.model_fields]
            door = next(iter(_doors(fields[0])), None) if fields else None
            models = _models_of(fields[0]) if fields else []
    return keys, beside, models, door


def _doors(field: FieldInfo) -> list[Door[Any]]:
    return [one for one in field.metadata if isinstance(one, Door)]


def _models_of(field: FieldInfo) -> list[type[BaseModel]]:
    """List the section classes that a key may hold; for the key of a door, those of its built-in parts."""
    found = _models(field.annotation)
    return [model for door in _doors(field) for model in door.models] if found and _doors(field) else found


def _models(annotation: Any) -> list[type[BaseModel]]:
    if get_origin(annotation) in (Union, UnionType, Annotated, tuple, list):
        return [model for part in get_args(annotation) for model in _models(part)]
    return [annotation] if isinstance(annotation, type) and issubclass(annotation, BaseModel) else []


def _kind(model: type[BaseModel]) -> str | None:
    field = model.model_fields.get("kind")
    return get_args(field.annotation)[0] if field and get_origin(field.annotation) is Literal else None
