"""Answers that go on behind tokens which another engine, or an earlier run, had written.

- They come out as they would have: the same tokens, the log-probabilities and versions of the beginning as they were.
- How far an unfinished answer has come can be asked at any time, and is enough to go on from.
- Behind a beginning that has ended, by a stop or at its length, nothing is written.
- A beginning that no engine can have written is refused, with the field, and the engine goes on.
"""

import math
from pathlib import Path

import pytest
from msgspec.structs import replace

from stretto.core.errors import RefusedRequest
from stretto.core.records import Completion, GenerateRequest, Sampling, Segment, StopReason
from stretto.engine.native.engine import NativeEngine
from stretto.model.hf.folder import load_policy
from stretto.model.hf.tokenizer import load_tokenizer
from tests.engine.answering import engine_of
from tests.engine.byte_policy import generated
from tests.tolerances import EXACT

REQUEST = GenerateRequest(
    id="0.17.0", prompt_token_ids=(5, 12, 8), seeds=(1, 2, 3), sampling=Sampling(max_tokens=24, temperature=0.8)
)


def beginning(completion: Completion, tokens: int) -> Segment:
    cut = slice(0, tokens)
    return Segment.of(completion.token_ids[cut], completion.behavior_logprobs[cut], completion.versions[cut], 2)


@pytest.mark.parametrize("tokens", [0, 1, 7])
def test_an_answer_goes_on_as_it_would_have(folder: Path, engine: NativeEngine, tokens: int) -> None:
    whole = generated(engine, REQUEST)
    prefixes = tuple(beginning(completion, min(tokens, len(completion.token_ids) - 1)) for completion in whole)
    other = engine_of(folder, slots=2)
    again = generated(other, replace(REQUEST, prefixes=prefixes))
    known, all_of_it = (sum(one.length for one in column) for column in (prefixes, (c.segment for c in whole)))
    assert other.health().generated == all_of_it - known
    assert [completion.token_ids for completion in again] == [completion.token_ids for completion in whole]
    for ours, theirs, some in zip(again, whole, prefixes, strict=True):
        assert ours.behavior_logprobs[: len(some.token_ids)] == some.behavior_logprobs
        assert ours.behavior_logprobs == pytest.approx(theirs.behavior_logprobs, abs=EXACT)
        assert (ours.interrupted, ours.stop_reason) == (2 if some.token_ids else 0, theirs.stop_reason)


def test_what_is_written_of_an_answer_is_enough_to_go_on_with_other_weights(folder: Path, engine: NativeEngine) -> None:
    first, whole = engine_of(folder, slots=2), generated(engine, REQUEST)
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

    second = engine_of(folder, slots=2)
    weights = {name: parameter * 1.5 for name, parameter in load_policy(folder).named_parameters()}
    second.update(4, weights)
    prefixes = [Segment.of(w.token_ids, w.behavior_logprobs, w.versions) for w in written.values()]
    seeds = tuple(REQUEST.seeds[member] for member in written)
    going_on = generated(second, replace(REQUEST, seeds=seeds, prefixes=tuple(prefixes)))
    for completion, some in zip(going_on, prefixes, strict=True):
        assert completion.token_ids[: len(some.token_ids)] == some.token_ids
        assert set(completion.versions[len(some.token_ids) :]) == {4}
        assert completion.versions[: len(some.token_ids)] == some.versions


def begun(*tokens: int, logprob: float = -0.5, versions: tuple[int, ...] = (0,), interrupted: int = 0) -> Segment:
    return Segment.of(tokens, (logprob,) * len(tokens), versions, interrupted)


