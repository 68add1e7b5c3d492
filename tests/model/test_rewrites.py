"""Promises: what takes the place of a few calls gives what they gave."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from stretto.model.kernels.choice import KernelChoice
from stretto.model.kernels.matmul import Kernel
from stretto.model.trace.rewrites import rotate, sign
from tests.tolerances import assert_close


@given(
    seed=st.integers(0, 99), tokens=st.integers(1, 9), heads=st.integers(1, 3), half=st.sampled_from([1, 2, 5, 8, 32])
)
def test_a_rotation_with_the_sign_in_the_sine_is_the_same_to_the_last_bit(
    seed: int, tokens: int, heads: int, half: int
) -> None:
    torch.manual_seed(seed)
    x, cos, sin = torch.randn(1, heads, tokens, 2 * half), *torch.randn(2, 1, 1, tokens, 2 * half)
    turned = torch.cat((-x[..., half:], x[..., :half]), -1)
    assert torch.equal(rotate(x, cos, sign(sin)), x * cos + turned * sin)


def test_a_quarter_turn_swaps_the_halves_and_one_sign() -> None:
    x, cos, sin = torch.tensor([[1.0, 2.0, 3.0, 4.0]]), torch.zeros(1, 4), torch.ones(1, 4)
    assert rotate(x, cos, sign(sin)).tolist() == [[-3.0, -4.0, 1.0, 2.0]]


def test_few_tokens_are_multiplied_by_the_default_and_many_by_the_kernel() -> None:
    layer, fewest = nn.Linear(64, 512).requires_grad_(False), 24
    kernel = Kernel(KernelChoice("onednn", fewest), torch.float32)
    for tokens in (1, fewest - 1, fewest, fewest + 1):
        x = torch.randn(1, tokens, 64)
        assert_close(kernel.multiply(x, layer.weight, layer.bias), layer(x), 64)
    x = torch.randn(1, fewest - 1, 64)
    assert torch.equal(kernel.multiply(x, layer.weight, layer.bias), layer(x))
