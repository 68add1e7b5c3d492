"""Promises, for six families of decoders, each against the plain transformers model in float32:

- greedy answers are those of `generate`, token for token, on 20 prompts of mixed lengths;
- log-probabilities of sampled tokens are those of the full forward to rounding: alone, in full and in ragged batches,
  for answers that share a prompt, after interruptions with "recompute", and when a small cache preempts answers.

Families: full attention (Qwen2, Qwen3, Llama), a sliding window that is shorter than prompts and answers (Mistral),
sliding and full layers with two rotary settings (Gemma 3), experts (Qwen3-MoE).

Products are in panels, so that the steps of four families are programs (`stretto_kernels.steps.program`).

Two logits that differ by less than rounding have no greedy token that both sides must agree on. The seeds are such that
this does not happen: the test asserts that the best two logits are further apart than rounding at every token.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from stretto.core.records import Completion, GenerateRequest, Sampling
from stretto.engine.config import EngineConfig
from stretto.engine.native import engine as native
from stretto.engine.native.engine import NativeEngine
from stretto.model.decode.policy import CACHED_ATTENTION
from stretto.model.kernels import use_onednn
from stretto_kernels.compiled import AVAILABLE
from tests.engine.answering import (
    EOS,
    assert_each_token_follows_its_version,
    drain,
    expected_logprobs,
    finish,
    shaken,
    weights,
)
from tests.model.choosing import always
from tests.tiny_policy import sized
from tests.tolerances import EXACT

VOCABULARY = 40
PROMPTS = 20
LENGTHS = (1, 2, 3, 5, 9, 14, 23, 31, 48, 63)
ANSWER = 24

SHAPE = sized(VOCABULARY, width=32, inner=48, layers=2, heads=(4, 2), head=8, max_position_embeddings=192)
SHAPE |= {"initializer_range": 0.25, "bos_token_id": None, "eos_token_id": EOS, "pad_token_id": 0}
GEMMA = {
    "num_hidden_layers": 3,
    "tie_word_embeddings": False,  # tied random weights repeat the newest token
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "sliding_window": 9,
    "query_pre_attn_scalar": 16,
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 50_000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
    },
}
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen2": {},
    "qwen3": {},
    "llama": {},
    "mistral": {"sliding_window": 11},
    "gemma3_text": GEMMA,
    "qwen3_moe": EXPERTS,
}


@pytest.fixture(autouse=True)
def in_panels(monkeypatch: pytest.MonkeyPatch) -> None:
    chooser = always("panels" if AVAILABLE else "linear")
    monkeypatch.setattr(native, "use_onednn", partial(use_onednn, chooser=chooser))


@dataclass(frozen=True)
class Pair:
    """The plain model, and one with equal weights for engines to drive."""

    plain: PreTrainedModel
    driven: PreTrainedModel
    computed: dict[tuple[tuple[int, ...], tuple[int, ...]], list[float]] = field(default_factory=dict)

    def engine(self, **settings: object) -> NativeEngine:
        config = EngineConfig.model_validate({"slots": 32, **settings})
        return NativeEngine(copy.deepcopy(self.driven), config)

    def expected(self, request: GenerateRequest, completion: Completion) -> list[float]:
        """By the full forward, which is computed once for one completion: seeds give the same in most compositions."""
        key = (request.prompt_token_ids, completion.token_ids)
        if key not in self.computed:
            self.computed[key] = expected_logprobs({0: self.plain}, request, completion)
        return self.computed[key]


#: Full attention as of qwen3, whose steps tests/model/test_decode.py compares as well.
LONG = ("qwen2", "llama")


@pytest.fixture(
    scope="module",
    params=[pytest.param(family, marks=[pytest.mark.long] if family in LONG else []) for family in FAMILIES],
)
def pair(request: pytest.FixtureRequest) -> Pair:
    shape = AutoConfig.for_model(request.param, **SHAPE | FAMILIES[request.param])
    torch.manual_seed(9)
    plain = AutoModelForCausalLM.from_config(copy.deepcopy(shape), attn_implementation="eager").eval()
    driven = AutoModelForCausalLM.from_config(copy.deepcopy(shape), attn_implementation=CACHED_ATTENTION).eval()
    driven.load_state_dict(plain.state_dict())
    return Pair(plain, driven)


def wanted(name: str, prompt: int, seeds: Sequence[int] = (1,), **sampling: Any) -> GenerateRequest:
    tokens = np.random.default_rng([prompt, *name.encode()]).integers(2, VOCABULARY, prompt)
    settings: dict[str, Any] = {"max_tokens": ANSWER, "stop_token_ids": (EOS,)} | sampling
    return GenerateRequest(
        id=name, prompt_token_ids=tuple(tokens.tolist()), seeds=tuple(seeds), sampling=Sampling(**settings)
    )


def generated(model: PreTrainedModel, requests: Sequence[GenerateRequest]) -> list[tuple[list[int], int]]:
    """Greedy answers by transformers to prompts of one length, and how many of their tokens are certain: where the best
    two logits lie within rounding either may be the next token."""
    generate: Any = model.generate
    prompts = torch.tensor([request.prompt_token_ids for request in requests])
    told = generate(
        prompts,
        attention_mask=torch.ones_like(prompts),
        max_new_tokens=ANSWER,
        do_sample=False,
        return_dict_in_generate=True,
        output_logits=True,
    )
    answers = []
    best = torch.stack(told.logits).topk(2).values  # [step, row, 2]
    for row, tokens in enumerate(told.sequences[:, prompts.shape[1] :].tolist()):
        whole = tokens[: tokens.index(EOS) + 1] if EOS in tokens else tokens
        near = (best[: len(whole), row, 0] - best[: len(whole), row, 1] < EXACT).tolist()
        answers.append((whole, near.index(True) if True in near else len(whole)))
    return answers


def test_greedy_answers_are_those_of_generate_on_prompts_of_mixed_lengths(pair: Pair) -> None:
    requests = [wanted(f"p{i}", LENGTHS[i % len(LENGTHS)], temperature=0.0) for i in range(PROMPTS)]
    ended = finish(pair.engine(max_prefill_tokens=200), *requests)
    varied = {completion.token_ids for completion in ended.values()}
    assert len(varied) > 0.8 * PROMPTS
    assert len({token for answer in varied for token in answer}) > VOCABULARY / 2
    whole = 0
    for start in range(len(LENGTHS)):
        same = requests[start :: len(LENGTHS)]
        for request, (answer, certain) in zip(same, generated(pair.plain, same), strict=True):
            found = list(ended[request.id, 0].token_ids)
            assert found[:certain] == answer[:certain]
            whole += found == answer
    assert whole > 0.9 * PROMPTS


def worst(pair: Pair, requests: Sequence[GenerateRequest], ended: dict[tuple[str, int], Completion]) -> float:
    """The largest difference of a log-probability from the full forward's."""
    assert len(ended) == sum(len(request.seeds) for request in requests)
    by_id = {request.id: request for request in requests}
    return max(
        float(np.abs(np.subtract(c.behavior_logprobs, pair.expected(by_id[name], c))).max())
        for (name, _), c in ended.items()
    )


