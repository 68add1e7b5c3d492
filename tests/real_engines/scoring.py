"""What transformers, in float32, says of a server's tokens."""

from collections.abc import Mapping
from itertools import groupby
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from stretto.core.records import Completion, GenerateRequest, Sampling

TOLERANCE = 1e-4  # nats


def recomputed(models: Mapping[int, PreTrainedModel], wanted: GenerateRequest, completion: Completion) -> Tensor:
    """Errors [L] of the log-probabilities if each token's whole past was computed by the weights of its version."""
    ids = torch.tensor([[*wanted.prompt_token_ids, *completion.token_ids]])
    first = len(wanted.prompt_token_ids) - 1
    with torch.no_grad():
        logits = {version: models[version](ids).logits[0, first:-1] for version in set(completion.versions)}
    lines = torch.stack([logits[version][at] for at, version in enumerate(completion.versions)])
    return _errors(lines, wanted.sampling, completion)


def kept(models: Mapping[int, PreTrainedModel], wanted: GenerateRequest, completion: Completion) -> Tensor:
    """Errors [L] if the KV cache of older versions was kept: a token is computed once, by the weights that sample the
    token after it."""
    cache, lines, done = None, [], 0
    inputs = [*wanted.prompt_token_ids, *completion.token_ids[:-1]]
    spans = [(version, len(list(tokens))) for version, tokens in groupby(completion.versions)]
    for version, count in spans:
        new = count if done else len(wanted.prompt_token_ids) + count - 1
        with torch.no_grad():
            model: Any = models[version]
            told = model(torch.tensor([inputs[done : done + new]]), past_key_values=cache, use_cache=True)
        cache = told.past_key_values
        lines.append(told.logits[0, -count:])
        done += new
    return _errors(torch.cat(lines), wanted.sampling, completion)


def _errors(logits_LV: Tensor, sampling: Sampling, completion: Completion) -> Tensor:
    tokens_L = torch.tensor(completion.token_ids)
    expected_LV = distribution(logits_LV, sampling)
    return (expected_LV[torch.arange(len(tokens_L)), tokens_L] - torch.tensor(completion.behavior_logprobs)).abs()


def distribution(logits_LV: Tensor, sampling: Sampling) -> Tensor:
    """Log-probabilities that are sampled from: temperature, the `top_k` likeliest, the fewest likeliest of these whose
    probability reaches `top_p`, what is left renormalised."""
    scaled_LV = logits_LV.double() / sampling.temperature
    order_LV = scaled_LV.argsort(-1, descending=True)
    sorted_LV = scaled_LV.gather(-1, order_LV)
    if sampling.top_k:
        sorted_LV[:, sampling.top_k :] = -torch.inf
    probabilities_LV = sorted_LV.softmax(-1)
    before_LV = probabilities_LV.cumsum(-1) - probabilities_LV
    sorted_LV = sorted_LV.masked_fill(before_LV >= sampling.top_p, -torch.inf)
    return torch.full_like(scaled_LV, -torch.inf).scatter(-1, order_LV, sorted_LV.log_softmax(-1))
