"""Promises: a trace computes what the module computes, in steps with and without contexts, with the weights of
the moment; a module that decides by values, writes in place or counts with its sizes is called itself, and says why.
"""

import copy
import logging
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3ForCausalLM

from stretto.model.decode.policy import CACHED_ATTENTION, Context, DecodePolicy
from stretto.model.kernels import use_onednn
from stretto_kernels.steps import trace as tracing
from stretto_kernels.steps.matmul import Name, fits
from stretto_kernels.steps.trace import Forward, module_forward, trace
from tests.model.choosing import always
from tests.model.families import FAMILIES, VOCABULARY, Family, config
from tests.tolerances import assert_close, operations_of

EXPERTS = [family for family in FAMILIES if set(family[3]) & {"num_experts", "num_local_experts"}]
QWEN: Family = ("qwen3", 4, 2, {})
OPERATIONS = operations_of(config(*QWEN))


def model(family: Family, **special: object) -> PreTrainedModel:
    torch.manual_seed(0)
    name, heads, kv_heads, settings = family
    shape = config(name, heads, kv_heads, settings | special)
    made: PreTrainedModel = AutoModelForCausalLM.from_config(shape, attn_implementation=CACHED_ATTENTION)
    made.requires_grad_(False).eval()
    return made


def is_traced(forward: Forward) -> bool:
    return isinstance(forward, partial)


def why_not_traced(policy: PreTrainedModel, log: pytest.LogCaptureFixture) -> str:
    """What the log says of a model that runs as a module."""
    with log.at_level(logging.INFO):
        assert not is_traced(trace(policy))
    return log.text


def both(policy: PreTrainedModel) -> tuple[DecodePolicy, DecodePolicy]:
    """The same module traced and called; the cache is each one's own."""
    traced, called = DecodePolicy(policy), DecodePolicy(policy)
    assert is_traced(traced.forward_of_model)
    called.forward_of_model = module_forward(policy)
    return traced, called


def two_steps(policy: DecodePolicy) -> Tensor:
    """Logits of rows that enter with contexts and of their next tokens, [10, V]."""
    chance = np.random.default_rng(0)
    prompts = [chance.integers(0, VOCABULARY, (length,)) for length in (30, 1, 7, 19)]
    rows = ((0, 1), (2,), (3,), (4,))
    newest, lengths = np.zeros(5, np.int64), np.zeros(5, np.int64)
    for prompt, members in zip(prompts, rows, strict=True):
        newest[list(members)], lengths[list(members)] = prompt[-1], len(prompt)
    contexts = [Context(prompt[:-1], members) for prompt, members in zip(prompts, rows, strict=True)]
    order, entered = policy.forward(newest, lengths, contexts)
    order_2, followed = policy.forward(chance.integers(0, VOCABULARY, (5,)), lengths + 1, [])
    return torch.cat([entered[np.argsort(order)], followed[np.argsort(order_2)]])


def test_in_bfloat16_traced_calls_round_as_the_module_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing, "fuse", lambda *_: None)
    traced, called = both(model(QWEN).bfloat16())
    assert torch.equal(two_steps(traced), two_steps(called))


@pytest.mark.parametrize(
    ("kernel", "dtype"),
    [
        ("onednn", "float32"),
        ("columns", "float32"),
        ("packed", "float32"),
        ("packed", "bfloat16"),
        ("panels", "float32"),
        ("panels", "bfloat16"),
        ("widened", "bfloat16"),
    ],
)
def test_traced_calls_multiply_by_a_modules_kernels(kernel: Name, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing, "fuse", lambda *_: None)  # fused loops add up in another order
    policy = model(QWEN).to(getattr(torch, dtype))
    kernel = kernel if fits(kernel, getattr(torch, dtype)) else "linear"
    use_onednn(policy, chooser=always(kernel, fewest=6))  # the two tracings differ in who would multiply
    traced, called = both(policy)
    assert torch.equal(two_steps(traced), two_steps(called))


@pytest.mark.parametrize("kernel", ["linear", "columns", "packed", "panels"])
def test_weights_that_are_copied_into_the_model_are_seen(kernel: Name) -> None:
    policy = model(QWEN)
    use_onednn(policy, chooser=always(kernel))
    traced, called = both(policy)
    before = two_steps(traced)
    traced.clear()
    with torch.no_grad():
        for parameter in traced.model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.2)
    after = two_steps(traced)
    assert not torch.allclose(before, after, atol=0.1)
    assert_close(after, two_steps(called), OPERATIONS)


def test_a_traced_forward_does_not_call_the_module() -> None:
    traced, _ = both(model(QWEN))
    traced.model.register_forward_pre_hook(lambda *_: pytest.fail("the module was called"))
    two_steps(traced)


@pytest.mark.parametrize("family", EXPERTS, ids=str)
def test_a_mixture_of_experts_is_called_as_a_module(family: Family, caplog: pytest.LogCaptureFixture) -> None:
    made = model(family)
    assert "in place" in why_not_traced(made, caplog)
    assert two_steps(DecodePolicy(made)).isfinite().all()


def test_a_rotary_embedding_that_looks_at_the_positions_is_not_traced(caplog: pytest.LogCaptureFixture) -> None:
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    assert "__bool__" in why_not_traced(model(("llama", 2, 1, {"rope_parameters": rope})), caplog)


class _Odd(Qwen3ForCausalLM):
    """Logits changed by a number of the step's, which a list of calls would hold fast."""

    def forward(self, *, input_ids: Tensor, **rest: Any) -> Any:
        return SimpleNamespace(logits=super().forward(input_ids=input_ids, **rest).logits * self.number(input_ids))

    def number(self, input_ids: Tensor) -> float:
        raise NotImplementedError


class _TimesHalfTheTokens(_Odd):
    def number(self, input_ids: Tensor) -> float:
        return input_ids.shape[1] / 2


class _TimesTheTokens(_Odd):
    def number(self, input_ids: Tensor) -> float:
        return input_ids.shape[1]


class _AnotherAboveTwentyTokens(_Odd):
    def number(self, input_ids: Tensor) -> float:
        return 2.0 if input_ids.shape[1] > 20 else 3.0


def odd_model(kind: Callable[..., _Odd]) -> _Odd:
    """With the weights of `model(QWEN)`."""
    plain = model(QWEN)
    odd = kind(copy.deepcopy(plain.config))
    odd.load_state_dict(plain.state_dict())
    return odd


@pytest.mark.parametrize(
    ("kind", "reason"),
    [(_TimesHalfTheTokens, "2.5 for few tokens and 5.5 for more"), (_AnotherAboveTwentyTokens, "differ by")],
)
def test_numbers_that_depend_on_the_tokens_in_other_ways_than_their_count_are_noticed(
    kind: type[_Odd], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert reason in why_not_traced(odd_model(kind), caplog)


def test_the_number_of_tokens_itself_may_stand_in_a_call() -> None:
    plain = model(QWEN)
    forwards = trace(odd_model(_TimesTheTokens)), trace(plain)
    assert all(map(is_traced, forwards))
    ids = torch.arange(13)[None]

    class Ignoring:
        def attend(self, layer: int, query: Tensor, *rest: Any) -> Tensor:
            return query.transpose(1, 2)

    with torch.inference_mode():
        thirteen, one = (forward(ids, ids, Ignoring(), 13, -4) for forward in forwards)
    assert_close(thirteen, 13 * one, OPERATIONS)
