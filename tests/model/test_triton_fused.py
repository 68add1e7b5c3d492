"""Promises of a layer's small operations on a GPU (in Triton's interpreter where there is none):

- each gives what torch's calls give, to rounding, also of inputs that are columns of a wider tensor;
- a query comes back turned, and keys and values lie in their rows' slots and nowhere else;
- a trace for a GPU makes few calls, its products of one input are one product of parameters that are held once.
"""

import copy

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from stretto_kernels.gpu import fused
from stretto_kernels.gpu.tables import slots_of
from stretto_kernels.steps import trace as tracing
from stretto_kernels.steps.fusing import KERNELS
from stretto_kernels.steps.trace import module_forward, trace
from tests.model.families import Family
from tests.model.test_fused import close, normed, rotated
from tests.model.test_trace import QWEN, model

pytest.importorskip("triton")

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
TYPES = st.sampled_from([torch.float32, torch.float16, torch.bfloat16])


def columns(chance: torch.Generator, dtype: torch.dtype, *shape: int) -> Tensor:
    """A random tensor that is the middle of a wider one."""
    return torch.randn((*shape[:-1], shape[-1] + 8), generator=chance).to(DEVICE, dtype)[..., 3:-5]


@settings(max_examples=8, deadline=None)
@given(seed=st.integers(0, 99), tokens=st.integers(1, 5), width=st.sampled_from([2, 20, 64, 66]), dtype=TYPES)
def test_norms_and_gates_give_what_torch_gives(seed: int, tokens: int, width: int, dtype: torch.dtype) -> None:
    chance = torch.Generator().manual_seed(seed)
    x, y = (columns(chance, dtype, 1, tokens, width) for _ in range(2))
    weight = columns(chance, dtype, width).contiguous()
    close(fused.norm(x, weight, 1e-6), normed(x, weight, 1e-6), width)
    total, out = fused.norm_of_sum(x, y, weight, 1e-6)
    if dtype is not torch.bfloat16 or DEVICE.type == "cuda":  # Triton's interpreter truncates to bfloat16
        assert torch.equal(total, x + y)
    close(total, x + y, 1)
    close(out, normed(total, weight, 1e-6), width)
    close(fused.gate(x, y), functional.silu(x) * y, 1)


def heads(chance: torch.Generator, dtype: torch.dtype, tokens: int, count: int, width: int) -> Tensor:
    return columns(chance, dtype, 1, tokens, count * width).view(1, tokens, count, width)


@settings(max_examples=8, deadline=None)
@given(
    seed=st.integers(0, 99),
    tokens=st.integers(1, 4),
    counts=st.sampled_from([(1, 1), (4, 2), (3, 1)]),
    width=st.sampled_from([8, 24, 64]),
    norms=st.booleans(),
    dtype=TYPES,
)
def test_heads_are_rotated_and_entered(
    seed: int, tokens: int, counts: tuple[int, int], width: int, norms: bool, dtype: torch.dtype
) -> None:
    chance = torch.Generator().manual_seed(seed)
    query, key, value = (heads(chance, dtype, tokens, count, width) for count in (*counts, counts[1]))
    cos, sin = (torch.randn(1, tokens, width, generator=chance).to(DEVICE, dtype) for _ in range(2))
    weights = [columns(chance, dtype, width).contiguous() if norms else None for _ in range(2)]
    expected = []
    for x, weight in zip((query, key), weights, strict=True):
        expected.append(rotated(x if weight is None else normed(x, weight, 1e-5), cos, sin))
        close(fused.rotate(x, weight, 1e-5, cos, sin), expected[-1], width)
    cache = torch.zeros(2, tokens + 1, counts[1], 7, width, device=DEVICE, dtype=dtype)
    slots = torch.from_numpy(slots_of(cache[0], cache[1], tokens + 1)).to(DEVICE)
    rows, places = np.arange(tokens) + 1, np.arange(tokens) + 2
    writes = torch.from_numpy(np.stack([np.arange(tokens), rows, places], axis=1)).to(DEVICE)
    asked, keys = ((x, weight, 1e-5) for x, weight in zip((query, key), weights, strict=True))
    out = fused.enter_rotated(asked, keys, value.transpose(1, 2), cos, sin, slots, writes)
    assert torch.equal(out, fused.rotate(query, weights[0], 1e-5, cos, sin)[0].transpose(0, 1))
    entered = torch.zeros_like(cache)
    turned = fused.rotate(key, weights[1], 1e-5, cos, sin)
    for token, (row, place) in enumerate(zip(rows, places, strict=True)):
        entered[0, row, :, place], entered[1, row, :, place] = turned[0, :, token], value[0, token]
    assert torch.equal(cache, entered)


def test_what_is_not_finite_stays_so() -> None:
    x, weight = torch.ones(1, 3, 8, device=DEVICE), torch.ones(8, device=DEVICE)
    x[0, 1, 5] = torch.nan
    for out in (fused.norm(x, weight, 1e-6), fused.norm_of_sum(x, x, weight, 1e-6)[1], fused.gate(x, x)):
        assert out.isfinite().all(-1).tolist() == [[True, False, True]]


@pytest.mark.parametrize(
    "family", [QWEN, ("qwen2", 4, 2, {}), pytest.param(("llama", 2, 1, {}), marks=pytest.mark.long)], ids=str
)
def test_products_of_one_input_are_one_and_held_once(family: Family) -> None:
    """Numbers copied into the parameters arrive, and a second trace finds them joined."""
    policy: PreTrainedModel = nn.Module.to(model(family), DEVICE)
    before = {name: parameter.clone() for name, parameter in policy.named_parameters()}
    traced = trace(policy, KERNELS)
    graph = traced.func.__self__.graph  # type: ignore[attr-defined]
    assert len(list(graph.find_nodes(op="call_function", target=functional.linear))) == 4 * 2 + 1
    assert all(torch.equal(before[name], parameter) for name, parameter in policy.named_parameters())
    mlp = policy.model.layers[0].mlp
    assert mlp.gate_proj.weight.untyped_storage().data_ptr() == mlp.up_proj.weight.untyped_storage().data_ptr()
    places = [parameter.data_ptr() for parameter in policy.parameters()]
    assert trace(policy, KERNELS) is not traced
    assert [parameter.data_ptr() for parameter in policy.parameters()] == places
    other = copy.deepcopy(policy)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.mul_(1.5)
    assert not torch.equal(other.model.layers[0].mlp.up_proj.weight, mlp.up_proj.weight)
    inputs = *tracing._made_up(policy, 3), tracing._StandIn(), 3, -2
    with torch.inference_mode():
        close(traced(*inputs), module_forward(policy)(*inputs), 1000)
