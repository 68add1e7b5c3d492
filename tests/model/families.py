"""Small random models of every kind that the engine serves."""

from typing import Any

from transformers import AutoConfig, PreTrainedConfig

from tests.tiny_policy import sized

VOCABULARY = 30
SLIDING = ["sliding_attention", "full_attention"]
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
Family = tuple[str, int, int, dict[str, Any]]
FAMILIES: list[Family] = [
    ("qwen3", 2, 2, {}),
    ("qwen3", 4, 1, {}),
    ("qwen2", 4, 2, {}),
    ("llama", 2, 1, {}),
    ("mistral", 4, 2, {"sliding_window": 11}),
    ("gemma3_text", 4, 1, {"sliding_window": 7, "layer_types": SLIDING, "query_pre_attn_scalar": 8}),
    ("gemma2", 4, 2, {"sliding_window": 9, "layer_types": SLIDING, "attn_logit_softcapping": 0.5}),
    ("qwen3_moe", 4, 2, EXPERTS),
    ("mixtral", 2, 1, {"num_local_experts": 4, "num_experts_per_tok": 2}),
]


def config(family: str, heads: int, kv_heads: int, special: dict[str, Any] | None = None) -> PreTrainedConfig:
    shape = sized(VOCABULARY, 32, inner=48, layers=2, heads=(heads, kv_heads), head=16, max_position_embeddings=256)
    ends = {"initializer_range": 0.15, "bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0}
    return AutoConfig.for_model(family, **shape | ends | (special or {}))
