"""Check of the arguments of `stretto.Engine`, `stretto.Trainer` and the others, before they start any work."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from stretto.core.errors import DataError, Problem, RecipeError, RefusedRequest
from stretto.core.records import Sampling
from stretto.doors.mistakes import problems_of, shown
from stretto.trainer.config import OptimizerConfig

#: A text, or token ids: a list, a tuple, or an array of numpy or torch.
Asked = Any
_PROMPT = "a prompt is a text, or a list of token ids; `chat` takes messages"
#: Most completions of one call.
MOST_COMPLETIONS = 65_536
#: Tokens of a completion at most, where a caller says nothing.
MOST_TOKENS = 256


Kind = TypeVar("Kind", bound=BaseModel)


def checked(settings: Mapping[str, Any], place: str, kind: type[Kind]) -> Kind:
    """Validate settings and return them as a model of this kind. `place`: where they were given, for messages. Raises
    RecipeError, which has one problem for each wrong key."""
    try:
        return kind.model_validate(settings, strict=True, context=place)
    except ValidationError as error:
        raise RecipeError(problems_of(place, error.errors(), kind)) from None


@dataclass(frozen=True)
class ArgumentKind:
    """A kind of argument: a phrase for messages, and a function that tells whether a value is allowed."""

    allowed: str
    fits: Callable[[Any], bool]

    @property
    def or_none(self) -> ArgumentKind:
        """A kind that allows None too; its phrase is the same."""
        return ArgumentKind(self.allowed, lambda given: given is None or self.fits(given))


def instance(kind: type | tuple[type, ...], allowed: str) -> ArgumentKind:
    """Return the kind of argument that is an instance of `kind`; `allowed`: phrase for messages."""
    return ArgumentKind(allowed, lambda given: isinstance(given, kind))


def integer(least: int, most: int | None = None) -> ArgumentKind:
    """Return the kind of argument that is a whole number from `least` to `most` (None: no limit)."""
    allowed = f"a whole number of at least {least}" + ("" if most is None else f" and at most {most}")
    return ArgumentKind(allowed, lambda one: _is_integer(one) and one >= least and (most is None or one <= most))


def _is_integer(given: Any) -> bool:
    return isinstance(given, Integral) and not isinstance(given, bool)


def _is_seed(given: Any) -> bool:
    return _is_integer(given) and abs(given) < 10**2000  # of which the text is hashed


def _is_number(given: Any) -> bool:
    if not isinstance(given, Real) or isinstance(given, bool):
        return False
    try:
        float(given)
    except OverflowError:  # a whole number with more than 308 digits
        return False
    return True


def _is_path(given: Any) -> bool:
    try:
        return isinstance(given, str | os.PathLike) and given != "" and b"\0" not in os.fsencode(given)
    except UnicodeEncodeError:
        return False


FOLDER = ArgumentKind("the path of a folder", _is_path)
WHOLE = ArgumentKind("a whole number of at most 2,000 digits", _is_seed)
NUMBER = ArgumentKind("a number", _is_number)
LIST = ArgumentKind("a list", lambda given: isinstance(given, Sequence) and not isinstance(given, str | bytes))
SEEDS = ArgumentKind(
    "a list of whole numbers, one for each completion",
    lambda given: LIST.fits(given) and 0 < len(given) <= MOST_COMPLETIONS and all(map(_is_seed, given)),
)
COUNT = integer(1, MOST_COMPLETIONS)
VERSION = integer(0)
PROMPTS = ArgumentKind(
    "a list of prompts", lambda given: hasattr(given, "__iter__") and not isinstance(given, str | bytes | Mapping)
)
TOKENIZER = ArgumentKind("engine.tokenizer", lambda given: hasattr(given, "encode") and hasattr(given, "vocabulary"))


def check(place: str, **given: tuple[object, ArgumentKind]) -> None:
    """Check arguments, given by name as (value, allowed kind). `place`: name of the called function, for messages.
    Raises DataError if a value is not of its kind; names each of them."""
    found = [
        Problem(f"{place}: {name}", shown(value), f"give {kind.allowed}")
        for name, (value, kind) in given.items()
        if not kind.fits(value)
    ]
    if found:
        raise DataError(found)


def prompts_of(given: Asked | Sequence[Asked]) -> list[str | tuple[int, ...]]:
    """Convert one prompt, or a list of prompts, to a list. A text is one prompt, and so is a list that begins with a
    token id; an empty list is no prompts. Raises RefusedRequest if a prompt is neither a text nor token ids."""
    found = plain(given)
    if isinstance(found, str):
        return [found]
    if not isinstance(found, list | tuple):
        raise _no_prompt("prompts", given)
    if found and isinstance(found[0], Integral):
        return [prompt_of("prompts", found)]
    return [prompt_of(f"prompts[{at}]", one) for at, one in enumerate(found)]


def prompt_of(place: str, given: Asked) -> str | tuple[int, ...]:
    """Convert one prompt to a text or a tuple of token ids. `place`: name of the argument, for messages. Raises
    RefusedRequest if it is neither a text nor token ids."""
    given = plain(given)
    if isinstance(given, str):
        return given
    ids: list[Any] = [plain(one) for one in given] if isinstance(given, list | tuple) else [None]
    if not all(isinstance(one, Integral) and not isinstance(one, bool) for one in ids):
        raise _no_prompt(place, given)
    return tuple(int(one) for one in ids)


def plain(given: Any) -> Any:
    """Convert an array of numpy or torch to numbers or nested lists; return anything else unchanged."""
    return given.tolist() if hasattr(given, "tolist") else given


def _no_prompt(place: str, given: object) -> RefusedRequest:
    return RefusedRequest(place, f"{shown(given)} is of the type {type(given).__name__}", _PROMPT)


def sampling_of(given: Mapping[str, Any] | None) -> Sampling:
    """Return the sampling settings of the completions that a trainer is trained on. `given`: the settings that differ
    from the defaults; None: none does. Raises RecipeError if a setting does not exist, or `temperature` is not above 0.
    Other values are not checked."""
    settings = {"max_tokens": MOST_TOKENS, **(given or {})}
    allowed = ("temperature", "top_p", "top_k", "min_p", "max_tokens")
    if unknown := [name for name in settings if name not in allowed]:
        raise RecipeError([Problem(f"Trainer: sampling.{unknown[0]}", "unknown key", f"allowed: {', '.join(allowed)}")])
    sampling = Sampling(**settings)
    if not sampling.temperature > 0:
        told, remedy = f"{sampling.temperature}", "greater than 0: greedy completions are not sampled"
        raise RecipeError([Problem("Trainer: sampling.temperature", told, remedy)])
    return sampling


def optimizer_of(given: Mapping[str, Any], place: str) -> OptimizerConfig:
    """Check and return the optimizer settings of a trainer. `given`: the settings that differ from the defaults;
    `place`: name of the called function, for messages. Raises RecipeError if a setting does not exist or is out of
    range, or is one of `warmup_steps` and `schedule`, which only recipes use."""
    config = checked(given, place, OptimizerConfig)
    of_recipes = {"warmup_steps": config.warmup_steps > 0, "schedule": config.schedule != "constant"}
    told, remedy = "would change nothing: a step has the rate that it is given", "give optim_step(learning_rate)"
    if problems := [Problem(f"{place}: {name}", told, remedy) for name, unheeded in of_recipes.items() if unheeded]:
        raise RecipeError(problems)
    return config
