"""Requests to a tiny policy, an engine that answers them, and what the plain model says of the answers."""

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from stretto.core.records import Completion, GenerateRequest, Sampling
from stretto.engine.config import EngineConfig
from stretto.engine.native.engine import NativeEngine
from tests.tolerances import EXACT

EOS = 1


def request(name: str, *, prompt: int = 9, seeds: Sequence[int] = (1,), **sampling: object) -> GenerateRequest:
    random = np.random.default_rng(prompt)
    settings = {"max_tokens": 40, "stop_token_ids": (EOS,)} | sampling
    return GenerateRequest(
        id=name,
        prompt_token_ids=tuple(random.integers(2, 22, prompt).tolist()),
        seeds=tuple(seeds),
        sampling=Sampling(**settings),  # type: ignore[arg-type]
    )


def engine_of(folder: Path, **settings: object) -> NativeEngine:
    return NativeEngine.load(folder, EngineConfig.model_validate({"slots": 8, **settings}))


def finish(engine: NativeEngine, *requests: GenerateRequest) -> dict[tuple[str, int], Completion]:
    for wanted in requests:
        engine.add(wanted)
    return drain(engine)


def drain(engine: NativeEngine) -> dict[tuple[str, int], Completion]:
    ended = {}
    while not engine.idle:
        for completion in engine.step():
            ended[completion.request, completion.member] = completion
        engine.check_integrity()
    return ended


def expected_logprobs(
    models: Mapping[int, PreTrainedModel], wanted: GenerateRequest, completion: Completion
) -> list[float]:
    """Each token's log-probability by the full forward of the model of its version."""
    prompt = wanted.prompt_token_ids
    ids = torch.tensor([[*prompt, *completion.token_ids]])
    with torch.no_grad():
        lines = {version: model(ids).logits[0].float().log_softmax(-1) for version, model in models.items()}
    return [
        float(lines[version][len(prompt) + at - 1, token])
        for at, (token, version) in enumerate(zip(completion.token_ids, completion.versions, strict=True))
    ]


def shaken(model: PreTrainedModel, seed: int, scale: float = 0.05) -> PreTrainedModel:
    """A copy of the model with other weights."""
    other = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(scale * torch.randn(parameter.shape, generator=generator))
    return other


def weights(model: PreTrainedModel) -> dict[str, Tensor]:
    return dict(model.named_parameters())


def assert_each_token_follows_its_version(
    models: Mapping[int, PreTrainedModel], requests: Sequence[GenerateRequest], ended: Sequence[Completion]
) -> None:
    """Log-probabilities are those of the versions that are stamped on the tokens; versions never go back."""
    by_id = {wanted.id: wanted for wanted in requests}
    for completion in ended:
        expected = expected_logprobs(models, by_id[completion.request], completion)
        assert np.abs(np.subtract(completion.behavior_logprobs, expected)).max() < EXACT
        assert list(completion.versions) == sorted(completion.versions)
