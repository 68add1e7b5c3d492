"""What may be given as a prompt: a text, token ids, or an array of them."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral
from typing import Any

from stretto.core.errors import RefusedRequest

#: A text, or token ids: a list, a tuple, or an array of numpy or torch.
Asked = Any
_PROMPT = "a prompt is a text, or a list of token ids; `chat` takes messages"


def prompts_of(given: Asked | Sequence[Asked]) -> list[str | tuple[int, ...]]:
    """All prompts; a text, or a list that begins with a token, is one.

    Raises:
        RefusedRequest: something is no prompt.
    """
    found = plain(given)
    if isinstance(found, str):
        return [found]
    if not isinstance(found, list | tuple):
        raise _no_prompt("prompts", given)
    if found and isinstance(found[0], Integral):
        return [prompt_of("prompts", found)]
    return [prompt_of(f"prompts[{at}]", one) for at, one in enumerate(found)]


def prompt_of(place: str, given: Asked) -> str | tuple[int, ...]:
    """One prompt.

    Raises:
        RefusedRequest: it is none; `place` says where it was given.
    """
    given = plain(given)
    if isinstance(given, str):
        return given
    ids: list[Any] = [plain(one) for one in given] if isinstance(given, list | tuple) else [None]
    if not all(isinstance(one, Integral) and not isinstance(one, bool) for one in ids):
        raise _no_prompt(place, given)
    return tuple(int(one) for one in ids)


def plain(given: Any) -> Any:
    """An array of numpy or torch as lists of numbers."""
    return given.tolist() if hasattr(given, "tolist") else given


def _no_prompt(place: str, given: object) -> RefusedRequest:
    return RefusedRequest(place, f"{given!r:.80} is of the type {type(given).__name__}", _PROMPT)