def mixed() -> list[GenerateRequest]:
    """Prompts of all lengths, one to three answers each, of 3 to 40 tokens."""
    return [
        wanted(f"m{i}", LENGTHS[i % 10], seeds=range(1 + i % 3), max_tokens=3 + 37 * (i % 4) // 3, stop_token_ids=())
        for i in range(20)
    ]


COMPOSITIONS: dict[str, dict[str, Any]] = {
    "alone": {"slots": 1},
    "few": {"slots": 3},
    "many": {"slots": 64},
    "one prompt at a time": {"slots": 64, "max_prefill_tokens": 1},
    "a small cache": {"cache_gib": 7e-5},
}
#: Each family and each composition twice, in other company; all of them in the long tests.
DAILY = {
    "qwen3": ("few", "a small cache"),
    "mistral": ("many", "a small cache"),
    "gemma3_text": ("few", "one prompt at a time"),
    "qwen3_moe": ("many", "one prompt at a time"),
}
COMPOSED = [
    pytest.param(family, name, marks=[] if name in DAILY.get(family, ()) else [pytest.mark.long])
    for family in FAMILIES
    for name in COMPOSITIONS
]


@pytest.mark.parametrize(("pair", "composition"), COMPOSED, indirect=["pair"])
def test_logprobs_are_those_of_the_full_forward_at_every_batch_composition(pair: Pair, composition: str) -> None:
    requests, settings = mixed(), COMPOSITIONS[composition]
    engine = pair.engine(**settings)
    assert worst(pair, requests, finish(engine, *requests)) < EXACT
    health = engine.health()
    assert (health.preempted > 0) == ("cache_gib" in settings)
    if composition == "many":  # answers that share a prompt share its computation
        assert health.prefilled == sum(len(request.prompt_token_ids) for request in requests)


def test_after_interruptions_each_token_has_the_logprob_of_its_own_version(pair: Pair) -> None:
    models = {0: pair.plain, 1: shaken(pair.plain, 1), 2: shaken(pair.plain, 2)}
    requests = [wanted(f"i{i}", prompt, seeds=range(2), stop_token_ids=()) for i, prompt in enumerate((1, 12, 40))]
    engine = pair.engine(max_prefill_tokens=64)
    for request in requests:
        engine.add(request)
    ended = []
    for version in (1, 2):
        for _ in range(8):
            ended += engine.step()
        engine.update(version, weights(models[version]))
    ended += drain(engine).values()
    assert len(ended) == 6
    assert_each_token_follows_its_version(models, requests, ended)
    assert all(set(completion.versions) == {0, 1, 2} and completion.interrupted == 2 for completion in ended)
    assert engine.health().interrupted == 6 * 2
    assert engine.health().recomputed > 0
