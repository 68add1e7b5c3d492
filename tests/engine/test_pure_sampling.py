"""Promises: an answer is a function of weights, prompt, seed and sampling, with filters and stop texts as without:

- the same alone, in a full batch, in few slots, before or after others, with or without siblings;
- the same after any number of interruptions by equal weights, with the cache computed again;
- log-probabilities are those of the distribution that was drawn from;
- the edges: a budget used up, a stop text across an interruption.
"""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace
from transformers import PreTrainedModel

from stretto.core.errors import RefusedRequest
from stretto.core.records import Completion, GenerateRequest, StopReason
from stretto.engine.config import EngineConfig
from stretto.engine.native.engine import NativeEngine
from stretto.model.decode.policy import CACHED_ATTENTION
from stretto.model.hf.folder import load_policy
from stretto.model.hf.tokenizer import load_tokenizer
from tests.engine import answering
from tests.engine.answering import drain, engine_of, finish
from tests.model.test_truncation import plain as plainly
from tests.tolerances import EXACT

Ended = dict[tuple[str, int], Completion]
SETTINGS: list[dict[str, object]] = [
    {},
    {"temperature": 0.7, "top_p": 0.9},
    {"temperature": 1.3, "top_k": 5},
    {"min_p": 0.2},
    {"temperature": 0.9, "top_k": 8, "top_p": 0.8, "min_p": 0.05},
    {"temperature": 0.0, "top_k": 3},
    {"stop": ("7", "12", "=(")},
    {"temperature": 1.5, "top_p": 0.95, "stop": ("3+",)},
]


def request(name: str, prompt: int, seeds: Sequence[int], **sampling: object) -> GenerateRequest:
    return answering.request(name, prompt=prompt, seeds=seeds, **{"max_tokens": 24} | sampling)


REQUESTS = [request(f"r{i}", 3 + 2 * i, range(10 * i, 10 * i + 3), **SETTINGS[i % len(SETTINGS)]) for i in range(16)]


def answers(ended: Ended) -> dict[tuple[str, int], tuple[tuple[int, ...], StopReason]]:
    return {key: (completion.token_ids, completion.stop_reason) for key, completion in ended.items()}


@pytest.fixture(scope="module")
def together(folder: Path) -> Ended:
    """All answers, from one full batch."""
    return finish(engine_of(folder, slots=64), *REQUESTS)


def test_one_after_the_other_on_one_engine_and_in_the_other_order(folder: Path, together: Ended) -> None:
    engine = engine_of(folder, slots=8)
    backwards: Ended = {}
    for wanted in reversed(REQUESTS):
        backwards |= finish(engine, wanted)
    assert answers(backwards) == answers(together)


def test_in_few_slots_and_with_little_prefill(folder: Path, together: Ended) -> None:
    assert answers(finish(engine_of(folder, slots=5, max_prefill_tokens=8), *REQUESTS)) == answers(together)


def test_without_siblings(folder: Path, together: Ended) -> None:
    engine = engine_of(folder, slots=64)
    for wanted in REQUESTS:
        for member, seed in enumerate(wanted.seeds):
            engine.add(replace(wanted, id=f"{wanted.id}.{member}", seeds=(seed,)))
    expected = {(f"{name}.{member}", 0): answer for (name, member), answer in answers(together).items()}
    assert answers(drain(engine)) == expected


@pytest.mark.parametrize("on_update", ["recompute", "keep"])
def test_after_updates_by_equal_weights(folder: Path, plain: PreTrainedModel, together: Ended, on_update: str) -> None:
    engine = engine_of(folder, slots=16, on_update=on_update)
    for wanted in REQUESTS:
        engine.add(wanted)
    ended: Ended = {}
    for version in range(1, 12):
        for _ in range(1 + version % 3):
            ended |= {(c.request, c.member): c for c in engine.step()}
        engine.update(version, dict(plain.named_parameters()))
    ended |= drain(engine)
    assert answers(ended) == answers(together)
    assert max(completion.interrupted for completion in ended.values()) > 3


def test_logprobs_are_those_of_the_distribution_that_was_drawn_from(plain: PreTrainedModel, together: Ended) -> None:
    for wanted in REQUESTS:
        for member in range(3):
            completion, sampling = together[wanted.id, member], wanted.sampling
            ids = torch.tensor([[*wanted.prompt_token_ids, *completion.token_ids]])
            with torch.no_grad():
                lines = plain(ids).logits[0, len(wanted.prompt_token_ids) - 1 : -1]
            for line, token, logprob in zip(lines, completion.token_ids, completion.behavior_logprobs, strict=True):
                if sampling.temperature == 0:
                    expected = line.log_softmax(-1)[token]
                else:
                    scaled = (line / sampling.temperature).numpy()
                    kept = sorted(plainly(scaled, sampling.top_k, sampling.top_p, sampling.min_p))
                    assert token in kept
                    expected = (line[kept] / sampling.temperature).log_softmax(-1)[kept.index(token)]
                assert abs(logprob - float(expected)) < EXACT


