"""Small programs from short descriptions: a synthetic task that is judged by execution.

    question        a plus b times c max 3:
    demonstration   x=a+b;x=x*c;return max(x,3)

The completion continues ``def f(a,b,c):`` and is run with numbers for a, b and c. The steps of a description apply to
the value so far, one after the other, without precedence. Demonstrations are imperfect on purpose, as in
`stretto.rollout.arithmetic`: with probability `mistake_rate`, a step has another operator or another operand.
"""

from __future__ import annotations

import json
import operator
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from stretto.core.records import derive_seed
from stretto.rollout.questions import Question, Questions, draw_held_out, draw_training
from stretto.rollout.tasks import ProgramsTask

_HEAD = "def f(a,b,c):"
_LARGEST = 9  # test arguments for a, b and c are from -9 to 9
#: Operators of steps, each as source and as a function.
_WORDS: dict[str, tuple[str, Callable[[int, int], int]]] = {
    "plus": ("{}+{}", operator.add),
    "minus": ("{}-{}", operator.sub),
    "times": ("{}*{}", operator.mul),
    "max": ("max({},{})", max),
    "min": ("min({},{})", min),
}
_OPERANDS = ("a", "b", "c", *map(str, range(1, 10)))


@dataclass(frozen=True)
class Instruction:
    """One step: an operator, which is a key of `_WORDS`, and its operand, "a", "b", "c" or a digit. Example:
    ``Instruction("max", "3")`` is ``max(x,3)``."""

    word: str
    operand: str

    def applied_to(self, value: str) -> str:
        return _WORDS[self.word][0].format(value, self.operand)


@dataclass(frozen=True)
class Description:
    """A small program in words: at least one step; they apply to `a`, one after the other."""

    steps: tuple[Instruction, ...]

    def __str__(self) -> str:
        return "a " + " ".join(f"{step.word} {step.operand}" for step in self.steps) + ":"

    @property
    def program(self) -> str:
        """Source of the function's body."""
        first, *rest = self.steps
        lines = [first.applied_to("a"), *(step.applied_to("x") for step in rest)]
        return "".join(f"x={line};" for line in lines[:-1]) + f"return {lines[-1]}"

    def value(self, a: int, b: int, c: int) -> int:
        """Return value of the function for these arguments."""
        known, value = {"a": a, "b": b, "c": c}, a
        for step in self.steps:
            value = _WORDS[step.word][1](value, known[step.operand] if step.operand in known else int(step.operand))
        return value


def questions(task: ProgramsTask, seed: int) -> Questions:
    """Generate all questions. Training questions and demonstrations depend on `seed`, held-out ones do not.

    Raises:
        DataError: there are fewer than `held_out` distinct held-out questions.
    """
    training = draw_training(partial(draw, task), task.prompts, derive_seed(seed, "training"))
    held_out = draw_held_out(partial(draw, task), task.held_out, "task.steps_max")
    return Questions(
        [_question(task, str(row), description) for row, description in enumerate(training)],
        [_question(task, f"h{row}", description) for row, description in enumerate(held_out)],
        lambda: _shown(task, seed),
    )


def _shown(task: ProgramsTask, seed: int) -> list[Question]:
    to_show = draw_training(partial(draw, task), task.demonstrations, derive_seed(seed, "demonstrations"))
    chance = random.Random(derive_seed(seed, "mistakes"))
    return [
        Question(id=f"d{row}", text=str(shown), answer="", demonstration=demonstration(task, shown, chance))
        for row, shown in enumerate(to_show)
    ]


def draw(task: ProgramsTask, chance: random.Random) -> Description:
    """Draw a description at random: from `steps_min` to `steps_max` steps."""
    count = chance.randint(task.steps_min, task.steps_max)
    return Description(tuple(Instruction(chance.choice(list(_WORDS)), chance.choice(_OPERANDS)) for _ in range(count)))


def demonstration(task: ProgramsTask, description: Description, chance: random.Random) -> str:
    """Write a program for a description, as a body of the function; each step is wrong with probability
    `mistake_rate`. `chance`: source of the random numbers."""
    steps = [_misread(step, chance) if chance.random() < task.mistake_rate else step for step in description.steps]
    return Description(tuple(steps)).program


def _misread(step: Instruction, chance: random.Random) -> Instruction:
    """Return the step with another operator or another operand, with equal probability."""
    if chance.random() < 0.5:
        return replace(step, word=chance.choice([word for word in _WORDS if word != step.word]))
    return replace(step, operand=chance.choice([operand for operand in _OPERANDS if operand != step.operand]))


def _question(task: ProgramsTask, name: str, description: Description) -> Question:
    chance = random.Random(derive_seed("tests", str(description)))
    calls = []
    for _ in range(task.tests):
        arguments = [chance.randint(-_LARGEST, _LARGEST) for _ in range(3)]
        calls.append({"call": "f", "args": arguments, "expected": description.value(*arguments)})
    tests = {"tests": calls, "preamble": _HEAD, "entry_point": "f"}
    return Question(id=name, text=str(description), answer=json.dumps(tests))
