"""Random drawing of questions. A hash of its text decides whether a question is held out (one in five is). So held-out
questions are the same for every seed, and none is a training question."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Protocol, TypeVar

from stretto.core.errors import DataError, Problem
from stretto.core.records import derive_seed

_HELD_OUT_PART = 5
_MOST_MISSES = 50_000  # draws in a row without a new question, after which no further one is expected


class Drawable(Protocol):
    """A drawn object with the text of its question, which decides whether it is held out (Protocol)."""

    @property
    def text(self) -> str: ...


Drawn = TypeVar("Drawn", bound=Drawable)


def draw_training(draw: Callable[[random.Random], Drawn], count: int, seed: int) -> list[Drawn]:
    """Draw `count` training questions with `draw`; a question may occur more than once."""
    chance = random.Random(seed)
    drawn: list[Drawn] = []
    while len(drawn) < count:
        if not is_held_out(one := draw(chance)):
            drawn.append(one)
    return drawn


def draw_held_out(draw: Callable[[random.Random], Drawn], count: int, larger: str) -> list[Drawn]:
    """Draw `count` distinct held-out questions. `larger`: name of the setting to increase for more, for the error.

    Raises:
        DataError: there are fewer than `count`.
    """
    chance = random.Random(derive_seed("held out"))
    drawn: dict[str, Drawn] = {}
    misses = 0
    while len(drawn) < count:
        one = draw(chance)
        if is_held_out(one) and one.text not in drawn:
            drawn[one.text], misses = one, 0
        elif (misses := misses + 1) == _MOST_MISSES:
            found = f"{count}, and {len(drawn)} distinct questions that may be held out are ever drawn"
            raise DataError([Problem("task.held_out", found, f"choose at most {len(drawn)}, or a larger {larger}")])
    return list(drawn.values())


def is_held_out(question: Drawable) -> bool:
    return derive_seed(question.text) % _HELD_OUT_PART == 0
