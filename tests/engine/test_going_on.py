"""Answers that go on behind tokens which another engine, or an earlier run, had written.

- They come out as they would have: the same tokens, the log-probabilities and versions of the beginning as they were.
- How far an unfinished answer has come can be asked at any time, and is enough to go on from.
- A beginning that no engine can have written is refused, with the field, and the engine goes on.
"""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from msgspec.structs import replace

from stretto.core.errors import RefusedRequest
from stretto.core.records import Completion, GenerateRequest, Sampling, Segment
from stretto.engine.config import EngineConfig
from stretto.engine.native.engine import NativeEngine
from stretto.model.hf.folder import load_policy
from tests.tolerances import EXACT

REQUEST = GenerateRequest(
    id="0.17.0", prompt_token_ids=(5, 12, 8), seeds=(1, 2, 3), sampling=Sampling(max_tokens=24, temperature=0.8)
)


def engine(folder: Path, **settings: int) -> NativeEngine:
    return NativeEngine.load(folder, EngineConfig.model_validate({"slots": 2} | settings))


def finished(engine: NativeEngine, request: GenerateRequest) -> list[Completion]:
    engine.add(request)
    completions = []
    while not engine.idle:
        completions += engine.step()
    return sorted(completions, key=lambda completion: completion.member)


def beginning(completion: Completion, tokens: int) -> Segment:
    cut = slice(0, tokens)
    return Segment.of(completion.token_ids[cut], completion.behavior_logprobs[cut], completion.versions[cut], 2)


@pytest.mark.parametrize("tokens", [0, 1, 7])
def test_an_answer_goes_on_as_it_would_have(folder: Path, tokens: int) -> None:
    whole = finished(engine(folder), REQUEST)
    prefixes = tuple(beginning(completion, min(tokens, len(completion.token_ids) - 1)) for completion in whole)
    again = finished(engine(folder), replace(REQUEST, prefixes=prefixes))
    assert [completion.token_ids for completion in again] == [completion.token_ids for completion in whole]
    for ours, theirs, some in zip(again, whole, prefixes, strict=True):
        assert ours.behavior_logprobs[: len(some.token_ids)] == some.behavior_logprobs
        assert ours.behavior_logprobs == pytest.approx(theirs.behavior_logprobs, abs=EXACT)
        assert ours.interrupted == (2 if some.token_ids else 0)
        assert ours.stop_reason == theirs.stop_reason


def test_what_is_written_of_an_answer_is_enough_to_go_on_elsewhere_with_other_weights(folder: Path) -> None:
    first = engine(folder)
    whole = finished(engine(folder), REQUEST)
    first.add(REQUEST)
    ended = {completion.member: completion for _ in range(5) for completion in first.step()}
    known = {REQUEST.id: [0, 0, 0], "another": [0]}
    written = {progress.member: progress.segment for progress in first.progress(known)}
    assert {*written, *ended} <= {0, 1, 2}
    for member, tokens in written.items():
        assert tokens.token_ids == whole[member].token_ids[: len(tokens.token_ids)]
        assert tokens.versions == (0,) * len(tokens.token_ids)
    known = {REQUEST.id: [len(written[m].token_ids) - 1 if m in written else 0 for m in range(3)]}
    assert all(len(progress.segment.token_ids) == 1 for progress in first.progress(known))

    second = engine(folder)
    weights = {name: parameter * 1.5 for name, parameter in load_policy(folder).named_parameters()}
    second.update(4, weights)
    prefixes = [Segment.of(w.token_ids, w.behavior_logprobs, w.versions) for w in written.values()]
    seeds = tuple(REQUEST.seeds[member] for member in written)
    going_on = finished(second, replace(REQUEST, seeds=seeds, prefixes=tuple(prefixes)))
    for completion, some in zip(going_on, prefixes, strict=True):
        assert completion.token_ids[: len(some.token_ids)] == some.token_ids
        assert set(completion.versions[len(some.token_ids) :]) == {4}
        assert completion.versions[: len(some.token_ids)] == some.versions


def test_only_new_tokens_count_as_generated(folder: Path) -> None:
    whole = finished(engine(folder), REQUEST)
    prefixes = tuple(beginning(completion, len(completion.token_ids) - 1) for completion in whole)
    other = engine(folder)
    finished(other, replace(REQUEST, prefixes=prefixes))
    assert other.health().generated == 3


