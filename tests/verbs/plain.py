"""What is compared with: transformers' own forward, and torch's own log-probabilities."""

from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

import stretto


def plain_model(folder: Path) -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.eval()
    return model


def plain_logprobs(model: nn.Module, datum: stretto.Datum) -> Tensor:
    logits = model(torch.tensor([datum.token_ids])).logits[0]
    found: Tensor = logits.log_softmax(-1).gather(1, torch.tensor(datum.targets)[:, None])[:, 0]
    return found
