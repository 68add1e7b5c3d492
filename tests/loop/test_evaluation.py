"""Held-out accuracy: one answer per prompt with a seed of its own, whatever happens to the engines; avg@n, pass@k,
maj@n and their interval, against numbers worked by hand and by counting all draws.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.core.errors import DeadlineExceeded, EngineLost
from stretto.core.records import Completion, GenerateRequest, Outcome, Prompt, Sampling, StopReason, Verdict
from stretto.loop.evaluation import Evaluator
from stretto.loop.records.evaluation import Evaluation, QuestionResult, interval, majority, pass_at, sizes
from stretto.store.series.metrics import SampledCompletion
from tests.store.make import RIGHT, WRONG, completion, prompts, spelled

PROMPTS = [msgspec.structs.replace(prompt, id=f"h{prompt.id}") for prompt in prompts(4)]
VERDICTS = {"0": RIGHT, "1": WRONG, "2": Verdict(outcome=Outcome.UNDECIDED, reward=None, reason="timeout"), "3": RIGHT}


@dataclass
class Engine:
    """Is lost `losses` times, then answers with three tokens."""

    losses: int = 0
    seeds: dict[str, tuple[int, ...]] = field(default_factory=dict)

    async def generate(self, *requests: GenerateRequest) -> AsyncIterator[Completion]:
        await asyncio.sleep(0)
        if self.losses:
            self.losses -= 1
            raise EngineLost("engine-0", "broke off")
        for request in requests:
            self.seeds[request.id] = request.seeds
            yield completion(request.id, versions=(4, 4, 5))


async def score(prompt: str, completions: Sequence[str], answer: str) -> Sequence[Verdict]:
    return [VERDICTS[answer]]


def test_the_completions_are_kept_with_prompt_and_verdict_under_the_evaluations_version() -> None:
    kept: list[SampledCompletion] = []
    evaluator = Evaluator(PROMPTS, Sampling(max_tokens=3), 7, Engine().generate, score, spelled, keep=kept.extend)
    asyncio.run(evaluator())
    assert [(s.prompt_id, s.prompt, s.answer, s.outcome.value, s.version) for s in kept] == [
        ("h0", "0?", "0", "right", 5),
        ("h1", "1?", "1", "wrong", 5),
        ("h2", "2?", "2", "undecided", 5),
        ("h3", "3?", "3", "right", 5),
    ]
    assert {(s.completion, s.versions) for s in kept} == {("(4, 5, 6)", (4, 5))}


def evaluated(engine: Engine, seed: int = 7) -> Evaluation:
    evaluator = Evaluator(PROMPTS, Sampling(max_tokens=3), seed, engine.generate, score, spelled)
    return asyncio.run(evaluator())


def test_right_answers_are_counted_and_undecided_ones_apart() -> None:
    evaluation = evaluated(Engine())
    numbers: dict[str, Any] = {"version": 5, "prompts": 4, "right": 2, "undecided": 1, "tokens": 12, "length_max": 3}
    assert evaluation == Evaluation(**numbers, pass_at={1: 0.5}, ci95=interval([1, 0, 0, 1]))
    assert evaluation.accuracy == 0.5
    assert str(evaluation) == "accuracy 0.5000: 2 of 4 right, 1 undecided"
    assert json.loads(evaluation.as_json())["accuracy"] == 0.5


def test_each_prompt_has_a_seed_of_its_own_that_never_changes() -> None:
    one, two, other = Engine(), Engine(), Engine()
    evaluated(one), evaluated(two), evaluated(other, seed=8)
    assert one.seeds == two.seeds
    assert len(set(one.seeds.values())) == 4
    assert not set(one.seeds.values()) & set(other.seeds.values())


def test_a_lost_engine_is_asked_again() -> None:
    assert evaluated(Engine(losses=3)).right == 2


async def test_the_first_portion_that_fails_ends_the_others() -> None:
    generating: list[str] = []

    async def generate(*requests: GenerateRequest) -> AsyncIterator[Completion]:
        generating.append(requests[0].id)
        try:
            await asyncio.sleep(0.01 if len(generating) == 2 else 60)
            raise DeadlineExceeded("the client of engine-0", "the next answer", 600)
            yield
        finally:
            generating.remove(requests[0].id)

    prompts = [Prompt(id=str(i), token_ids=(i,), text="?", answer="0") for i in range(3 * 64)]
    with pytest.raises(DeadlineExceeded, match="the next answer"):
        await Evaluator(prompts, Sampling(max_tokens=3), 7, generate, score, spelled)()
    assert generating == []


def test_an_engine_that_is_lost_again_and_again_ends_the_evaluation() -> None:
    with pytest.raises(EngineLost, match="engine-0 broke off"):
        evaluated(Engine(losses=1000))


@dataclass
class Drawing:
    """Answers each seed with a text of its own; every fourth is cut off."""

    asked: list[GenerateRequest] = field(default_factory=list)

    async def generate(self, *requests: GenerateRequest) -> AsyncIterator[Completion]:
        await asyncio.sleep(0)
        self.asked += requests
        for request in requests:
            for member in reversed(range(len(request.seeds))):  # in any order
                stop = StopReason.LENGTH if member == 3 else StopReason.STOP
                yield completion(request.id, member, (2,) * (member + 1), stop=stop)


async def score_lengths(prompt: str, completions: Sequence[str], answer: str) -> Sequence[Verdict]:
    """A completion is right if it is as long as the gold answer says."""
    return [VERDICTS["0"] if text == answer else VERDICTS["1"] for text in completions]


def test_several_completions_of_each_question_give_avg_pass_at_and_majority() -> None:
    prompts = [Prompt(id=str(i), token_ids=(i,), text="?", answer=answer) for i, answer in enumerate("19")]
    engine, results = Drawing(), list[QuestionResult]()
    evaluator = Evaluator(
        prompts,
        Sampling(max_tokens=4),
        7,
        engine.generate,
        score_lengths,
        lambda ids: str(len(ids)),
        samples=4,
        final_answer=lambda prompt, text: text,
        rows=results.extend,
    )
    found = asyncio.run(evaluator())
    # Question 0: the first of four is right, its majority is split between 1, 2, 3, 4. Question 1: none is right.
    assert [result.right for result in results] == [1, 0]
    assert (found.accuracy, found.samples, found.truncated) == (1 / 8, 8, 2)
    assert (found.length_mean, found.length_max) == (2.5, 4)
    assert found.pass_at == {1: 1 / 8, 2: 1 / 4, 4: 1 / 2}
    assert found.maj == 1 / 8  # (1/4 + 0) / 2
    assert results[0].completions == ("1", "2", "3", "4")
    assert len(set(engine.asked[0].seeds)) == 4
    shown = json.loads(found.as_json())
    assert (shown["avg"], shown["questions"], shown["samples"], shown["pass_at"]["2"]) == (1 / 8, 2, 8, 1 / 4)
    assert shown["ci95"] == list(interval([1 / 4, 0]))
    assert shown["intervals"]["pass@2"] == list(interval([1 / 2, 0]))
    assert shown["intervals"]["maj@4"] == list(interval([1 / 4, 0]))
    low, high = interval([1, 0])
    assert f"pass@4  0.5000 (95% interval {low:.4f} to {high:.4f})" in found.table()


def test_the_first_completion_of_a_prompt_is_the_one_of_an_evaluation_with_a_single_one() -> None:
    one, several = Engine(), Drawing()
    evaluated(one)
    many = Evaluator(PROMPTS, Sampling(max_tokens=3), 7, several.generate, score_lengths, spelled, samples=3)
    asyncio.run(many())
    assert [request.seeds[0] for request in several.asked] == [seeds[0] for seeds in one.seeds.values()]


R, W, U = Outcome


@given(st.integers(1, 8).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n), st.integers(1, n))))
def test_pass_at_k_is_the_share_of_draws_with_a_right_one(drawn: tuple[int, int, int]) -> None:
    samples, right, k = drawn
    draws = list(combinations(range(samples), k))
    with_right = sum(any(one < right for one in draw) for draw in draws)
    assert pass_at(k, right, samples) == pytest.approx(with_right / len(draws), abs=1e-12)


def test_pass_at_more_than_there_are_is_refused() -> None:
    with pytest.raises(ValueError, match="pass@5 needs 5 completions or more of each question, there are 4"):
        pass_at(5, 1, 4)


def test_the_k_that_are_shown_are_powers_of_two_and_all() -> None:
    assert [sizes(n) for n in (1, 2, 3, 8, 32)] == [[1], [1, 2], [1, 2, 3], [1, 2, 4, 8], [1, 2, 4, 8, 16, 32]]


@pytest.mark.parametrize(
    ("outcomes", "finals", "expected"),
    [
        ([R, R, W], ["0.5", "1/2", "3"], 1.0),  # two spellings of the gold answer are one answer
        ([R, W, W], ["1", "3", "3"], 0.0),
        ([R, W, W], ["1", "3", "4"], 1 / 3),  # three answers, once each
        ([R, W], ["1", None], 1.0),  # no answer has no vote
        ([R, U, U], ["1", "3", "3"], 1.0),
        ([W, W], [None, None], 0.0),
        ([U], [None], 0.0),
        ([R, R, W, W, W, W], ["1", "1", "3", "3", "4", "4"], 1 / 3),
    ],
)
def test_majority_by_hand(outcomes: list[Outcome], finals: list[str | None], expected: float) -> None:
    assert majority(outcomes, finals) == pytest.approx(expected)


def test_the_interval_of_single_completions_is_wilsons() -> None:
    # Wilson for 8 of 10, z = 1.96: (0.8 + 0.19208 +- 1.96 * sqrt(0.016 + 0.0096040)) / 1.38416 = 0.4902, 0.9433
    assert interval([1.0] * 8 + [0.0] * 2) == pytest.approx((0.4902, 0.9433), abs=5e-5)
    # 0 of 4: z^2 / (4 + z^2) = 3.8415 / 7.8415; of 997: 3.8415 / 1000.8415. Where none or all are right it ends there.
    (_, most), (least, _) = interval([0.0] * 4), interval([1.0] * 997)
    assert most == pytest.approx(0.48989, abs=5e-5)
    assert least == pytest.approx(1 - 0.0038383, abs=5e-7)
    for questions in (1, 3, 16, 100, 997):  # exactly, whatever is rounded
        assert (interval([0.0] * questions)[0], interval([1.0] * questions)[1]) == (0.0, 1.0)
    assert interval([]) == (0.0, 1.0)


def test_completions_that_differ_within_questions_narrow_the_interval_and_equal_ones_do_not() -> None:
    low, high = interval([0.5] * 10)  # each question half right: nothing but the number of questions is known to vary
    assert (low, high) == pytest.approx(interval([1.0] * 5 + [0.0] * 5))
    mixed_low, mixed_high = interval([0.4, 0.6] * 5)  # variance 0.01 in place of 0.25: 25 times as many questions
    assert mixed_high - mixed_low < (high - low) / 3
    assert interval([1.0, 1.0, 0.0, 0.0]) == pytest.approx(interval([0.0, 1.0, 0.0, 1.0]))


@given(st.lists(st.sampled_from([0.0, 0.25, 0.5, 0.75, 1.0]), min_size=1, max_size=50))
def test_the_interval_holds_the_mean_and_stays_within_0_and_1(shares: list[float]) -> None:
    low, high = interval(shares)
    assert 0.0 <= low <= sum(shares) / len(shares) + 1e-12
    assert sum(shares) / len(shares) - 1e-12 <= high <= 1.0
