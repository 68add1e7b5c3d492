"""Promises of products with a weight in panels:

- they give what `nn.Linear` gives, to rounding, for any number of tokens and any width;
- a token's outputs are the same to the last bit whatever stands beside it;
- in bfloat16 each output is the float32 sum, rounded once.
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

from stretto_kernels.compiled import AVAILABLE
from stretto_kernels.panels import WIDE, in_panels, multiply_panels
from tests.tolerances import assert_close

pytestmark = pytest.mark.skipif(not AVAILABLE, reason="numba is not installed")

KINDS = st.sampled_from([torch.float32, torch.bfloat16])
WIDTHS = st.sampled_from([1, WIDE - 1, WIDE, WIDE + 1, 4 * WIDE, 5 * WIDE + 3, 9 * WIDE])


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 99), st.sampled_from([1, 2, 5, 6, 7, 13, 96, 97, 200]), st.integers(1, 70), WIDTHS, KINDS)
def test_products_are_those_of_torch(seed: int, tokens: int, depth: int, width: int, dtype: torch.dtype) -> None:
    chance = torch.Generator().manual_seed(seed)
    shapes = (tokens, depth), (width, depth), (width,)
    x, weight, bias = (torch.randn(shape, generator=chance).to(dtype) for shape in shapes)
    for added in (None, bias):
        found = multiply_panels(x, in_panels(weight), added, width)
        sums = functional.linear(x.float(), weight.float(), None if added is None else added.float())
        assert found.dtype is dtype
        assert_close(found, sums.to(dtype), depth if dtype is torch.float32 else 1, dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_stands_beside_a_token_changes_no_bit_of_its_outputs(dtype: torch.dtype) -> None:
    torch.manual_seed(3)
    x, weight = torch.randn(110, 64).to(dtype), torch.randn(7 * WIDE + 5, 64).to(dtype)
    panels = in_panels(weight)
    alone = torch.cat([multiply_panels(row[None], panels, None, len(weight)) for row in x])
    for tokens in (*range(2, 13), 16, 110):
        assert torch.equal(multiply_panels(x[:tokens], panels, None, len(weight)), alone[:tokens])


def test_a_half_between_two_numbers_goes_to_the_even_one() -> None:
    """1 + 2**-8 and 1 + 3 · 2**-8 lie in the middle of two numbers of bfloat16."""
    x = torch.tensor([[1.0, 2.0**-8], [1.0, 3 * 2.0**-8]]).bfloat16()
    found = multiply_panels(x, in_panels(torch.ones(WIDE, 2).bfloat16()), None, WIDE)
    assert torch.equal(found, torch.tensor([[1.0], [1.0 + 4 * 2.0**-8]]).bfloat16().expand(2, WIDE))


@pytest.mark.parametrize("width", [WIDE - 3, 2 * WIDE, 5 * WIDE + 1])
def test_a_copy_in_given_memory_is_the_copy(width: int) -> None:
    weight, other = torch.randn(width, 24), torch.randn(width, 24)
    copy = in_panels(weight)
    first, fresh = in_panels(other, copy), in_panels(other)
    assert first.data_ptr() == copy.data_ptr()
    assert torch.equal(first, fresh)
