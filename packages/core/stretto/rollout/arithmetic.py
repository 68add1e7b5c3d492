"""Chains of arithmetic: a synthetic reasoning task with a long tail of completion lengths.

    question        3+4-5+7=
    demonstration   7-5+7=2+7=9

Each step writes the remaining chain again, so the length of a solution grows with the square of the number of operands:
with 3 to 12 operands the median solution has about 12 characters and the longest 132. Every correct running value is a
digit.

Demonstrations are imperfect on purpose. With probability `mistake_rate`, one random step gets a wrong value, and the
chain continues from it. A policy fine-tuned on them can solve the task, but also samples such mistakes; reinforcement
learning removes them.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, Self

from pydantic import BaseModel, Field, model_validator

from stretto.core.records import derive_seed
from stretto.rollout.questions import Question, Questions, draw_held_out, draw_training


@dataclass(frozen=True)
class Chain:
    """Operands and the signs ("+" or "-") between them; `str` writes it. Example: ``Chain((3, 4, 5), "+-")`` is
    ``3+4-5``."""

    operands: tuple[int, ...]
    signs: str

    def __str__(self) -> str:
        return spelled(self.operands[0], self.signs, self.operands[1:])

    @property
    def value(self) -> int:
        return [self.operands[0], *running_values(self.operands[0], self.signs, self.operands[1:])][-1]


def step(value: int, sign: str, operand: int) -> int:
    """Result of one step of a chain: ``step(7, "-", 5) == 2``."""
    return value + operand if sign == "+" else value - operand


def running_values(value: int, signs: str, operands: Sequence[int]) -> Iterator[int]:
    """Results of the steps of a chain, as `spelled` writes it: 2 and 9 for ``running_values(7, "-+", (5, 7))``."""
    for sign, operand in zip(signs, operands, strict=True):
        value = step(value, sign, operand)
        yield value


def spelled(value: int, signs: str, operands: Sequence[int]) -> str:
    """Text of a chain of `value` and further operands, a sign before each: ``spelled(7, "-+", (5, 7)) == "7-5+7"``."""
    return str(value) + "".join(f"{sign}{operand}" for sign, operand in zip(signs, operands, strict=True))


class ArithmeticTask(BaseModel, extra="forbid", frozen=True):
    """Chains of arithmetic, with n operands in proportion to ``decay ** n``."""

    kind: Literal["arithmetic"]
    operands_min: int = Field(3, ge=2, le=64, description="operands of the shortest chains")
    operands_max: int = Field(12, ge=2, le=64, description="operands of the longest chains")
    decay: float = Field(0.7, gt=0, le=1, description="ratio of the probabilities of n + 1 and n operands")
    mistake_rate: float = Field(0.5, ge=0, lt=1, description="share of demonstrations with a mistake")
    prompts: int = Field(20_000, ge=1, description="training questions")
    held_out: int = Field(512, ge=1, description="questions for evaluation, never trained on")
    demonstrations: int = Field(64_000, ge=0, description="worked examples for the warm start")
    demonstration_decay: float = Field(0.7, gt=0, le=1, description="`decay` of the demonstrations")

    @model_validator(mode="after")
    def _smallest_is_not_above_largest(self) -> Self:
        if self.operands_min > self.operands_max:
            raise ValueError(f"operands_min = {self.operands_min} is above operands_max = {self.operands_max}")
        return self

    def questions(self, seed: int) -> Questions:
        """Generate all questions; the demonstrations are generated when they are first used. Only training questions
        and demonstrations depend on the seed. Raises DataError if there are fewer than `held_out` distinct held-out
        questions."""
        training = draw_training(self.draw, self.prompts, derive_seed(seed, "training"))
        held_out = draw_held_out(self.draw, self.held_out, "task.operands_max")
        return Questions(
            [self._question(str(row), chain) for row, chain in enumerate(training)],
            [self._question(f"h{row}", chain) for row, chain in enumerate(held_out)],
            lambda: self._shown(seed),
        )

    def _shown(self, seed: int) -> list[Question]:
        longer = self.model_copy(update={"decay": self.demonstration_decay})
        shown = draw_training(longer.draw, self.demonstrations, derive_seed(seed, "demonstrations"))
        chance = random.Random(derive_seed(seed, "mistakes"))
        return [self._question(f"d{row}", chain, self.demonstration(chain, chance)) for row, chain in enumerate(shown)]

    def draw(self, chance: random.Random) -> Chain:
        """Draw one chain whose running values all stay between 0 and 9. `chance`: source of random numbers."""
        sizes = range(self.operands_min, self.operands_max + 1)
        (size,) = chance.choices(sizes, [self.decay**n for n in sizes])
        value = chance.randrange(10)
        operands, signs = [value], ""
        for _ in range(size - 1):
            sign = chance.choice("+-")
            operand = chance.randint(0, 9 - value if sign == "+" else value)
            value = step(value, sign, operand)
            operands.append(operand)
            signs += sign
        return Chain(tuple(operands), signs)

    def demonstration(self, chain: Chain, chance: random.Random) -> str:
        """Solution of a chain, which writes the remaining chain after each step: "7-5+7=2+7=9" for 3+4-5+7. With
        probability `mistake_rate`, drawn from `chance`, one step gets a wrong value, from which the chain goes on."""
        wrong_step, wrong = self._mistake(chain, chance) if chance.random() < self.mistake_rate else (0, 0)
        value, left = chain.operands[0], []
        for done in range(1, len(chain.operands)):
            value = step(value, chain.signs[done - 1], chain.operands[done])
            if done == wrong_step:
                value = wrong
            left.append(spelled(value, chain.signs[done:], chain.operands[done + 1 :]))
        return "=".join(left)

    @staticmethod
    def _mistake(chain: Chain, chance: random.Random) -> tuple[int, int]:
        """Choose a step and a wrong result for it, such that all later running values stay between 0 and 9; returns the
        step's number, from 1, and the result."""
        steps = list(range(1, len(chain.operands)))
        chance.shuffle(steps)
        right = [*running_values(chain.operands[0], chain.signs, chain.operands[1:])]
        for done in steps:
            rest = chain.signs[done:], chain.operands[done + 1 :]
            others = [digit for digit in range(10) if digit != right[done - 1]]
            if wrong := [digit for digit in others if all(0 <= later <= 9 for later in running_values(digit, *rest))]:
                return done, chance.choice(wrong)
        raise AssertionError("at the last step any other digit will do")

    @staticmethod
    def _question(name: str, chain: Chain, demonstration: str | None = None) -> Question:
        return Question(id=name, text=f"{chain}=", answer=str(chain.value), demonstration=demonstration)
