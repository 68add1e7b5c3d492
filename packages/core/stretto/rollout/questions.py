"""Questions with their gold answers and, for the warm start, demonstrations; random drawing of synthetic ones."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TypeVar

from stretto.core.errors import DataError, Problem
from stretto.core.records import derive_seed


@dataclass(frozen=True)
class Question:
    """One prompt with its gold answer.

    `demonstration`: completion that a warm start teaches; None: none. `messages`: the prompt as a chat, which the
    tokenizer's chat template renders in place of `text`; empty for a plain text. `as_chat`: a chat that replaces `text`
    only if the tokenizer has a chat template. `template_arguments`: arguments of the template, (name, value). `place`:
    FILE:LINE of the row, for errors; "": it is from no file. `fields`: the row's other fields, as a JSON object.
    `source`: name of the source that it is from, in a task of several.

    Example: ``Question(id="17", text="3+8+5=", answer="16", demonstration="11+5=16")``
    """

    id: str
    text: str
    answer: str
    demonstration: str | None = None
    messages: tuple[dict[str, str], ...] = ()
    place: str = ""
    fields: str = ""
    as_chat: tuple[dict[str, str], ...] = ()
    template_arguments: tuple[tuple[str, object], ...] = ()
    source: str = ""

    @property
    def key(self) -> tuple[str, str, str]:
        """Id, prompt and gold answer, as the question's `Prompt` has them."""
        return self.id, self.text, self.answer


@dataclass(frozen=True)
class Pair:
    """A question with its chosen completion (`answer`) and the rejected one.

    Example: ``Pair(Question(id="1", text="3+8=", answer="11"), rejected="12")``
    """

    question: Question  # its answer is the chosen completion
    rejected: str


@dataclass(frozen=True)
class Questions:
    """A task's questions. Held-out questions are for evaluation only: neither the warm start nor the run trains on
    them.

    `demonstrate` returns the demonstrations; it is called at the first use of `demonstrations`, because a resumed run
    needs none. `weights`: relative shares of an epoch by source; empty: an epoch has all questions. `notes`: remarks
    for the user, from reading the questions.
    """

    training: Sequence[Question]
    held_out: Sequence[Question]
    demonstrate: Callable[[], Sequence[Question]] = field(default=tuple, compare=False)
    weights: Mapping[str, float] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @cached_property
    def demonstrations(self) -> Sequence[Question]:
        """Questions whose `demonstration` a warm start teaches; empty if the task has none."""
        return self.demonstrate()


def with_own_ids(parts: Iterable[Sequence[Question]], *, apart: bool) -> Iterator[list[Question]]:
    """Yield the questions of each part of a run, each with an id of its own: a question whose id is taken gets ``~2``
    behind it, or ``~3``, ...; the others keep theirs. An id is taken if an earlier question of the part has it.

    Args:
        parts: questions for training, held-out ones, those of each further set.
        apart: an id is taken too if an earlier question of any part has the same id, prompt and gold answer, but other
            fields, messages or arguments of the template. Then `Question.key` identifies the data of a question.

    >>> rows = [Question("a:1", "3+8=", "11"), Question("a:1", "9-2=", "7"), Question("a:2", "1+1=", "2")]
    >>> [one.id for part in with_own_ids([rows], apart=True) for one in part]
    ['a:1', 'a:1~2', 'a:2']
    """
    known = dict[tuple[str, str, str], object]()
    for questions in parts:
        found, taken = list[Question](), set[str]()
        for question in questions:
            own, tries = question, 1
            data = (question.fields, question.messages, question.as_chat, question.template_arguments)
            while own.id in taken or (apart and known.setdefault(own.key, data) != data):
                tries += 1
                own = replace(question, id=f"{question.id}~{tries}")
            taken.add(own.id)
            found.append(own)
        yield found


_HELD_OUT_PART = 5
_MOST_MISSES = 50_000  # draws in a row without a new question, after which no further one is expected


Drawn = TypeVar("Drawn")  # str(drawn) is the text of its question


def draw_training(draw: Callable[[random.Random], Drawn], count: int, seed: int) -> list[Drawn]:
    """Draw `count` training questions; a question may occur more than once, but none is held out (`is_held_out`).
    `draw`: makes a question from a generator of random numbers, here one seeded with `seed`."""
    chance = random.Random(seed)
    drawn: list[Drawn] = []
    while len(drawn) < count:
        if not is_held_out(str(one := draw(chance))):
            drawn.append(one)
    return drawn


def draw_held_out(draw: Callable[[random.Random], Drawn], count: int, larger: str) -> list[Drawn]:
    """Draw `count` distinct held-out questions with `draw`, the same in every run. `larger`: key of the recipe to
    increase, for the error. Raises DataError if fewer than `count` are found before 50,000 draws in a row find no new
    one."""
    chance = random.Random(derive_seed("held out"))
    drawn: dict[str, Drawn] = {}
    misses = 0
    while len(drawn) < count:
        one = draw(chance)
        if is_held_out(text := str(one)) and text not in drawn:
            drawn[text], misses = one, 0
        elif (misses := misses + 1) == _MOST_MISSES:
            found = f"{count}, and {len(drawn)} distinct questions that may be held out are ever drawn"
            raise DataError([Problem("task.held_out", found, f"choose at most {len(drawn)}, or a larger {larger}")])
    return list(drawn.values())


def is_held_out(text: str) -> bool:
    """Whether a synthetic question is held out: a fifth of all texts, the same in every run."""
    return derive_seed(text) % _HELD_OUT_PART == 0
