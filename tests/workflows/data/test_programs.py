"""Small programs from descriptions.

Promises: the program of a description does what the description says, by Python's own reckoning; demonstrations go
wrong as often as they should; tests are those that a correct program passes.
"""

import json
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.rollout.tasks import ProgramsTask
from stretto_workflows.data.programs import Description, Instruction, demonstration, draw

TASK = ProgramsTask(kind="programs", prompts=300, held_out=50, demonstrations=300)


def function(body: str) -> Any:
    namespace: dict[str, Any] = {}
    exec(f"def f(a,b,c):{body}", namespace)
    return namespace["f"]


def test_a_description_and_its_program() -> None:
    description = Description((Instruction("plus", "b"), Instruction("times", "c"), Instruction("max", "3")))
    assert str(description) == "a plus b times c max 3:"
    assert description.program == "x=a+b;x=x*c;return max(x,3)"
    assert [description.value(1, 2, 4), description.value(1, 2, -4)] == [12, 3]
    assert Description((Instruction("minus", "9"),)).program == "return a-9"


@given(seed=st.integers(0, 2**32), a=st.integers(-9, 9), b=st.integers(-9, 9), c=st.integers(-9, 9))
def test_the_program_computes_the_value(seed: int, a: int, b: int, c: int) -> None:
    description = draw(TASK, random.Random(seed))
    assert function(description.program)(a, b, c) == description.value(a, b, c)
    assert TASK.steps_min <= len(description.steps) <= TASK.steps_max


def test_each_step_is_misread_as_often_as_it_should() -> None:
    task = ProgramsTask(kind="programs", steps_min=4, steps_max=4, mistake_rate=0.25)
    chance = random.Random(7)
    shown = [(drawn := draw(task, chance), demonstration(task, drawn, chance)) for _ in range(2000)]
    faultless = sum(description.program == program for description, program in shown)
    assert faultless / 2000 == pytest.approx(0.75**4, abs=0.04)


def test_a_correct_program_passes_the_tests_of_its_question() -> None:
    for question in TASK.model_copy(update={"mistake_rate": 0.0}).questions(1).training[:50]:
        description = Description(
            tuple(Instruction(*pair.split()) for pair in zip_pairs(question.text.removesuffix(":").split()[1:]))
        )
        tests = json.loads(question.answer)
        assert (tests["preamble"], tests["entry_point"], len(tests["tests"])) == ("def f(a,b,c):", "f", 6)
        right = function(description.program)
        assert all(right(*test["args"]) == test["expected"] for test in tests["tests"])


def zip_pairs(words: list[str]) -> list[str]:
    return [f"{word} {operand}" for word, operand in zip(words[::2], words[1::2], strict=True)]


def test_a_range_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match="steps_min = 5 is above steps_max = 4"):
        ProgramsTask(kind="programs", steps_min=5, steps_max=4)
