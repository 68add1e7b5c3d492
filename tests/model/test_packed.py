"""Promises: a packed forward is the forward of each sequence alone, gradients included, for every family of decoders;
sliding windows and capped scores are computed; what is not computed is refused by name.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import (
    Gemma2Config,
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

from stretto.core.errors import ModelFolderError
from stretto.model.layout import Packing, pack
from stretto.model.packed.attention import PACKED_ATTENTION, packed_attention
from tests.tolerances import assert_close, operations_of

SHAPE: dict[str, Any] = {
    "vocab_size": 17,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 24,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
}
SLIDING = ["sliding_attention", "full_attention"]
NO_TOKENS: dict[str, Any] = {"bos_token_id": None, "pad_token_id": 0}
LENGTHS = [5, 1, 9, 2, 9, 3]
FAMILIES = [
    Qwen2Config(**SHAPE, num_key_value_heads=2),
    Qwen3Config(**SHAPE, num_key_value_heads=1, head_dim=8),
    LlamaConfig(**SHAPE, num_key_value_heads=4),
    MistralConfig(**SHAPE, num_key_value_heads=2, head_dim=4, sliding_window=3),
    Gemma3TextConfig(**SHAPE, num_key_value_heads=1, head_dim=8, sliding_window=4, layer_types=SLIDING, **NO_TOKENS),
    Gemma2Config(**SHAPE, num_key_value_heads=2, head_dim=8, sliding_window=4, attn_logit_softcapping=0.5, **NO_TOKENS),
    Qwen3MoeConfig(**SHAPE, num_key_value_heads=2, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=12),
]
CAPPED = {"gemma2"}  # transformers' sdpa leaves the cap out


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
    alone = build(config, "eager" if config.model_type in CAPPED else attention)
    expected = torch.cat([alone(sequence[None]).logits[0] for sequence in sequences])
    assert_close(packed, expected, operations_of(config))


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
        assert_close(ours.grad, theirs.grad, operations_of(config, backward=True))


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
