"""Promises: SGLang as its package is receives versions by a collective (gloo, on this machine's processor), stamps them
on its tokens, and gives these the log-probabilities of the version's weights, to 1e-4. It proves each version by the
canary, every tensor compared; what is spoilt on the way, or received and not loaded, is refused, in float32 and
bfloat16."""

import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from stretto.core.records import Completion, GenerateRequest, Sampling, Segment, StopReason
from stretto_servers import broadcast
from stretto_servers.broadcast import SglangByBroadcast
from stretto_servers.http import JsonServer
from stretto_servers.make import Continuation
from tests.engine.answering import shaken
from tests.real_engines import scoring
from tests.real_engines.scoring import TOLERANCE
from tests.real_engines.serving import RealServer
from tests.real_engines.training import ALONE, SPOILT, Spoil, training

PROMPT = (5, 12, 8, 13, 3)
LENGTH = 60
REQUEST = GenerateRequest("r", PROMPT, (0,), Sampling(max_tokens=LENGTH))


@pytest.mark.parametrize("installed", ["sglang"], indirect=True)
async def test_versions_that_were_broadcast_are_those_the_server_samples(server: RealServer, tmp_path: Path) -> None:
    plain: Any = AutoModelForCausalLM.from_pretrained(server.policy, dtype=torch.float32).eval()
    models = {version: shaken(plain, version) for version in (41, 42)}
    for version, completion in (await sampled_after_each(server, models, tmp_path)).items():
        assert completion.versions == (version,) * LENGTH
        assert float(scoring.recomputed(models, REQUEST, completion).max()) < TOLERANCE


class Reads:
    """What an adapter sends in place of what it has read and checked."""

    def __init__(self) -> None:
        self._honest = broadcast._read
        self._before: dict[str, torch.Tensor] = {}
        self.spoil: Spoil | None = None

    def __call__(self, folder: Path) -> Mapping[str, torch.Tensor]:
        tensors = self._honest(folder)
        if self.spoil is not None:
            return self.spoil(tensors, self._before)
        self._before = {name: tensor.clone() for name, tensor in tensors.items()}
        return tensors


@pytest.mark.parametrize("installed", ["sglang"], indirect=True)
async def test_versions_that_were_broadcast_are_proven_and_spoilt_ones_refused(
    either_server: RealServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(broadcast, "_read", reads := Reads())
    http = JsonServer(either_server.kind, either_server.address, seconds=60.0, token_seconds=60.0)
    wire = SglangByBroadcast(http, 60.0, either_server.address, "gloo")
    async with training(either_server, wire=wire) as (trainer, _):
        for how in SPOILT:
            proof = await trainer.advance()
            assert proof.compared == proof.tensors > 0
            reads.spoil = SPOILT[how]
            assert (await trainer.refused()).evidence == ALONE.get(how, trainer.newest.evidence) != "", how
            reads.spoil = None
        await trainer.advance()
        with either_server.loads_spoilt("old"):
            assert (await trainer.refused()).evidence
        await trainer.advance()


async def sampled_after_each(
    server: RealServer, models: dict[int, PreTrainedModel], folder: Path
) -> dict[int, Completion]:
    """A completion by each of the versions, which are sent one after the other."""
    http = JsonServer(server.kind, server.address, seconds=60.0, token_seconds=60.0)
    wire = SglangByBroadcast(http, 60.0, server.address, "gloo")
    found = {}
    try:
        for version, model in models.items():
            save_file(dict(model.named_parameters()), folder / "model.safetensors")
            await wire.pause(keep=False)
            await wire.load(folder, version, keep=False)
            await wire.resume()
            found[version] = await sample(wire, f"broadcast-{secrets.token_hex(4)}")
    finally:
        await wire.close()
    return found


async def sample(wire: Any, name: str) -> Completion:
    wanted = Continuation(name, PROMPT, REQUEST.sampling, LENGTH, seed=1)
    tokens: list[int] = []
    logprobs: list[float] = []
    spans: tuple[tuple[str, int, int], ...] = ()
    async for delta in wire.stream(wanted):
        tokens += delta.token_ids
        logprobs += delta.logprobs
        spans = delta.spans or spans
    versions = [int(version) for version, start, end in spans for _ in range(start, end)]
    return Completion(
        "r",
        0,
        Segment.of(
            token_ids=tuple(tokens),
            behavior_logprobs=tuple(logprobs),
            versions=tuple(versions),
            stop_reason=StopReason.LENGTH,
        ),
    )
