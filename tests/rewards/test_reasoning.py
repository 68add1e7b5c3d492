"""reasoning-gym's own scorers, guarded: what nonsense earns is subtracted or refused, an exception decides nothing, and
a question that is not the same when it is made again is not judged."""

import json
import sys
from typing import Any

import pytest

from stretto.core.errors import DataError
from stretto.core.records import Outcome
from stretto.launch.preflight.questions import sift
from stretto.rewards.config import RewardsConfig
from stretto.rewards.functions import Undecided
from stretto.rewards.service.wire import ScoreItem
from stretto.rollout.questions import Question, Questions
from stretto.rollout.tasks import GymSource
from stretto_verify import reasoning
from stretto_verify.reasoning import floor_of, gold, reasoning_gym
from tests.rewards.scoring import scored


def asked(task: str, **settings: Any) -> Question:
    source = GymSource.model_validate({"kind": "reasoning_gym", "task": task, "size": 3, "held_out": 0} | settings)
    return source.questions(seed=1)[0][0]


def own(question: Question) -> str:
    answer: str = json.loads(question.answer)["answer"]
    return answer


def score(question: Question, completion: str) -> float:
    return reasoning_gym(question.text, completion, question.answer)


def test_the_answer_of_the_question_earns_one_in_tags_or_alone_and_another_nothing() -> None:
    question = asked("chain_sum")
    assert score(question, f"Adding up ... <answer> {own(question)} </answer>") == 1.0
    assert score(question, own(question)) == 1.0
    assert score(question, f"<answer>{own(question)}</answer> no: <answer>x</answer>") == 0.0


def test_what_nonsense_earns_is_subtracted() -> None:
    assert floor_of("figlet_font", "{}") == 0.2
    question = asked("figlet_font")
    assert score(question, own(question)) == 1.0
    assert score(question, "nonsense") == 0.0
    # graded by matching letters: one of nine wrong earns (8/9 - 0.2) / 0.8 or less, and more than nothing
    almost = own(question)[:-1] + "#"
    assert 0 < score(question, almost) < 1


def test_a_task_whose_scorer_rewards_nonsense_is_refused_with_the_number() -> None:
    question = asked("game_of_life_halting")
    with pytest.raises(Undecided, match=r"gives nonsense 1, more than 0\.5"):
        score(question, own(question))
    found = Questions([question], [question])
    with pytest.raises(DataError, match="game_of_life_halting gives nonsense 1"):
        sift(RewardsConfig(function="reasoning_gym"), found)


def test_a_scorer_that_raises_decides_nothing() -> None:
    question = asked("prime_factorization")
    with pytest.raises(Undecided, match="the scorer of prime_factorization raised ValueError"):
        score(question, "nonsense")
    assert score(question, own(question)) == 1.0


def test_a_generator_that_raises_decides_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    class Task:
        def __getitem__(self, place: int) -> object:
            raise ZeroDivisionError("division by zero")

    monkeypatch.setattr(reasoning, "_made", lambda *of: Task())
    question = asked("chain_sum")
    with pytest.raises(Undecided, match="of chain_sum cannot be made: ZeroDivisionError"):
        score(question, own(question))
    with pytest.raises(Undecided, match="cannot be made: ZeroDivisionError"):
        floor_of("chain_sum", '{"min_terms": 3}')


def test_a_score_that_is_no_number_decides_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    class Task:
        def score_answer(self, text: str, entry: object) -> float:
            return float("nan")

    monkeypatch.setattr(reasoning, "_made", lambda *of: Task())
    monkeypatch.setattr(reasoning, "_entry", lambda of: {})
    monkeypatch.setattr(reasoning, "floor_of", lambda *of: 0.0)
    with pytest.raises(Undecided, match="the scorer of chain_sum gave nan"):
        score(asked("chain_sum"), "5")


def test_a_question_that_is_not_the_same_when_it_is_made_again_is_not_judged() -> None:
    question = asked("chain_sum")
    other = json.dumps(json.loads(question.answer) | {"seed": 7})
    with pytest.raises(Undecided, match="question 0 of chain_sum is not the same"):
        gold("", "", other)
    assert gold("", "", question.answer)
    for broken in ("42", "{}", '{"task": 3}'):
        with pytest.raises(Undecided, match="not from a reasoning-gym source"):
            gold("", "", broken)


def test_without_the_package_the_reason_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    question = asked("chain_sum")
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    reasoning._made.cache_clear()
    with pytest.raises(Undecided, match=r"pip install 'stretto\[reasoning\]'"):
        score(question, "5")
    reasoning._made.cache_clear()


def test_a_reward_worker_judges_by_it() -> None:
    question = asked("chain_sum")
    items = [ScoreItem(question.text, text, question.answer) for text in (own(question), "x")]
    verdicts = scored(RewardsConfig(function="reasoning_gym"), *items)
    assert [verdict.outcome for verdict in verdicts] == [Outcome.RIGHT, Outcome.WRONG]


def test_the_gold_answer_holds_all_that_makes_the_question_again() -> None:
    question = asked("chain_sum", parameters={"min_terms": 2, "max_terms": 2})
    found = json.loads(question.answer)
    assert (found["task"], found["size"], found["place"]) == ("chain_sum", 3, 0)
    assert found["parameters"] == {"min_terms": 2, "max_terms": 2}
