"""Scores of a prompt are those of a plain forward pass. One pass gives all that is asked of a prompt, piece by piece,
and nobody waits for the other pieces: neither clients of the same engine nor those of other lanes."""

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from stretto.core.errors import StrettoError
from stretto.model.decode.policy import DecodePolicy
from stretto_tinker.compute import sampler as sampler_module
from stretto_tinker.compute.base import LocalBackend
from stretto_tinker.compute.sampler import Ended, Sampler, Wish
from stretto_tinker.http.service import owner_of
from stretto_tinker.record import Asked
from stretto_tinker.serve import TinkerServer
from stretto_tinker.wire.bodies import SamplingParams
from stretto_tinker.wire.outputs import Sampled
from stretto_tinker.work import turns
from stretto_tinker.work.sampling import Sampling, waiting
from tests.tinker.speaking import Client, held
from tests.tinker.test_training import data_for

_LONG = tuple(3 + at * at % 19 for at in range(20))
_SHORT = (7, 8, 9)
_CLOSE = 1e-5


@pytest.fixture
def sampler(backend: LocalBackend) -> Sampler:
    return backend.sampled(None)


@pytest.fixture
def pieces(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Tokens of each piece that was scored so far, where prompts are scored four tokens at a time."""
    found = list[int]()
    forward = DecodePolicy.forward_of_piece

    def noted(policy: DecodePolicy, text: Any, token_ids: Any, last: int | None = None) -> torch.Tensor:
        found.append(len(token_ids))
        return forward(policy, text, token_ids, last)

    monkeypatch.setattr(DecodePolicy, "forward_of_piece", noted)
    monkeypatch.setattr(sampler_module, "_PIECE", 4)
    return found


def wish(prompt: tuple[int, ...] = _LONG, *, max_tokens: int = 1, temperature: float = 1.0, **asked: Any) -> Wish:
    return Wish(prompt, (1,), SamplingParams(max_tokens=max_tokens, temperature=temperature, stop=[]), **asked)


def ended_of(sampler: Sampler, wishes: Mapping[str, Wish]) -> dict[str, Ended]:
    """The outcomes, in the order in which they come."""
    for id, one in wishes.items():
        sampler.add(id, one)
    found: dict[str, Ended] = {}
    while not sampler.idle:
        found |= sampler.step()
    return found


def scored(sampler: Sampler, one: Wish) -> Sampled:
    [found] = ended_of(sampler, {"one": one}).values()
    assert isinstance(found, Sampled)
    return found


@pytest.fixture(scope="module")
def plain(model: Path) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Log-probabilities of the whole vocabulary at the positions of the long prompt, the first left out."""
    whole = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    with torch.no_grad():
        return whole(input_ids=torch.tensor([_LONG])).logits[0, :-1].log_softmax(-1).numpy()  # type: ignore[no-any-return]


def every_kind(first: int, temperature: float = 1.0) -> Wish:
    targets = [[token, -1, 5] for token in _LONG[1:]]
    return wish(temperature=temperature, scored=True, prompt_likeliest=3, first=first, targets=targets, drawn=2, seed=5)


@pytest.mark.parametrize("piece", [4, 256])
@pytest.mark.parametrize("first", [1, 7])
def test_each_kind_is_what_a_plain_forward_pass_gives(
    piece: int, first: int, sampler: Sampler, plain: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampler_module, "_PIECE", piece)
    found = scored(sampler, every_kind(first))
    assert found.prompt_logprobs is not None
    assert found.prompt_likeliest is not None
    assert found.target_logprobs is not None
    assert found.drawn is not None
    own = plain[range(len(plain)), _LONG[1:]]
    assert np.isnan(found.prompt_logprobs[:first]).all()
    np.testing.assert_allclose(found.prompt_logprobs[first:], own[first - 1 :], atol=_CLOSE)
    likeliest = np.argsort(-plain, axis=-1)[first - 1 :, :3]
    assert (found.prompt_likeliest.token_ids[first:] == likeliest).all()
    assert (found.prompt_likeliest.logprobs[:first] == -99_999.0).all()
    at_likeliest = np.take_along_axis(plain[first - 1 :], likeliest, -1)
    np.testing.assert_allclose(found.prompt_likeliest.logprobs[first:], at_likeliest, atol=_CLOSE)
    np.testing.assert_allclose(found.target_logprobs[:, 0], own, atol=_CLOSE)
    assert (found.target_logprobs[:, 1] == 0).all()
    np.testing.assert_allclose(found.target_logprobs[:, 2], plain[:, 5], atol=_CLOSE)
    at_drawn = np.take_along_axis(plain, found.drawn.token_ids.astype(np.int64), -1)
    np.testing.assert_allclose(found.drawn.logprobs, at_drawn, atol=_CLOSE)


def test_one_pass_gives_every_kind_and_pieces_change_no_draw(sampler: Sampler, pieces: list[int], plain: Any) -> None:
    in_pieces = scored(sampler, every_kind(1)).drawn
    assert pieces == [4, 4, 4, 4, 3]
    sampler_module._PIECE = 256
    whole = scored(sampler, every_kind(1)).drawn
    assert pieces[5:] == [19]
    assert in_pieces is not None
    assert whole is not None
    assert (in_pieces.token_ids == whole.token_ids).all()
    greedy = scored(sampler, every_kind(1, temperature=0.0)).drawn
    assert greedy is not None
    assert (greedy.token_ids == plain.argmax(-1)[:, None]).all()
    assert (in_pieces.token_ids != greedy.token_ids).any()


def test_only_rows_that_are_asked_for_go_through_the_output_matrix(sampler: Sampler, pieces: list[int]) -> None:
    sampler_module._PIECE = 256
    rows, forward = list[int](), sampler._policy.forward_of_model

    def noted(*given: Any) -> torch.Tensor:
        found = forward(*given)
        rows.append(found.shape[1])
        return found

    sampler._policy.forward_of_model = noted
    scored(sampler, wish(scored=True, first=len(_LONG) - 2))
    assert (pieces, rows) == ([19], [2])


def test_a_prompt_of_one_token_has_no_scores(sampler: Sampler) -> None:
    found = scored(sampler, wish((3,), scored=True, prompt_likeliest=2, drawn=2))
    assert found.prompt_logprobs is not None
    assert found.prompt_likeliest is not None
    assert found.drawn is not None
    assert np.isnan(found.prompt_logprobs).tolist() == [True]
    assert found.prompt_likeliest.logprobs.tolist() == [[-99_999.0] * 2]
    assert found.drawn.token_ids.shape == (0, 2)


def test_a_short_prompt_and_a_sample_of_others_end_before_a_long_prompt(sampler: Sampler, pieces: list[int]) -> None:
    wishes = {
        "long": wish(owner="ann", scored=True),
        "next": wish(owner="ann", scored=True),
        "short": wish(_SHORT, owner="bob", scored=True),
        "sample": wish(_SHORT, owner="eve", max_tokens=3),
    }
    assert list(ended_of(sampler, wishes)) == ["short", "sample", "long", "next"]
    assert pieces == [4, 2, *[4] * 3, 3, *[4] * 4, 3]


def test_short_prompts_are_scored_together_up_to_a_piece(sampler: Sampler, pieces: list[int]) -> None:
    for at in range(3):
        sampler.add(str(at), wish(_SHORT, max_tokens=9, scored=True))
    sampler.step()
    assert pieces == [2, 2]
    sampler.step()
    assert pieces == [2, 2, 2]


def test_few_long_prompts_begin_at_once_and_clients_have_turns(sampler: Sampler, pieces: list[int], plain: Any) -> None:
    clients = [f"client {at}" for at in range(6)]
    for owner in clients:
        for at in range(2):
            sampler.add(f"{owner} {at}", wish(owner=owner, scored=True))
    sampler.add("short", wish(_SHORT, owner="short", scored=True))
    order, most = list[str](), 0
    while not sampler.idle:
        found = sampler.step()
        order += found
        most = max(most, sum(opened.held for opened in sampler._open.values()))
        for id, ended in found.items():
            assert isinstance(ended, Sampled)
            assert ended.prompt_logprobs is not None
            if id != "short":
                own = plain[range(len(plain)), _LONG[1:]]
                np.testing.assert_allclose(ended.prompt_logprobs[1:], own, atol=_CLOSE)
    assert most == 4
    assert order[0] == "short"
    for owner in clients:
        assert order.index(f"{owner} 0") < order.index(f"{owner} 1")
    assert Counter(pieces) == {4: 12 * 4, 3: 12, 2: 1}


def test_a_prompt_that_cannot_be_scored_fails_alone(sampler: Sampler, monkeypatch: pytest.MonkeyPatch) -> None:
    forward = DecodePolicy.forward_of_piece

    def failing(policy: DecodePolicy, text: Any, token_ids: Any, last: int | None = None) -> torch.Tensor:
        if len(token_ids) == len(_LONG) - 1:
            raise RuntimeError("no memory for this prompt")
        return forward(policy, text, token_ids, last)

    monkeypatch.setattr(DecodePolicy, "forward_of_piece", failing)
    wishes = {"long": wish(max_tokens=9, scored=True), "short": wish(_SHORT, max_tokens=9, scored=True)}
    found = ended_of(sampler, wishes)
    assert isinstance(found["long"], StrettoError)
    assert str(found["long"]) == "RuntimeError: no memory for this prompt"
    assert isinstance(found["short"], Sampled)
    assert len(found["short"].sequences[0].token_ids) == 9


def test_nothing_is_left_of_a_prompt_that_is_aborted_half_way(sampler: Sampler, pieces: list[int]) -> None:
    sampler.add("long", wish(max_tokens=20, scored=True))
    sampler.step()
    assert not sampler.idle
    assert sampler.unscored("") == 15
    sampler.abort("long")
    assert sampler.idle
    assert sampler.unscored("") == 0
    assert list(ended_of(sampler, {"long": wish(scored=True)})) == ["long"]
    assert pieces == [4, 4, 4, 4, 4, 3]


def test_a_client_whose_prompts_wait_to_be_scored_begins_no_further_request_and_gets_no_engine_of_its_own(
    sampler: Sampler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(turns, "TURN_TOKENS", 64)
    sampling = Sampling(sampler)

    def asked(owner: str, number: int, samples: int = 1) -> Asked:
        chunks = [{"type": "encoded_text", "tokens": _LONG}]
        sample = {"prompt": {"chunks": chunks}, "sampling_params": {"max_tokens": 1}, "prompt_logprobs": samples == 1}
        sample |= {"num_samples": samples}
        body = msgspec.json.encode({"sample": sample, "seed": 1, "weights": None})
        return Asked(f"{owner} {number}", owner, number, owner, "sample", body)

    sampling.begin(asked("eve", 0, samples=9))
    for number in range(2):
        assert sampling.begins(waiting(asked("ann", number))[1])
        sampling.begin(asked("ann", number))
        sampling.engine._engine.step()  # no backlog of the engine
        assert sampling.owes("ann") == (number == 0)
    assert sampler.unscored("ann") == 38
    assert not sampling.begins(waiting(asked("ann", 2))[1])
    assert sampling.begins(waiting(asked("bob", 0))[1])


def test_a_client_of_another_lane_has_its_turn_between_two_pieces(
    server: tuple[str, TinkerServer], pieces: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    address, running = server
    worker = running.worker
    monkeypatch.setattr(turns, "TURN_TOKENS", 1)
    monkeypatch.setattr(worker, "_clock", lambda: float(worker.computed))
    ann, bob = Client(address, "tml-scores"), Client(address, "tml-trains")
    sampler, model = ann.sampler(0), bob.create()
    order, trained, settled, forward = list[str](), list[str](), worker._settled, DecodePolicy.forward_of_piece

    def asking(policy: DecodePolicy, text: Any, token_ids: Any, last: int | None = None) -> torch.Tensor:
        if not trained:  # within the first turn of the other client
            worker._turns._spent.pop(owner_of(bob.key), None)  # what was computed before is long ago
            trained.append(bob.forward_backward(model, 1, data_for("cross_entropy")))
        return forward(policy, text, token_ids, last)

    def note(id: str, lane: str) -> None:
        order.append(id)
        settled(id, lane)

    monkeypatch.setattr(DecodePolicy, "forward_of_piece", asking)
    monkeypatch.setattr(worker, "_settled", note)
    with held(running):
        scored = ann.sample(sampler, 0, _LONG, params={"max_tokens": 1}, prompt_logprobs=True, topk_prompt_logprobs=2)
    assert len(ann.sampled(scored).prompt_logprobs) == 4 * len(_LONG)
    assert bob.output(trained[0]).loss > 0
    assert order == [trained[0], scored]
    assert pieces == [4, 4, 4, 4, 3]
