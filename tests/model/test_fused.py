"""Promises of the fused loops of a decode step:

- each gives what torch's calls give, to rounding; in bfloat16 it rounds where they round;
- a trace of a Qwen or Llama model makes the fused calls, and none of the calls that they replace;
- what is only similar stays as it is.
"""

from collections import Counter
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.nn import functional
from transformers import PreTrainedModel

from stretto_kernels import fused
from stretto_kernels.compiled import AVAILABLE
from stretto_kernels.steps.trace import trace
from tests.model.families import Family
from tests.model.test_trace import model
from tests.tolerances import assert_close

pytestmark = pytest.mark.skipif(not AVAILABLE, reason="numba is not installed")

KINDS = st.sampled_from([torch.float32, torch.bfloat16])
SIZES = {"tokens": st.integers(1, 9), "width": st.sampled_from([2, 16, 20, 64, 66]), "dtype": KINDS}


def normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    heads, half = x.transpose(1, 2), x.shape[-1] // 2
    turned = torch.cat((-heads[..., half:], heads[..., :half]), -1)
    return heads * cos.unsqueeze(1) + turned * sin.unsqueeze(1)


def close(found: Tensor, expected: Tensor, width: int) -> None:
    """In bfloat16 a sum in another order may round to the neighbour, and do so again in what follows."""
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
    assert_close(found, expected, width if found.dtype is torch.float32 else 1, dtype=found.dtype)


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 99), **SIZES)
def test_norms_and_gates_give_what_torch_gives(seed: int, tokens: int, width: int, dtype: torch.dtype) -> None:
    chance = torch.Generator().manual_seed(seed)
    x, y, weight = (torch.randn(shape, generator=chance).to(dtype) for shape in ((1, tokens, width),) * 2 + ((width,),))
    close(fused.norm(x, weight, 1e-6), normed(x, weight, 1e-6), width)
    total, out = fused.norm_of_sum(x, y, weight, 1e-6)
    assert torch.equal(total, x + y)
    close(out, normed(x + y, weight, 1e-6), width)
    close(fused.gate(10 * x, y), functional.silu(10 * x) * y, 16)


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 99), heads=st.integers(1, 3), norm=st.booleans(), **SIZES)
def test_heads_are_normed_and_rotated_as_by_torch(
    seed: int, tokens: int, heads: int, width: int, norm: bool, dtype: torch.dtype
) -> None:
    chance = torch.Generator().manual_seed(seed)
    x, weight = torch.randn(1, tokens, heads, width, generator=chance).to(dtype), torch.rand(width).to(dtype)
    angles = torch.rand(1, tokens, width, generator=chance) * 7
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    expected = rotated(normed(x, weight, 1e-5) if norm else x, cos, sin)
    close(fused.rotate(x, weight if norm else None, 1e-5, cos, sin), expected, width)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_not_finite_stays_so(dtype: torch.dtype) -> None:
    x, weight = torch.ones(1, 3, 8, dtype=dtype), torch.ones(8, dtype=dtype)
    x[0, 1, 5] = torch.nan
    for out in (fused.norm(x, weight, 1e-6), fused.norm_of_sum(x, x, weight, 1e-6)[1], fused.gate(x, x)):
        assert out.isfinite().all(-1).tolist() == [[True, False, True]]
    assert not fused.gate(x.clone().fill_(torch.inf), x).isfinite().any()


def calls(policy: PreTrainedModel) -> Counter[str]:
    """The calls of a policy's trace, by name."""
    traced = trace(policy)
    assert isinstance(traced, partial)
    module = getattr(traced.func, "__self__", None)
    assert isinstance(module, GraphModule)
    nodes = [node for node in module.graph.nodes if node.op in ("call_function", "call_method")]
    return Counter(node.target if isinstance(node.target, str) else node.target.__name__ for node in nodes)


REPLACED = {"pow", "mean", "rsqrt", "neg", "silu", "add"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", [("qwen3", 4, 1, {}), ("llama", 2, 1, {}), ("mistral", 4, 2, {})], ids=str)
def test_a_layer_is_a_few_calls(family: Family, dtype: torch.dtype) -> None:
    made = calls(nn.Module.to(model(family), dtype))
    assert {name: made[name] for name in ("norm", "norm_of_sum", "rotate", "gate")} == {
        "norm": 1,
        "norm_of_sum": 4,
        "rotate": 4,
        "gate": 2,
    }
    assert not REPLACED & set(made)


def test_what_is_only_similar_stays() -> None:
    """Gemma's norms multiply by 1 + weight, and its gate has another function; its rotation is the same."""
    made = calls(model(("gemma2", 4, 2, {})))
    assert made["rotate"] == 4
    assert not {"norm", "norm_of_sum", "gate"} & set(made)
    assert made["rsqrt"] > 0
