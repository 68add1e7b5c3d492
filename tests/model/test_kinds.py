"""Promises: kinds of attention that are not computed are refused by name, before anything is generated or trained; what
a module does not hand to its attention function is noticed.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from stretto.core.errors import ModelFolderError
from stretto.model.cached import CachedPolicy
from stretto.model.kinds import check_attention, refuse_unsupported

SHAPE: dict[str, Any] = {
    "vocab_size": 30,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "intermediate_size": 48,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": 1,
}
SLIDING = ["sliding_attention", "full_attention"]


def config(family: str, **special: object) -> PreTrainedConfig:
    return AutoConfig.for_model(family, **SHAPE | special)


def model(family: str, **special: object) -> PreTrainedModel:
    made: PreTrainedModel = AutoModelForCausalLM.from_config(config(family, **special))
    return made


def test_a_model_is_asked_for_the_windows_of_its_layers_and_keeps_its_attention() -> None:
    gemma = model("gemma3_text", sliding_window=64, layer_types=SLIDING)
    before = copy.deepcopy(gemma.config)
    asked = check_attention(gemma)
    assert (asked.layers, asked.kv_heads, asked.head_dim, asked.windows) == (2, 1, 16, frozenset({64, None}))
    assert gemma.config._attn_implementation == before._attn_implementation
    assert check_attention(model("mistral", sliding_window=64)).windows == {64}
    assert check_attention(model("llama")).windows == {None}
    half = model("qwen2", use_sliding_window=True, sliding_window=16, max_window_layers=1)
    assert check_attention(half).windows == {16, None}


def test_the_shape_of_keys_is_the_modules_and_not_the_configs() -> None:
    asked = check_attention(model("gpt_neox"))  # it has neither key heads nor a width of its own, whatever is said
    assert (asked.kv_heads, asked.head_dim) == (2, 16)
    asked = check_attention(model("gpt_neox", num_attention_heads=4))
    assert (asked.kv_heads, asked.head_dim) == (4, 8)


@pytest.mark.parametrize(
    ("settings", "found"),
    [
        ({"layer_types": ["full_attention", "chunked_attention"]}, "'chunked_attention'"),
        ({"kv_lora_rank": 8}, "latent"),
        ({"num_kv_shared_layers": 2}, "shared between layers"),
    ],
)
def test_what_the_config_gives_away_is_refused_by_name(settings: dict[str, object], found: str) -> None:
    with pytest.raises(ModelFolderError, match=found):
        refuse_unsupported(config("qwen3", **settings))


def test_attention_sinks_are_refused_before_the_first_token() -> None:
    sinking = model("gpt_oss", num_local_experts=2, num_experts_per_tok=1, layer_types=SLIDING, rope_parameters=None)
    with pytest.raises(ModelFolderError, match="s_aux"):
        CachedPolicy(sinking)


def test_attention_to_later_tokens_is_refused() -> None:
    with pytest.raises(ModelFolderError, match="later tokens"):
        check_attention(model("gemma3_text", use_bidirectional_attention=True, layer_types=SLIDING))


def test_a_window_that_the_module_does_not_hand_on_is_refused_unless_it_is_as_wide_as_the_context() -> None:
    experts = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16}
    sliding = {"use_sliding_window": True, "layer_types": SLIDING, **experts}
    with pytest.raises(ModelFolderError, match="layer 0 does not hand"):
        check_attention(model("qwen2_moe", sliding_window=16, **sliding))
    check_attention(model("qwen2_moe", sliding_window=256, **sliding))
