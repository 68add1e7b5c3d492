"""Held-out accuracy: one answer per prompt with a seed of its own, whatever happens to the engines."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

import pytest

from stretto.core.errors import DeadlineExceeded, EngineLost
from stretto.core.records import Completion, GenerateRequest, Outcome, Prompt, Sampling, Segment, StopReason, Verdict
from stretto.loop.evaluation import Evaluator
from stretto.loop.records.evaluation import Evaluation, QuestionResult, interval
from stretto.store.series.samples import SampledCompletion

PROMPTS = [Prompt(id=f"h{i}", token_ids=(i,), text=f"{i}?", answer=str(i)) for i in range(4)]
VERDICTS = {
    "0": Verdict(outcome=Outcome.RIGHT, reward=1.0),
    "1": Verdict(outcome=Outcome.WRONG, reward=0.0),
    "2": Verdict(outcome=Outcome.UNDECIDED, reward=None, reason="timeout"),
    "3": Verdict(outcome=Outcome.RIGHT, reward=1.0),
}


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
            yield Completion(
                request.id,
                0,
                Segment.of(
                    token_ids=(1, 2, 3),
                    behavior_logprobs=(0.0, 0.0, 0.0),
                    versions=(4, 4, 5),
                    stop_reason=StopReason.STOP,
                ),
            )


async def score(prompt: str, completions: Sequence[str], answer: str) -> Sequence[Verdict]:
    return [VERDICTS[answer]]


def test_the_completions_are_kept_with_prompt_and_verdict_under_the_evaluations_version() -> None:
    kept: list[SampledCompletion] = []
    evaluator = Evaluator(PROMPTS, Sampling(max_tokens=3), 7, Engine().generate, score, str, keep=kept.extend)
    asyncio.run(evaluator())
    assert [(s.prompt_id, s.prompt, s.answer, s.outcome.value, s.version) for s in kept] == [
        ("h0", "0?", "0", "right", 5),
        ("h1", "1?", "1", "wrong", 5),
        ("h2", "2?", "2", "undecided", 5),
        ("h3", "3?", "3", "right", 5),
    ]
    assert {(s.completion, s.versions) for s in kept} == {("(1, 2, 3)", (4, 5))}


def evaluated(engine: Engine, seed: int = 7) -> Evaluation:
    evaluator = Evaluator(PROMPTS, Sampling(max_tokens=3), seed, engine.generate, score, str)
    return asyncio.run(evaluator())


def test_right_answers_are_counted_and_undecided_ones_apart() -> None:
    evaluation = evaluated(Engine())
    assert evaluation == Evaluation(
        version=5,
        prompts=4,
        right=2,
        undecided=1,
        tokens=12,
        length_max=3,
        pass_at={1: 0.5},
        ci95=interval([1, 0, 0, 1]),
    )
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


def test_the_first_portion_that_fails_ends_the_others() -> None:
    generating: list[str] = []

    async def generate(*requests: GenerateRequest) -> AsyncIterator[Completion]:
        generating.append(requests[0].id)
        try:
            await asyncio.sleep(0.01 if len(generating) == 2 else 60)
            raise DeadlineExceeded("the client of engine-0", "the next answer", 600)
            yield
        finally:
            generating.remove(requests[0].id)

    async def main() -> None:
        prompts = [Prompt(id=str(i), token_ids=(i,), text="?", answer="0") for i in range(3 * 64)]
        with pytest.raises(DeadlineExceeded, match="the next answer"):
            await Evaluator(prompts, Sampling(max_tokens=3), 7, generate, score, str)()
        assert generating == []

    asyncio.run(main())


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
                tokens = (1,) * (member + 1)
                stop = StopReason.LENGTH if member == 3 else StopReason.STOP
                yield Completion(
                    request.id,
                    member,
                    Segment.of(
                        token_ids=tokens,
                        behavior_logprobs=(0.0,) * len(tokens),
                        versions=(2,) * len(tokens),
                        stop_reason=stop,
                    ),
                )


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
    assert (found.accuracy, found.samples, found.truncated, found.length_mean, found.length_max) == (
        1 / 8,
        8,
        2,
        2.5,
        4,
    )
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
    many = Evaluator(PROMPTS, Sampling(max_tokens=3), 7, several.generate, score_lengths, str, samples=3)
    asyncio.run(many())
    assert [request.seeds[0] for request in several.asked] == [seeds[0] for seeds in one.seeds.values()]