@pytest.mark.parametrize(
    ("prefixes", "message"),
    [
        ((Segment(),), "prefixes: 1 prefixes for 3 seeds; none, or one for each seed"),
        (
            (Segment.of((4,)), Segment(), Segment()),
            "prefixes: 1 tokens; as many log-probabilities and versions",
        ),
        (
            (Segment.of((4,) * 24, (-0.5,) * 24, (0,) * 24), Segment(), Segment()),
            "prefixes: 24 tokens; fewer than 24, which max_tokens and the context of 192 leave",
        ),
        ((Segment.of((99,), (-0.5,), (0,)), Segment(), Segment()), "prefixes: token 99; 0 to 21, the vocabulary"),
        ((Segment.of((-1,), (-0.5,), (0,)), Segment(), Segment()), "prefixes: token -1; 0 to 21, the vocabulary"),
        (
            (Segment.of((4,), (-0.5,), (7,)), Segment(), Segment()),
            "prefixes.versions: version 7; 0 to 0, the version in use",
        ),
        (
            (Segment.of((4, 4), (-1, -1), (9, 0)), Segment(), Segment()),
            "prefixes.versions: version 9; 0 to 0, the version in use",
        ),
        (
            (Segment.of((4,), (-0.5,), (-(2**60),)), Segment(), Segment()),
            f"prefixes.versions: version {-(2**60)}; 0 to 0",
        ),
        (
            (Segment.of((4,), (math.nan,), (0,)), Segment(), Segment()),
            "prefixes.behavior_logprobs: nan; finite numbers",
        ),
        (
            (Segment.of((4,), (-math.inf,), (0,)), Segment(), Segment()),
            "prefixes.behavior_logprobs: -inf; finite numbers",
        ),
        (
            (Segment.of((4,), (-1e39,), (0,)), Segment(), Segment()),
            "prefixes.behavior_logprobs: -1e+39; finite numbers",
        ),
        (
            (Segment.of((4,), (-0.5,), (0,), 2**63), Segment(), Segment()),
            f"prefixes.interrupted: {2**63}; 0 to 2,147,483,647",
        ),
        ((Segment.of((4,), (-0.5,), (0,), -1), Segment(), Segment()), "prefixes.interrupted: -1; 0 to 2,147,483,647"),
    ],
    ids=[
        *("too few", "uneven", "too long", "no token", "below the vocabulary"),
        *("from the future", "began in the future", "before the first version"),
        *("NaN", "infinite", "infinite as float32", "interrupted too often", "interrupted less than never"),
    ],
)
def test_a_beginning_that_no_engine_can_have_written_is_refused(
    folder: Path, prefixes: tuple[Segment, ...], message: str
) -> None:
    with pytest.raises(RefusedRequest) as refused:
        engine(folder).add(replace(REQUEST, prefixes=prefixes))
    assert message in str(refused.value)


def test_versions_of_a_beginning_never_decrease(folder: Path) -> None:
    ours = engine(folder)
    ours.version = 3
    going_back = replace(REQUEST, seeds=(1,), prefixes=(Segment.of((4, 4), (-0.5, -0.5), (2, 1)),))
    with pytest.raises(RefusedRequest, match=r"prefixes\.versions: a version after a newer one; versions that never"):
        ours.add(going_back)
    forward = replace(going_back, prefixes=(Segment.of((4, 4), (-0.5, -0.5), (1, 2)),))
    assert finished(ours, forward)[0].versions[:3] == (1, 2, 3)


def test_a_beginning_that_fills_the_context_is_refused_and_one_that_leaves_a_place_goes_on(folder: Path) -> None:
    ours, long = engine(folder), replace(REQUEST, seeds=(1,), sampling=Sampling(max_tokens=10_000))

    def prefixes(tokens: int) -> GenerateRequest:
        return replace(long, prefixes=(Segment.of((4,) * tokens, (-0.5,) * tokens, (0,) * tokens),))

    for tokens in (189, 190, 5_000):  # of a context of 192 the prompt takes three
        with pytest.raises(RefusedRequest, match=f"prefixes: {tokens} tokens; fewer than 189, .* the context of 192"):
            ours.add(prefixes(tokens))
    assert ours.idle
    assert len(finished(ours, prefixes(188))[0].token_ids) == 189
