"""Questions drawn at random. A hash of the text alone decides which one in five is held out: held-out questions are the
same for every seed, and no training question is one of them."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Protocol, TypeVar

from stretto.core.errors import DataError, Problem
from stretto.core.records import derive_seed

_HELD_OUT_PART = 5
_MOST_MISSES = 50_000  # draws in a row without another question: there are no more, or none that is ever drawn


class Drawable(Protocol):
    """Parts from which a question is made; its text decides whether it is held out."""

    @property
    def text(self) -> str: ...


Drawn = TypeVar("Drawn", bound=Drawable)


def draw_training(draw: Callable[[random.Random], Drawn], count: int, seed: int) -> list[Drawn]:
    """Draw `count` training questions; some may occur more than once."""
    chance = random.Random(seed)
    drawn: list[Drawn] = []
    while len(drawn) < count:
        if not is_held_out(one := draw(chance)):
            drawn.append(one)
    return drawn


def draw_held_out(draw: Callable[[random.Random], Drawn], count: int, larger: str) -> list[Drawn]:
    """Draw `count` distinct held-out questions; `larger` names the setting that would allow more.

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
