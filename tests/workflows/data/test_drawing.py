"""Questions of a task that is made on the spot.

- They are equal for equal seeds; those held out are the same for every seed, and are never trained on.
- As many as there are can be held out; one more is refused, with their number and the setting that makes more.
"""

import pytest

from stretto.core.errors import DataError
from stretto.rollout.arithmetic import ArithmeticTask
from stretto.rollout.questions import is_held_out
from stretto.rollout.tasks import ProgramsTask
from stretto_workflows.data.programs import Description, Instruction

WORDS, OPERANDS = ("plus", "minus", "times", "max", "min"), ("a", "b", "c", *"123456789")


def sums() -> set[str]:
    """All chains of two operands: a digit, and one that is added or taken away so that a digit is left."""
    added = {f"{one}+{other}" for one in range(10) for other in range(10 - one)}
    return added | {f"{one}-{other}" for one in range(10) for other in range(one + 1)}


def programs() -> set[str]:
    """All descriptions of one step."""
    return {str(Description((Instruction(word, operand),))) for word in WORDS for operand in OPERANDS}


TASKS = (
    ArithmeticTask(kind="arithmetic", prompts=300, held_out=50, demonstrations=300),
    ProgramsTask(kind="programs", prompts=300, held_out=50, demonstrations=300),
)


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.kind)
def test_held_out_questions_are_the_same_for_each_seed_never_trained_on(task: ArithmeticTask | ProgramsTask) -> None:
    one, two = task.questions(1), task.questions(2)
    assert one.held_out == two.held_out
    assert one.training != two.training
    held_out = {question.text for question in one.held_out}
    assert len(held_out) == 50
    for questions in (one, two):
        assert not held_out & {question.text for question in (*questions.training, *questions.demonstrations)}
    assert task.questions(1) == one
    assert task.questions(1).demonstrations == one.demonstrations


def test_the_chains_and_programs_are_as_many_as_they_should() -> None:
    assert len(sums()) == 55 + 55
    assert len(programs()) == 5 * 12


def test_all_that_may_be_held_out_can_be_and_no_more() -> None:
    there = {f"{text}=" for text in sums() if is_held_out(text)}
    task = ArithmeticTask(kind="arithmetic", operands_min=2, operands_max=2, prompts=300, held_out=len(there))
    questions = task.questions(1)
    assert {question.text for question in questions.held_out} == there
    assert {question.text for question in questions.training} <= {f"{text}=" for text in sums()} - there
    refused = rf"task\.held_out: {len(there) + 1}, and {len(there)} distinct .* at most {len(there)}, or .* task\.oper"
    with pytest.raises(DataError, match=refused):
        task.model_copy(update={"held_out": len(there) + 1}).questions(1)


def test_programs_are_refused_likewise() -> None:
    there = {text for text in programs() if is_held_out(text)}
    task = ProgramsTask(kind="programs", steps_min=1, steps_max=1, prompts=5, held_out=len(there))
    assert {question.text for question in task.questions(1).held_out} == there
    with pytest.raises(DataError, match=rf"at most {len(there)}, or a larger task\.steps_max"):
        task.model_copy(update={"held_out": 512}).questions(1)
