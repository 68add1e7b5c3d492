"""The smallest policy that is worth a test: 22 tokens (0 padding, 1 end), distributions neither flat nor a point."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from stretto.model.hf.build import build_policy
from stretto.model.hf.config import BuildConfig

TINY = BuildConfig(
    hidden_size=32,
    layers=2,
    heads=2,
    kv_heads=1,
    head_dim=16,
    intermediate_size=48,
    context_length=192,
    alphabet="0123456789+-*/=;#?()",
    initializer_range=0.15,
)
#: For tests that never look at what it says.
SMALL = BuildConfig(hidden_size=16, layers=1, heads=1, kv_heads=1, head_dim=16, intermediate_size=16, context_length=32)


def sized(
    vocabulary: int, width: int, inner: int, layers: int, heads: tuple[int, int], head: int | None = None, **more: Any
) -> dict[str, Any]:
    """Keys of a config of transformers. `heads`: of queries, and of keys and values; `more`: its other keys."""
    shape = {"vocab_size": vocabulary, "hidden_size": width, "intermediate_size": inner, "num_hidden_layers": layers}
    shape |= {"num_attention_heads": heads[0], "num_key_value_heads": heads[1]}
    return shape | ({} if head is None else {"head_dim": head}) | more


def make_of_family(folder: Path, family: str, special: Mapping[str, Any], shape: BuildConfig, seed: int) -> None:
    """Write a random model of another family beside the tokenizer that is there; `special`: keys of its config."""
    config = AutoConfig.for_model(
        family,
        vocab_size=len(shape.vocabulary),
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        max_position_embeddings=shape.context_length,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
        **shape.model_dump(include={"hidden_size", "head_dim", "intermediate_size", "initializer_range"}),
        **special,
    )
    torch.manual_seed(seed)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)


SHORT = TINY.model_copy(update={"context_length": 16})
#: OPT, as GPT-2, has learned positions: a token behind the context has none.
LEARNED: Mapping[str, Any] = {"ffn_dim": 48, "word_embed_proj_dim": 32}
#: In a folder each expert has tensors of its own, in the module all experts have one.
EXPERTS: Mapping[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}


def build_of_family(folder: Path, family: str, special: Mapping[str, Any], shape: BuildConfig = TINY) -> Path:
    """A folder with a random model of another family and a tokenizer."""
    build_policy(shape, folder, seed=1)
    make_of_family(folder, family, special, shape, seed=5)
    return folder
