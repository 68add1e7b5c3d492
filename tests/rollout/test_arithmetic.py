"""Chains of arithmetic.

- The answer is what Python computes; each running value is a digit; a demonstration without mistakes ends with it.
- Answers have a long tail: the longest is at least eight times the median.
"""

import random
from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.rollout.arithmetic import ArithmeticTask, Chain

TASK = ArithmeticTask(kind="arithmetic", prompts=300, held_out=50, demonstrations=300)


def chain_of(seed: int, task: ArithmeticTask = TASK) -> Chain:
    return task.draw(random.Random(seed))


def test_a_chain_is_worked_out_step_by_step() -> None:
    chain = Chain((3, 4, 5, 7), "+-+")
    faultless = TASK.model_copy(update={"mistake_rate": 0.0})
    assert str(chain) == "3+4-5+7"
    assert chain.value == 9
    assert faultless.demonstration(chain, random.Random(1)) == "7-5+7=2+7=9"


@given(seed=st.integers(0, 2**32))
def test_the_value_is_pythons_and_every_running_value_is_a_digit(seed: int) -> None:
    chain = chain_of(seed)
    text = str(chain)
    assert chain.value == eval(text)
    lengths = [n for n in range(1, len(text) + 1) if n == len(text) or text[n] in "+-"]
    assert all(0 <= eval(text[:n]) <= 9 for n in lengths)
    assert TASK.operands_min <= len(chain.operands) <= TASK.operands_max


@given(seed=st.integers(0, 2**32), rate=st.sampled_from([0.0, 0.3, 0.9]))
def test_every_step_of_a_demonstration_is_a_chain_of_digits(seed: int, rate: float) -> None:
    chain = chain_of(seed)
    steps = TASK.model_copy(update={"mistake_rate": rate}).demonstration(chain, random.Random(seed)).split("=")
    assert len(steps) == len(chain.operands) - 1
    assert all(0 <= eval(step) <= 9 for step in steps)
    assert rate or int(steps[-1]) == chain.value


def test_mistakes_happen_as_often_as_they_should() -> None:
    task = ArithmeticTask(kind="arithmetic", operands_min=2, operands_max=8, mistake_rate=0.25)
    chance = random.Random(7)
    chains = [task.draw(chance) for _ in range(4000)]
    wrong = sum(int(task.demonstration(chain, chance).rpartition("=")[2]) != chain.value for chain in chains)
    assert wrong / 4000 == pytest.approx(0.25, abs=0.03)


def test_demonstrations_may_have_a_flatter_tail_than_the_questions() -> None:
    flatter = TASK.model_copy(update={"demonstration_decay": 1.0, "prompts": 2000, "demonstrations": 2000})
    questions = flatter.questions(1)
    asked, shown = ([len(one.text) for one in some] for some in (questions.training, questions.demonstrations))
    assert sum(shown) / len(shown) > 1.3 * sum(asked) / len(asked)
    assert max(asked) <= max(shown)


def test_answers_have_a_long_tail() -> None:
    faultless = TASK.model_copy(update={"mistake_rate": 0.0, "demonstrations": 3000})
    lengths = [len(question.demonstration or "") for question in faultless.questions(1).demonstrations]
    assert max(lengths) >= 8 * median(lengths)


def test_a_range_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match="operands_min = 5 is above operands_max = 4"):
        ArithmeticTask(kind="arithmetic", operands_min=5, operands_max=4)
