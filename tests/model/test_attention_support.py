"""Promises: kinds of attention that are not computed are refused by name, before anything is generated or trained; what
a module does not hand to its attention function is noticed; logits that cannot be trained are known by the config.
"""

import copy
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from stretto.core.errors import ModelFolderError
from stretto.model.attention_support import check_attention, refuse_unsupported, refuse_untrainable
from stretto.model.decode.policy import DecodePolicy
from stretto.model.packed.attention import PACKED_ATTENTION
from stretto.model.packed.logprobs import check_policy
from tests.model import families
from tests.model.families import SLIDING

DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
LONG = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0] * 8,
    "long_factor": [2.0] * 8,
    "original_max_position_embeddings": 64,
}


def config(family: str, **special: object) -> PreTrainedConfig:
    return families.config(family, 2, 1, special)


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
        ({"rope_parameters": DYNAMIC}, "rotary frequencies of the kind 'dynamic'"),
        ({"rope_parameters": LONG}, "rotary frequencies of the kind 'longrope'"),
    ],
)
def test_what_the_config_gives_away_is_refused_by_name(settings: dict[str, object], found: str) -> None:
    with pytest.raises(ModelFolderError, match=found):
        refuse_unsupported(config("qwen3", **settings))


def test_rotary_frequencies_are_looked_at_for_each_kind_of_layer() -> None:
    plain = {"rope_type": "default", "rope_theta": 1e4}
    for sliding, full in ((plain, DYNAMIC), (LONG, plain)):
        rope = {"sliding_attention": sliding, "full_attention": full}
        with pytest.raises(ModelFolderError, match=r"'dynamic'|'longrope'"):
            check_attention(model("gemma3_text", sliding_window=64, layer_types=SLIDING, rope_parameters=rope))


@pytest.mark.parametrize("kind", ["linear", "yarn"])
def test_rotary_frequencies_that_are_the_same_for_every_length_are_computed(kind: str) -> None:
    rope = {"rope_type": kind, "rope_theta": 1e4, "factor": 2.0, "original_max_position_embeddings": 128}
    check_attention(model("llama", rope_parameters=rope))


@pytest.mark.parametrize(
    ("family", "settings", "found"),
    [
        ("gemma2", {"layer_types": SLIDING}, r"config.json \(gemma2\): final_logit_softcapping = 30.0 changes"),
        ("gemma3_text", {"layer_types": SLIDING, "final_logit_softcapping": 20.0}, "final_logit_softcapping = 20.0"),
        ("cohere", {}, "logit_scale = 0.0625"),
        ("granite", {"logits_scaling": 8.0}, "logits_scaling = 8.0"),
        ("gemma2", {"layer_types": SLIDING, "final_logit_softcapping": None}, None),
        ("gemma3_text", {"layer_types": SLIDING}, None),
        ("cohere", {"logit_scale": 1.0}, None),
        ("granite", {}, None),
        ("qwen3", {}, None),
    ],
)
def test_what_a_config_says_of_its_logits_is_what_the_check_of_the_model_finds(
    family: str, settings: dict[str, Any], found: str | None
) -> None:
    """An engine serves all of them; what is refused before anything starts is what a trainer would refuse."""
    check_attention(model(family, **settings))
    trained: PreTrainedModel = AutoModelForCausalLM.from_config(
        config(family, **settings), attn_implementation=PACKED_ATTENTION
    ).eval()
    if found is None:
        refuse_untrainable(config(family, **settings))
        check_policy(trained)
        return
    with pytest.raises(ModelFolderError, match=found):
        refuse_untrainable(config(family, **settings))
    with pytest.raises(ModelFolderError, match="after the output matrix"):
        check_policy(trained)


def test_attention_sinks_are_refused_before_the_first_token() -> None:
    sinking = model("gpt_oss", num_local_experts=2, num_experts_per_tok=1, layer_types=SLIDING, rope_parameters=None)
    with pytest.raises(ModelFolderError, match="s_aux"):
        DecodePolicy(sinking)


def test_attention_to_later_tokens_is_refused() -> None:
    with pytest.raises(ModelFolderError, match="later tokens"):
        check_attention(model("gemma3_text", use_bidirectional_attention=True, layer_types=SLIDING))


def test_a_window_that_the_module_does_not_hand_on_is_refused_unless_it_is_as_wide_as_the_context() -> None:
    experts = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16}
    sliding = {"use_sliding_window": True, "layer_types": SLIDING, **experts}
    with pytest.raises(ModelFolderError, match="layer 0 does not hand"):
        check_attention(model("qwen2_moe", sliding_window=16, **sliding))
    check_attention(model("qwen2_moe", sliding_window=256, **sliding))
