"""A tiny Qwen3 with the packed attention; each call gives the same parameters in new tensors."""

from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from stretto.core.records import Sampling
from stretto.model.packed.attention import PACKED_ATTENTION
from stretto.trainer.config import TrainerConfig
from stretto.trainer.messages import TrainerSpec
from tests.tiny_policy import sized
from tests.tolerances import operations


def tiny(*, tied: bool = False) -> PreTrainedModel:
    torch.manual_seed(7)
    shape = sized(13, width=16, inner=24, layers=2, heads=(2, 1), head=8, max_position_embeddings=64)
    config = Qwen3Config(**shape, initializer_range=0.3, tie_word_embeddings=tied)
    model: PreTrainedModel = Qwen3ForCausalLM._from_config(config, attn_implementation=PACKED_ATTENTION)
    return model


def spec_of(model: Path | str, trainer: TrainerConfig, sampling: Sampling, **further: Any) -> TrainerSpec:
    """For a trainer's role without a mailbox."""
    return TrainerSpec(str(model), "", "", trainer.model_dump_json(), "{}", sampling, threads=1, **further)


def elsewhere(model: PreTrainedModel) -> PreTrainedModel:
    """The same model, changed: a reference policy that is not the one in training."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.9)
    return model


#: From a token to its log-probability, and back.
FORWARD, BACKWARD = (operations(24, 2, backward=backward) for backward in (False, True))
