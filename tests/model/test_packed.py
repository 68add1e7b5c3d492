"""Promises: a packed forward is the forward of each sequence alone, gradients included, for every family of decoders;
attention that is not plain causal attention is refused by name.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig, PretrainedConfig, PreTrainedModel, Qwen2Config, Qwen3Config
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

from stretto.core.errors import ModelFolderError
from stretto.model.layout import Packing, pack
from stretto.model.packed import PACKED_ATTENTION, packed_attention

SHAPE: dict[str, Any] = {
    "vocab_size": 17,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 24,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
}
LENGTHS = [5, 1, 9, 2, 9, 3]
FAMILIES = [
    Qwen2Config(**SHAPE, num_key_value_heads=2),
    Qwen3Config(**SHAPE, num_key_value_heads=1, head_dim=8),
    LlamaConfig(**SHAPE, num_key_value_heads=4),
]


def build(config: PretrainedConfig, attention: str) -> PreTrainedModel:
    torch.manual_seed(3)
    copy = type(config).from_dict(config.to_dict())
    model: PreTrainedModel = AutoModelForCausalLM.from_config(copy, attn_implementation=attention)
    model.eval()
    return model


def tokens() -> list[torch.Tensor]:
    return list(torch.randint(17, (sum(LENGTHS),), generator=torch.Generator().manual_seed(1)).split(LENGTHS))


def forward(model: PreTrainedModel, packing: Packing, sequences: list[torch.Tensor]) -> torch.Tensor:
    ids = torch.cat(sequences)[None]
    logits: torch.Tensor = model(ids, position_ids=packing.position_ids, use_cache=False, packing=packing).logits[0]
    return logits


@pytest.mark.parametrize("config", FAMILIES, ids=lambda config: config.model_type)
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_the_packed_forward_is_the_forward_of_each_sequence_alone(config: PretrainedConfig, attention: str) -> None:
    sequences = tokens()
    packed = forward(build(config, PACKED_ATTENTION), pack(LENGTHS), sequences)
    alone = build(config, attention)
    expected = torch.cat([alone(sequence[None]).logits[0] for sequence in sequences])
    torch.testing.assert_close(packed, expected, rtol=0, atol=2e-6)


@pytest.mark.parametrize("config", FAMILIES, ids=lambda config: config.model_type)
def test_the_packed_gradient_is_the_sum_of_the_gradients_of_each_sequence_alone(config: PretrainedConfig) -> None:
    sequences = tokens()
    packed, alone = build(config, PACKED_ATTENTION), build(config, "eager")
    forward(packed, pack(LENGTHS), sequences).square().sum().backward()
    for sequence in sequences:
        alone(sequence[None]).logits.square().sum().backward()
    for (name, ours), theirs in zip(packed.named_parameters(), alone.parameters(), strict=True):
        assert ours.grad is not None, name
        assert theirs.grad is not None, name
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-5 * float(theirs.grad.abs().max()))


@pytest.mark.parametrize("asked", [{"sliding_window": 4}, {"softcap": 30.0}, {"s_aux": torch.zeros(1)}])
def test_attention_that_is_not_plain_causal_is_refused_by_name(asked: dict[str, float]) -> None:
    x = torch.zeros(1, 2, 5, 8)
    with pytest.raises(ModelFolderError, match=next(iter(asked))):
        packed_attention(torch.nn.Identity(), x, x, x, None, packing=pack([5]), **asked)  # type: ignore[arg-type]


def test_a_sliding_window_that_no_sequence_reaches_is_plain_attention() -> None:
    x = torch.randn(1, 2, 5, 8)
    plain, _ = packed_attention(torch.nn.Identity(), x, x, x, None, packing=pack([5]))
    windowed, _ = packed_attention(torch.nn.Identity(), x, x, x, None, packing=pack([5]), sliding_window=5)
    assert torch.equal(plain, windowed)