@pytest.mark.parametrize(
    ("prefix", "message"),
    [
        (Segment.of((4,)), "prefixes: 1 tokens; as many log-probabilities and versions"),
        (begun(*(4,) * 25, versions=(0,) * 25), "prefixes: 25 tokens; at most 24, which max_tokens and the context of"),
        (begun(99), "prefixes: token 99; 0 to 21, the vocabulary"),
        (begun(-1), "prefixes: token -1; 0 to 21, the vocabulary"),
        (begun(4, versions=(7,)), "prefixes.versions: version 7; 0 to 0, the version in use"),
        (begun(4, 4, versions=(9, 0)), "prefixes.versions: version 9; 0 to 0, the version in use"),
        (begun(4, versions=(-(2**60),)), f"prefixes.versions: version {-(2**60)}; 0 to 0"),
        (begun(4, logprob=math.nan), "prefixes.behavior_logprobs: nan; finite numbers"),
        (begun(4, logprob=-math.inf), "prefixes.behavior_logprobs: -inf; finite numbers"),
        (begun(4, logprob=-1e39), "prefixes.behavior_logprobs: -1e+39; finite numbers"),
        (begun(4, interrupted=2**63), f"prefixes.interrupted: {2**63}; 0 to 2,147,483,647"),
        (begun(4, interrupted=-1), "prefixes.interrupted: -1; 0 to 2,147,483,647"),
    ],
)
def test_a_beginning_that_no_engine_can_write_is_refused(engine: NativeEngine, prefix: Segment, message: str) -> None:
    with pytest.raises(RefusedRequest) as refused:
        engine.add(replace(REQUEST, prefixes=(prefix, Segment(), Segment())))
    assert message in str(refused.value)
    with pytest.raises(RefusedRequest, match="prefixes: 1 prefixes for 3 seeds; none, or one for each seed"):
        engine.add(replace(REQUEST, prefixes=(Segment(),)))


def test_versions_of_a_beginning_never_decrease(folder: Path) -> None:
    ours = engine_of(folder, slots=2)
    ours.version = 3
    going_back = replace(REQUEST, seeds=(1,), prefixes=(Segment.of((4, 4), (-0.5, -0.5), (2, 1)),))
    with pytest.raises(RefusedRequest, match=r"prefixes\.versions: a version after a newer one; versions that never"):
        ours.add(going_back)
    forward = replace(going_back, prefixes=(Segment.of((4, 4), (-0.5, -0.5), (1, 2)),))
    assert generated(ours, forward)[0].versions[:3] == (1, 2, 3)


def test_a_beginning_longer_than_the_context_is_refused_and_one_that_leaves_a_place_goes_on(folder: Path) -> None:
    ours, long = engine_of(folder, slots=2), replace(REQUEST, seeds=(1,), sampling=Sampling(max_tokens=10_000))

    def prefixes(tokens: int) -> GenerateRequest:
        return replace(long, prefixes=(Segment.of((4,) * tokens, (-0.5,) * tokens, (0,) * tokens),))

    for tokens in (190, 5_000):  # of a context of 192 the prompt takes three
        with pytest.raises(RefusedRequest, match=f"prefixes: {tokens} tokens; at most 189, .* the context of 192"):
            ours.add(prefixes(tokens))
    assert ours.idle
    assert len(generated(ours, prefixes(188))[0].token_ids) == 189
    [full] = generated(ours, prefixes(189))
    assert (full.token_ids, full.stop_reason) == ((4,) * 189, StopReason.LENGTH)


def test_nothing_is_sampled_behind_a_beginning_that_has_ended(folder: Path) -> None:
    """The engine before was lost between the last token and its end; the third completion goes on."""
    ours = engine_of(folder, slots=4)
    asked = replace(REQUEST, sampling=Sampling(max_tokens=3, stop_token_ids=(9,)))
    stopped, full = begun(4, 9, versions=(0, 0), interrupted=2), begun(4, 5, 6, versions=(0, 0, 0))
    ours.add(replace(asked, prefixes=(stopped, full, begun(4))))
    ended = ours.step()
    ours.check_integrity()
    assert [(one.member, one.token_ids, one.stop_reason) for one in ended] == [
        (0, (4, 9), StopReason.STOP),
        (1, (4, 5, 6), StopReason.LENGTH),
    ]
    assert (ended[0].behavior_logprobs, ended[0].versions, ended[0].interrupted) == ((-0.5, -0.5), (0, 0), 2)
    assert (ours.health().generated, ours.health().unfinished, list(ours.new_tokens({REQUEST.id}))) == (0, 6, [])
    rest = [one for _ in range(2) for one in ours.step()]
    assert [one.member for one in rest] == [2]
    assert ours.idle
    ours.check_integrity()


def test_nothing_is_sampled_behind_a_stop_text(folder: Path, engine: NativeEngine) -> None:
    tokens, tokenizer = (4, 5, 6), load_tokenizer(folder)
    asked = replace(REQUEST, seeds=(1,), sampling=Sampling(max_tokens=8, stop=(tokenizer.decode(tokens[1:]),)))
    [ended] = generated(engine, replace(asked, prefixes=(begun(*tokens, versions=(0, 0, 0)),)))
    assert (ended.token_ids, ended.stop_reason) == (tokens, StopReason.STOP)