def test_top_k_of_one_is_the_greedy_answer(engine: NativeEngine) -> None:
    greedy, filtered = request("g", 9, (1,), temperature=0.0), request("k", 9, (5,), temperature=2.0, top_k=1)
    ended = finish(engine, greedy, filtered)
    assert ended["g", 0].token_ids == ended["k", 0].token_ids
    assert set(ended["k", 0].behavior_logprobs) == {0.0}


def test_a_stop_text_ends_the_answer_with_the_token_that_completes_it(folder: Path, engine: NativeEngine) -> None:
    tokenizer, free = load_tokenizer(folder), request("a", 9, range(6), stop_token_ids=(), max_tokens=40)
    unstopped = finish(engine, free)
    for length in (1, 2, 3):
        for member in range(6):
            whole = unstopped["a", member].token_ids
            text = tokenizer.decode(whole)
            stop = text[9 : 9 + length]
            wanted = request("b", 9, (member,), stop_token_ids=(), max_tokens=40, stop=("never", stop))
            ended = finish(engine, wanted)["b", 0]
            assert ended.token_ids == whole[: len(ended.token_ids)]
            assert ended.stop_reason is StopReason.STOP
            assert tokenizer.decode(ended.token_ids) == text[: text.index(stop) + length]


@pytest.mark.parametrize("on_update", ["recompute", "keep"])
def test_a_stop_text_is_found_across_an_interruption(
    folder: Path, engine: NativeEngine, plain: PreTrainedModel, on_update: str
) -> None:
    whole = finish(engine, request("a", 9, (3,), stop_token_ids=()))["a", 0].token_ids
    wanted = request("a", 9, (3,), stop_token_ids=(), stop=(load_tokenizer(folder).decode(whole)[3:7],))
    undisturbed = finish(engine, wanted)["a", 0]
    engine = engine_of(folder, on_update=on_update)
    for steps in range(1, len(undisturbed.token_ids)):
        engine.add(wanted)
        for _ in range(steps):
            engine.step()
        engine.update(steps, dict(plain.named_parameters()))
        ended = drain(engine)["a", 0]
        assert (ended.token_ids, ended.stop_reason) == (undisturbed.token_ids, StopReason.STOP)
        assert ended.versions == (steps - 1,) * steps + (steps,) * (len(ended.token_ids) - steps)


def test_a_stop_text_at_the_end_of_the_budget_is_a_stop(folder: Path, engine: NativeEngine) -> None:
    text = load_tokenizer(folder).decode(finish(engine, request("a", 9, (3,), max_tokens=4))["a", 0].token_ids)
    assert len(text) == 4
    ended = finish(engine, request("a", 9, (3,), max_tokens=4, stop=(text,)))["a", 0]
    assert (len(ended.token_ids), ended.stop_reason) == (4, StopReason.STOP)


def test_a_row_forgets_the_stop_texts_and_filters_of_the_answer_before(folder: Path, engine: NativeEngine) -> None:
    free = request("b", 9, (3,), stop_token_ids=())
    alone = answers(finish(engine, free))
    engine = engine_of(folder, slots=1)
    every = tuple("0123456789+-*/=;#?()")
    finish(engine, request("a", 9, (3,), stop_token_ids=(), stop=every, top_k=1))
    assert answers(finish(engine, free)) == alone
    engine.add(request("c", 9, (3,), stop_token_ids=(), stop=every))
    engine.abort("c")
    assert answers(finish(engine, free)) == alone


@pytest.mark.parametrize("on_update", ["recompute", "keep"])
def test_a_budget_whose_last_token_comes_after_an_interruption_ends_with_length(
    folder: Path, plain: PreTrainedModel, on_update: str
) -> None:
    engine = engine_of(folder, on_update=on_update)
    engine.add(request("a", 9, (1, 2), stop_token_ids=(), max_tokens=5))
    for _ in range(4):
        assert engine.step() == []
    for version in (1, 2):
        engine.update(version, dict(plain.named_parameters()))
    for completion in drain(engine).values():
        assert completion.versions == (0, 0, 0, 0, 2)
        assert completion.stop_reason is StopReason.LENGTH
        assert completion.interrupted >= 1


def test_an_engine_without_a_tokenizer_refuses_stop_texts_alone(folder: Path) -> None:
    engine = NativeEngine(load_policy(folder, attention=CACHED_ATTENTION), EngineConfig(slots=2))
    with pytest.raises(RefusedRequest, match=r"sampling.stop: .*no tokenizer"):
        engine.add(request("a", 9, (1,), stop=("7",)))
    assert engine.idle
    assert len(finish(engine, request("b", 9, (1,)))) == 1
