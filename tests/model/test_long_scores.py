"""Promises: where no fused kernel computes a layer's scores, they are in memory block by block, also backward, and
the result is that of all at once; query heads share a key head only where a fused kernel can, and elsewhere keys are
repeated, with the same result; head sizes that flash attention does not take go another way.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from stretto.model.attention_support import Rule
from stretto.model.packed import attention
from stretto.model.packed.attention import _flash_takes, _in_bucket, _shares_heads
from tests.tolerances import assert_close

LENGTH = 37


def leaves() -> list[Tensor]:
    chance = torch.Generator().manual_seed(1)
    return [torch.randn(2, heads, LENGTH, 8, generator=chance).requires_grad_() for heads in (4, 2, 2)]


def attended(rule: Rule) -> list[Tensor]:
    """Attention of a bucket, and its gradients."""
    own = leaves()
    query, keys, values = own
    out = _in_bucket(query, keys, values, rule)
    gradients = torch.autograd.grad(out.square().sum(), own)
    return [out.detach(), *gradients]


@pytest.mark.parametrize("rule", [Rule(softcap=0.7), Rule(softcap=30.0, window=5), Rule(softcap=2.0, scaling=0.1)])
def test_capped_scores_are_computed_block_by_block(rule: Rule, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, most = attended(rule), list[int]()
    by_products = attention.attention_by_products

    def watched(query: Tensor, key: Tensor, *further: object) -> Tensor:
        most.append(query.shape[:-1].numel() * key.shape[-2])
        return by_products(query, key, *further)  # type: ignore[arg-type]

    monkeypatch.setattr(attention, "attention_by_products", watched)
    monkeypatch.setattr(attention, "SCORES", bound := 2 * 4 * 5 * LENGTH)
    for ours, expected in zip(attended(rule), whole, strict=True):
        assert_close(ours, expected)
    assert max(most) <= bound
    assert len(most) == 2 * -(-LENGTH // 5), "each block twice: the backward pass computes it again"


@pytest.mark.parametrize("rule", [Rule(), Rule(window=5)])
def test_keys_that_are_repeated_are_those_that_are_shared(rule: Rule, monkeypatch: pytest.MonkeyPatch) -> None:
    shared = attended(rule)
    monkeypatch.setattr(attention, "_shares_heads", lambda *_: False)
    for ours, expected in zip(attended(rule), shared, strict=True):
        assert_close(ours, expected)


@pytest.mark.parametrize(
    ("device", "dtype", "width", "masked", "shares"),
    [
        ("cpu", torch.float32, 8, True, True),
        ("cuda", torch.float32, 128, False, False),
        ("cuda", torch.bfloat16, 128, False, True),
        ("cuda", torch.bfloat16, 128, True, False),
        ("cuda", torch.bfloat16, 512, False, False),
    ],
)
def test_heads_are_shared_where_a_fused_kernel_can(
    device: str, dtype: torch.dtype, width: int, masked: bool, shares: bool
) -> None:
    with FakeTensorMode():
        assert _shares_heads(torch.empty(1, 2, 3, width, device=device, dtype=dtype), masked) is shares
    assert [size for size in (8, 20, 64, 128, 256, 264, 512) if _flash_takes(size)] == [8, 64, 128, 256]
