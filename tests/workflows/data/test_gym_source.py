"""Tasks of reasoning-gym as a source: equal questions for equal seeds, parameters or levels by name, held-out questions
that are never trained on, and mistakes with the nearest name."""

import sys
from typing import Any

import pytest

from stretto.core.errors import DataError
from stretto.rollout.questions import Question
from stretto.rollout.tasks import DatasetTask, GymSource

SMALL = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}


def source(task: str = "chain_sum", **settings: Any) -> GymSource:
    return GymSource.model_validate({"kind": "reasoning_gym", "task": task, "size": 20, "held_out": 5} | settings)


def texts(questions: list[Question]) -> list[str]:
    return [question.text for question in questions]


def told(task: str = "chain_sum", **settings: Any) -> str:
    with pytest.raises(DataError) as caught:
        source(task, **settings).questions(seed=1)
    return str(caught.value)


def test_equal_seeds_give_equal_questions_and_all_seeds_the_same_held_out_ones() -> None:
    (one, held, _), (same, _, _), (other, kept, _) = (source().questions(seed) for seed in (1, 1, 2))
    assert one == same
    assert texts(one) != texts(other)
    assert texts(held) == texts(kept)
    assert [one[0].id, held[0].id] == ["chain_sum:0", "chain_sum:h0"]


def test_no_held_out_question_is_trained_on_and_what_was_left_out_is_told() -> None:
    training, held_out, notes = source(size=400, held_out=50, parameters=SMALL).questions(seed=1)
    assert not set(texts(training)) & set(texts(held_out))
    left_out = 400 - len(training)
    assert left_out > 0
    assert notes == [f"chain_sum: {left_out:,} of 400 questions are also held out, and left out of the training"]


def test_a_level_of_the_curriculum_sets_the_parameters_and_the_recipes_own_stand_above_it() -> None:
    easy, hard = (source(level=level).questions(seed=1)[0][0] for level in (0, 4))
    assert '"max_terms": 2' in easy.answer
    assert '"max_terms": 6' in hard.answer
    assert '"max_terms": 3' in source(level=4, parameters={"min_terms": 3, "max_terms": 3}).questions(1)[0][0].answer


def test_the_instruction_is_a_message_of_a_chat_or_stands_before_the_question() -> None:
    chat, plain = (source(chat_template=kind).questions(seed=1)[0][0] for kind in ("auto", "none"))
    assert [message["role"] for message in chat.as_chat] == ["system", "user"]
    assert plain.text.startswith("Write the final answer between <answer> and </answer>.\n")
    assert chat.text.startswith("State the final answer") or chat.text.startswith("The following")


def test_mistakes_are_named_with_the_nearest_name() -> None:
    assert told("chain_summ") == "reasoning-gym: chain_summ: there is no such task; did you mean 'chain_sum'?"
    assert told("composite") == "reasoning-gym: composite: is made of other tasks; give each of them as a source"
    assert told(parameters={"min_term": 2, "seed": 3}).splitlines() == [
        "reasoning-gym: chain_sum: parameters.min_term: unknown parameter; did you mean 'min_terms'?",
        "reasoning-gym: chain_sum: parameters.seed: unknown parameter; did you mean 'seed'?",
    ]
    assert told(level=99) == "reasoning-gym: chain_sum: level: 99; levels go from 0 to 10"
    assert "cannot be made with {'min_terms': -1}: AssertionError" in told(parameters={"min_terms": -1})
    assert told(held_out=200, parameters=SMALL | {"min_digits": 1}, size=1).startswith(
        "reasoning-gym: chain_sum: each of"
    )


def test_without_the_package_the_message_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "reasoning_gym.factory", None)
    assert told().endswith("pip install 'stretto[reasoning]'")


def test_rows_and_tasks_are_sources_of_one_task(tmp_path: Any) -> None:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1+1=", "answer": 2}\n')
    mixed = [
        {"data": str(tmp_path / "rows.jsonl"), "weight": 1.0},
        {"kind": "reasoning_gym", "task": "chain_sum", "size": 3, "held_out": 2, "weight": 1.0},
    ]
    found = DatasetTask.model_validate({"kind": "dataset", "sources": mixed}).questions(seed=1)
    assert [question.source for question in found.training] == ["rows", "chain_sum", "chain_sum", "chain_sum"]
    assert found.weights == {"rows": 1.0, "chain_sum": 1.0}
