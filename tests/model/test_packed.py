"""Promises: a packed forward is the forward of each sequence alone, gradients included, for every family of decoders;
sliding windows and capped scores are computed; what is not computed is refused by name.

Where no fused kernel computes a layer's scores, they are in memory block by block, also backward, and the result is
that of all at once; query heads share a key head only where a fused kernel can, and elsewhere keys are repeated, with
the same result; head sizes that flash attention does not take go another way.
"""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoModelForCausalLM, PreTrainedModel

from stretto.core.errors import ModelFolderError
from stretto.model.layout import Packing, pack
from stretto.model.packed import attention
from stretto.model.packed.attention import PACKED_ATTENTION, _flash_takes, _in_bucket, _shares_heads, packed_attention
from stretto_kernels.rule import Rule
from tests.model.families import FAMILIES, VOCABULARY, Family, config
from tests.tolerances import assert_close, operations_of

LENGTHS = [5, 1, 9, 2, 9, 3, 14]


def build(family: Family, attention: str) -> PreTrainedModel:
    torch.manual_seed(3)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config(*family), attn_implementation=attention)
    model.eval()
    return model


def tokens() -> list[torch.Tensor]:
    return list(torch.randint(VOCABULARY, (sum(LENGTHS),), generator=torch.Generator().manual_seed(1)).split(LENGTHS))


def forward(model: PreTrainedModel, packing: Packing, sequences: list[torch.Tensor]) -> torch.Tensor:
    ids = torch.cat(sequences)[None]
    logits: torch.Tensor = model(ids, position_ids=packing.position_ids, use_cache=False, packing=packing).logits[0]
    return logits


@pytest.mark.parametrize("family", FAMILIES, ids=str)
def test_the_packed_forward_and_its_gradient_are_those_of_each_sequence_alone(family: Family) -> None:
    sequences, shape = tokens(), config(*family)
    ours, theirs = build(family, PACKED_ATTENTION), build(family, "eager")
    packed = forward(ours, pack(LENGTHS), sequences)
    alone = [theirs(sequence[None]).logits[0] for sequence in sequences]
    assert_close(packed, torch.cat(alone), operations_of(shape))
    packed.square().sum().backward()
    torch.stack([logits.square().sum() for logits in alone]).sum().backward()
    for (name, mine), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert mine.grad is not None, name
        assert other.grad is not None, name
        assert_close(mine.grad, other.grad, operations_of(shape, backward=True))


def test_the_packed_forward_reads_nothing_back_from_its_device() -> None:
    """A GPU would be waited for; the meta device has nothing to read."""
    sequences = [one.to("meta") for one in tokens()]
    model: Any = build(FAMILIES[0], PACKED_ATTENTION)
    assert forward(model.to("meta"), pack(LENGTHS, "meta"), sequences).is_meta


@pytest.mark.parametrize("asked", [{"s_aux": torch.zeros(1)}, {"position_bias": torch.zeros(1)}])
def test_attention_that_is_not_computed_is_refused_by_name(asked: dict[str, Any]) -> None:
    x = torch.zeros(1, 2, 5, 8)
    with pytest.raises(ModelFolderError, match=next(iter(asked))):
        packed_attention(torch.nn.Identity(), x, x, x, None, packing=pack([5]), **asked)


def test_a_sliding_window_that_no_sequence_reaches_is_plain_attention() -> None:
    x = torch.randn(1, 2, 5, 8)
    plain, _ = packed_attention(torch.nn.Identity(), x, x, x, None, packing=pack([5]))
    windowed, _ = packed_attention(torch.nn.Identity(), x, x, x, None, packing=pack([5]), sliding_window=5)
    assert torch.equal(plain, windowed)


LONG = 37


def leaves() -> list[Tensor]:
    chance = torch.Generator().manual_seed(1)
    return [torch.randn(2, heads, LONG, 8, generator=chance).requires_grad_() for heads in (4, 2, 2)]


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
    monkeypatch.setattr(attention, "SCORES", bound := 2 * 4 * 5 * LONG)
    for ours, expected in zip(attended(rule), whole, strict=True):
        assert_close(ours, expected)
    assert max(most) <= bound
    assert len(most) == 2 * -(-LONG // 5), "each block twice: the backward pass computes it again"


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
def test_heads_are_shared_where_fused(device: str, dtype: torch.dtype, width: int, masked: bool, shares: bool) -> None:
    with FakeTensorMode():
        assert _shares_heads(torch.empty(1, 2, 3, width, device=device, dtype=dtype), masked) is shares
    assert [size for size in (8, 20, 64, 128, 256, 264, 512) if _flash_takes(size)] == [8, 64, 128, 256]
