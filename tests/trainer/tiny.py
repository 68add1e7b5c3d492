"""A tiny Qwen3 with the packed attention; each call gives the same parameters in new tensors."""

import torch
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from stretto.model.packed.attention import PACKED_ATTENTION
from tests.tolerances import operations


def tiny(*, tied: bool = False) -> PreTrainedModel:
    torch.manual_seed(7)
    config = Qwen3Config(
        vocab_size=13,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        intermediate_size=24,
        max_position_embeddings=64,
        initializer_range=0.3,
        tie_word_embeddings=tied,
    )
    model: PreTrainedModel = Qwen3ForCausalLM._from_config(config, attn_implementation=PACKED_ATTENTION)
    return model


def elsewhere(model: PreTrainedModel) -> PreTrainedModel:
    """The same model, changed: a reference policy that is not the one in training."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.9)
    return model


#: From a token to its log-probability, and back.
FORWARD, BACKWARD = (operations(24, 2, backward=backward) for backward in (False, True))
