"""Promises: what is captured computes what the module computes, in steps with and without contexts, with the weights of
the moment; a module that decides by values, writes in place or counts with its sizes is called itself, and says why.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3ForCausalLM

from stretto.model.decode.policy import CACHED_ATTENTION, Context, DecodePolicy
from stretto.model.kernels.choice import Name
from stretto.model.kernels.matmul import use_onednn
from stretto.model.trace.trace import ModuleForward, TracedForward, trace
from tests.model.choosing import always
from tests.model.families import FAMILIES, VOCABULARY, config
from tests.tolerances import assert_close, operations_of

Family = tuple[str, int, int, dict[str, Any]]
EXPERTS = [family for family in FAMILIES if set(family[3]) & {"num_experts", "num_local_experts"}]
DENSE = [family for family in FAMILIES if family not in EXPERTS]
QWEN: Family = ("qwen3", 4, 2, {})
OPERATIONS = operations_of(config(*QWEN))


def model(family: Family, **special: object) -> PreTrainedModel:
    torch.manual_seed(0)
    name, heads, kv_heads, settings = family
    shape = config(name, heads, kv_heads, settings | special)
    made: PreTrainedModel = AutoModelForCausalLM.from_config(shape, attn_implementation=CACHED_ATTENTION)
    made.requires_grad_(False).eval()
    return made


def both(policy: PreTrainedModel) -> tuple[DecodePolicy, DecodePolicy]:
    """The same module captured and called; the cache is each one's own."""
    captured, called = DecodePolicy(policy), DecodePolicy(policy)
    assert isinstance(captured.calls, TracedForward), captured.calls
    called.calls = ModuleForward(policy, "to compare with")
    return captured, called


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


@pytest.mark.parametrize("family", DENSE, ids=str)
def test_captured_calls_give_the_logits_of_the_module(family: Family) -> None:
    captured, called = both(model(family))
    assert_close(two_steps(captured), two_steps(called), OPERATIONS)


def test_in_bfloat16_captured_calls_round_as_the_module_does() -> None:
    captured, called = both(model(QWEN).bfloat16())
    assert torch.equal(two_steps(captured), two_steps(called))


@pytest.mark.parametrize(
    ("kernel", "dtype"),
    [
        ("onednn", "float32"),
        ("columns", "float32"),
        ("packed", "float32"),
        ("packed", "bfloat16"),
        ("widened", "bfloat16"),
    ],
)
def test_captured_calls_multiply_by_the_kernels_of_the_module(kernel: Name, dtype: str) -> None:
    policy = model(QWEN).to(getattr(torch, dtype))
    use_onednn(policy, chooser=always(kernel, fewest=6))  # the two tracings differ in who would multiply
    captured, called = both(policy)
    assert torch.equal(two_steps(captured), two_steps(called))


@pytest.mark.parametrize("kernel", ["linear", "columns", "packed"])
def test_weights_that_are_copied_into_the_model_are_seen(kernel: Name) -> None:
    policy = model(QWEN)
    use_onednn(policy, chooser=always(kernel))
    captured, called = both(policy)
    before = two_steps(captured)
    captured.clear()
    with torch.no_grad():
        for parameter in captured.model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.2)
    after = two_steps(captured)
    assert not torch.allclose(before, after, atol=0.1)
    assert_close(after, two_steps(called), OPERATIONS)


def test_a_captured_forward_does_not_call_the_module() -> None:
    captured, _ = both(model(QWEN))
    captured.model.register_forward_pre_hook(lambda *_: pytest.fail("the module was called"))
    two_steps(captured)


@pytest.mark.parametrize("family", EXPERTS, ids=str)
def test_a_mixture_of_experts_is_called_as_a_module(family: Family) -> None:
    policy = DecodePolicy(model(family))
    assert isinstance(policy.calls, ModuleForward)
    assert "in place" in policy.calls.reason
    assert two_steps(policy).isfinite().all()


def test_a_rotary_embedding_that_looks_at_the_positions_is_not_captured() -> None:
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    calls = trace(model(("llama", 2, 1, {"rope_parameters": rope})))
    assert isinstance(calls, ModuleForward)
    assert "__bool__" in calls.reason


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
    kind: type[_Odd], reason: str
) -> None:
    odd = odd_model(kind)
    calls = trace(odd)
    assert isinstance(calls, ModuleForward)
    assert reason in calls.reason


def test_the_number_of_tokens_itself_may_stand_in_a_call() -> None:
    plain = model(QWEN)
    odd = odd_model(_TimesTheTokens)
    captured, once = trace(odd), trace(plain)
    ids = torch.arange(13)

    def ignoring(module: Any, query: Tensor, *rest: Any, **asked: Any) -> tuple[Tensor, None]:
        return query.transpose(1, 2), None

    with torch.inference_mode():
        thirteen, one = (calls(ids, ids, 4, ignoring) for calls in (captured, once))
    assert_close(thirteen, 13 * one, OPERATIONS)


@pytest.mark.parametrize(
    ("family", "calls"),
    [
        (QWEN, {"rms_norm": 9, "rotate": 4, "sign": 1, "linear": 15}),  # four norms in a layer and one at the end
        (("qwen2", 4, 2, {}), {"rms_norm": 5, "rotate": 4, "sign": 1, "linear": 15}),
        (("gemma3_text", 4, 2, {}), {"rms_norm": 13, "rotate": 4, "linear": 15}),
    ],
    ids=str,
)
def test_norms_rotations_and_products_are_one_call_each(family: Family, calls: dict[str, int]) -> None:
    captured = trace(model(family))
    assert isinstance(captured, TracedForward)
    names = [getattr(node.target, "__name__", node.target) for node in captured.graph.nodes]
    assert {name: names.count(name) for name in calls} == calls
    assert not {"rsqrt", "neg", "pow"} & set(names)
