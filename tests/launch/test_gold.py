"""Gold answers are read before a run.

Promises: questions whose gold answer the reward cannot read are left out, with count, lines and reasons; if none is
left, nothing starts; one that takes too long is an error, and never left out on one machine and kept on another; a
reward without a reader of gold answers leaves out nothing.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from stretto.core.errors import DataError
from stretto.launch.preflight.plan import make_plan
from stretto.launch.preflight.questions import sift
from stretto.launch.recipe.recipe import validate
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


@pytest.mark.usefixtures("untried")
def test_those_of_a_further_set_are_told_with_its_name(policy: Path, tmp_path: Path) -> None:
    files = {"rows": ("3", "4"), "more": ("5", "none")}
    for name, golds in files.items():
        rows = [json.dumps({"prompt": f"{at}+1=", "answer": gold}) for at, gold in enumerate(golds)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(rows))
    more = tmp_path / "more.jsonl"
    tree: dict[str, Any] = {
        "model": {"path": str(policy)},
        "task": {"kind": "jsonl", "file": str(tmp_path / "rows.jsonl"), "held_out": 1},
        "trainer": {},
        "sampling": {"max_tokens": 4},
        "rewards": {"function": "last_number"},
        "evaluation": {"sets": [{"name": "more", "source": {"data": str(more)}}]},
    }
    plan = make_plan(validate(tree, "recipe.toml"))
    assert [prompt.text for _, prompts in plan.sets for prompt in prompts] == ["0+1="]
    count, first = [note for note in plan.notes if note.startswith("evaluation set more: ")]
    assert count.startswith("evaluation set more: 1 questions are left out")
    assert f"{more}:2" in first


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
