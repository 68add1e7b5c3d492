"""Promises: layers that multiply by oneDNN give the values and gradients of `nn.Linear`, and can be changed back."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from stretto.model.kernels.matmul import OneDnnLinear, use_onednn
from tests.tolerances import assert_close

pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this torch has no oneDNN")


def pair(wide_in: int, wide_out: int, bias: bool) -> tuple[nn.Linear, nn.Linear]:
    torch.manual_seed(1)
    plain = nn.Linear(wide_in, wide_out, bias=bias)
    ours = nn.Linear(wide_in, wide_out, bias=bias)
    ours.load_state_dict(plain.state_dict())
    assert use_onednn(ours) == 1
    assert type(ours) is OneDnnLinear
    return plain, ours


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(8, 24), (24, 8), (16, 16), (7, 1)])
@pytest.mark.parametrize("tokens", [(40,), (2, 33), (1, 3)])
def test_values_and_gradients_are_those_of_nn_linear(
    shape: tuple[int, int], tokens: tuple[int, ...], bias: bool
) -> None:
    plain, ours = pair(*shape, bias)
    x = torch.randn(*tokens, shape[0])
    left, right = x.clone().requires_grad_(), x.clone().requires_grad_()
    plain(left).square().sum().backward()
    ours(right).square().sum().backward()
    assert_close(ours(x), plain(x), shape[0])
    assert_close(right.grad, left.grad, sum(shape))
    for mine, theirs in zip(ours.parameters(), plain.parameters(), strict=True):
        assert_close(mine.grad, theirs.grad, shape[0] + x.shape[:-1].numel())


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_types_are_left_to_torch(dtype: torch.dtype) -> None:
    plain, ours = pair(8, 24, bias=True)
    x = torch.randn(40, 8, dtype=dtype)
    assert torch.equal(plain.to(dtype)(x), ours.to(dtype)(x))


def test_autocast_is_respected() -> None:
    _, ours = pair(8, 24, bias=False)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert ours(torch.randn(40, 8)).dtype is torch.bfloat16


def test_the_change_leaves_names_and_other_layers_alone() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    names = list(model.state_dict())
    assert use_onednn(model) == 2
    assert list(model.state_dict()) == names
    assert [type(layer) for layer in model] == [OneDnnLinear, nn.ReLU, OneDnnLinear]
    assert use_onednn(model) == 0
