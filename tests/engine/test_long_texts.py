"""A text is scored in pieces of bounded size, and the streams of the engine go on between two pieces.

- In pieces of any size a text of any length has the log-probabilities that it has as a whole, for every family:
  windows, soft caps, shared heads, experts.
- No forward pass of a scored text, or of tokens that are computed again, has more logits than a trainer's chunk, nor
  more tokens than `engine.max_prefill_tokens`.
- A step is taken after each piece. If a version is loaded meanwhile, all numbers are of that version.
"""

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedModel

from stretto.engine.native.engine import NativeEngine
from stretto.engine.native.generation import Feed, Generation
from stretto.engine.native.parameters import Prover, joined
from stretto.model.decode.policy import DecodePolicy
from stretto.model.packed import logprobs as packed
from tests.engine.answering import drain, engine_of, request, shaken, weights
from tests.model.families import FAMILIES, VOCABULARY, Family
from tests.model.test_trace import OPERATIONS, model
from tests.tolerances import LOGITS, assert_close, rounding

TEXT = tuple(np.random.default_rng(3).integers(2, 22, 150).tolist())


@pytest.fixture(scope="module", params=FAMILIES, ids=str)
def policy(request: pytest.FixtureRequest) -> DecodePolicy:
    family: Family = request.param
    return DecodePolicy(model(family))


@given(data=st.data())
def test_in_pieces_a_text_has_the_numbers_of_the_whole(policy: DecodePolicy, data: st.DataObject) -> None:
    text = np.array(data.draw(st.lists(st.integers(0, VOCABULARY - 1), min_size=2, max_size=140)))
    whole = policy.forward_of_texts([text[:-1]]).log_softmax(-1).gather(1, torch.from_numpy(text[1:, None]))[:, 0]
    prover = Prover(policy, VOCABULARY, data.draw(st.integers(1, 150)))
    pieces = [torch.tensor(piece) for _, piece in prover.texts([text.tolist()])]
    assert_close(torch.cat(pieces), whole, OPERATIONS, size=LOGITS)


def scores(engine: NativeEngine, *texts: tuple[int, ...]) -> list[tuple[float, ...]]:
    return joined(engine.score(texts), len(texts))


def passes(engine: NativeEngine, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """From now on: tokens of each forward pass of the engine's prover, and logits after how many of them."""
    found = list[tuple[int, int]]()
    policy = engine._prover._policy
    assert policy is not None
    forward = policy.forward_of_model

    def noted(token_ids: Any, positions: Any, plan: Any, tokens: int, last: int) -> Any:
        found.append((tokens, -last))
        return forward(token_ids, positions, plan, tokens, last)

    monkeypatch.setattr(policy, "forward_of_model", noted)
    return found


@pytest.mark.parametrize(("tokens", "rows", "most"), [(4096, 9, 9), (7, 1000, 7), (11, 9, 9)])
def test_no_pass_is_larger_than_a_chunk(
    folder: Path, monkeypatch: pytest.MonkeyPatch, tokens: int, rows: int, most: int
) -> None:
    whole = scores(engine_of(folder), TEXT, (5,), TEXT[:3])
    monkeypatch.setitem(packed.CHUNK_LOGITS, "cpu", rows * 22)
    engine = engine_of(folder, max_prefill_tokens=tokens)
    seen = passes(engine, monkeypatch)
    found = scores(engine, TEXT, (5,), TEXT[:3])
    assert [len(one) for one in found] == [149, 0, 2]
    for ours, theirs in zip(found, whole, strict=True):
        assert_close(torch.tensor(ours), torch.tensor(theirs), OPERATIONS, size=LOGITS)
    assert max(max(one) for one in seen) <= most
    assert sum(one for one, _ in seen) == 149 + 2


def test_recomputed_tokens_have_no_more_logits_than_a_chunk(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(packed.CHUNK_LOGITS, "cpu", 10 * 22)
    engine = engine_of(folder)
    seen = passes(engine, monkeypatch)
    for number in range(4):
        engine.add(request(f"r{number}", prompt=12 + number, seeds=(number,), stop_token_ids=()))
    for _ in range(20):
        engine.step()
    found = engine.look_back(64).sampled
    assert len(found) == 4 * 20
    assert max(abs(told - again) for told, again in found) < rounding(OPERATIONS, size=LOGITS)
    assert max(rows for _, rows in seen) <= 10
    drain(engine)


class Pair:
    """A generation whose steps go on, and one text that is scored."""

    def __init__(self, folder: Path) -> None:
        self.engine = engine_of(folder, max_prefill_tokens=15)
        self.generation = Generation(self.engine)

    async def scored(self, during: Any = lambda steps: None) -> tuple[list[tuple[float, ...]], int]:
        """Its numbers, and the tokens that were sampled for a stream meanwhile; `during` gets their number."""
        running, feed = asyncio.create_task(self.generation.run()), Feed("engine-0")
        try:
            self.generation.submit_to(feed, [request("a", max_tokens=150, stop_token_ids=())], every_token=False)
            while not (begun := self.engine.health().generated):
                await asyncio.sleep(0)
            scoring = asyncio.create_task(self.generation.score([TEXT]))
            while not scoring.done():
                during(self.engine.health().generated - begun)
                await asyncio.sleep(0)
            return await scoring, self.engine.health().generated - begun
        finally:
            self.generation.end(feed)
            running.cancel()


def test_a_stream_goes_on_between_the_pieces(folder: Path) -> None:
    pair = Pair(folder)
    found, sampled = asyncio.run(pair.scored())
    assert sampled >= 149 // 15
    assert found == scores(pair.engine, TEXT)


@pytest.mark.parametrize("after", [0, 1, 4, 8])
def test_all_numbers_are_of_one_version(folder: Path, plain: PreTrainedModel, after: int) -> None:
    pair, other = Pair(folder), weights(shaken(plain, 1))
    old = scores(pair.engine, TEXT)

    def load(sampled: int) -> None:
        if sampled >= after and pair.engine.version == 0:
            pair.generation.load(1, other)

    found, _ = asyncio.run(pair.scored(load))
    assert pair.engine.version == 1
    assert found == scores(pair.engine, TEXT) != old


async def test_texts_of_several_callers_are_scored_one_after_another(folder: Path) -> None:
    generation = Generation(engine_of(folder, max_prefill_tokens=15))
    all_at_once = await asyncio.gather(*(generation.score([TEXT[at:]]) for at in range(4)))
    assert all_at_once == [scores(generation.engine, TEXT[at:]) for at in range(4)]
