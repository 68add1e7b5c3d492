"""Gold answers are read before a run.

Promises: questions whose gold answer the reward cannot read are left out, with count, lines and reasons; if none is
left, nothing starts; one that takes too long is an error, and never left out on one machine and kept on another; a
reward without a reader of gold answers leaves out nothing.
"""

import pytest

from stretto.core.errors import DataError
from stretto.launch.preflight.questions import sift
from stretto.rewards.config import RewardsConfig
from stretto.rollout.questions import Question, Questions

MATH = RewardsConfig(function="math")


def questions(*golds: str) -> list[Question]:
    return [Question(id=str(at), text="?", answer=gold, place=f"rows.jsonl:{at}") for at, gold in enumerate(golds, 1)]


def test_questions_whose_gold_answer_cannot_be_read_are_left_out_and_told() -> None:
    training = questions("42", r"\frac{1}{", "$(1, 2]$", "$9^{9^{9^{9}}}$", "no solution")
    sifted = sift(MATH, Questions(training, questions("7")))
    assert [question.id for question in sifted.questions.training] == ["1", "3", "5"]
    assert [problem.place for problem in sifted.unreadable] == ["rows.jsonl:2", "rows.jsonl:4"]
    count, first, second = sifted.warnings
    assert count.startswith("2 questions are left out")
    assert first.startswith("rows.jsonl:2: ")
    assert "too large" in second or "tower" in second


def test_however_many_gold_answers_there_are_the_patience_of_a_run_is_not_their_deadline() -> None:
    training = questions(*map(str, range(150)), r"\frac{1}{")  # three portions of one worker, or one of two
    sifted = sift(MATH.model_copy(update={"patience": 1e-6}), Questions(training, questions("7")))
    assert [problem.place for problem in sifted.unreadable] == ["rows.jsonl:151"]


def test_a_run_without_a_readable_gold_answer_is_refused() -> None:
    with pytest.raises(DataError, match="no gold answer of the questions for training can be read"):
        sift(MATH, Questions(questions(r"\frac{1}{", "{{"), questions("7")))
    with pytest.raises(DataError, match="no gold answer that is held out can be read"):
        sift(MATH, Questions(questions("7"), questions(r"\frac{1}{")))


def test_other_rewards_leave_out_nothing() -> None:
    asked = Questions(questions(r"\frac{1}{"), questions("7"))
    assert sift(RewardsConfig(function="final_answer"), asked).questions is asked


def test_a_gold_answer_that_takes_too_long_is_an_error_that_names_its_row() -> None:
    slow = r"$\int_0^{1} e^{e^{e^{x}}} dx$"
    with pytest.raises(DataError, match=r"rows.jsonl:2: reading it: timeout after 0\.02 s; shorten or remove"):
        sift(MATH, Questions([*questions("42", slow)][1:], questions("7")), reading_seconds=0.02)
