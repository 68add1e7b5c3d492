"""A server of another make proves each version by the canary before it samples for anyone, in float32 and bfloat16.

- A hundred honest updates are proven, whether running requests end ("recompute") or go on ("keep"); every tensor in the
  server's memory is compared with the trainer's digest, in the type of the publication and in a coarser one.
- Where a load goes wrong and reports success, the version is refused, and the tensors that differ are named: an old
  file, a tensor that is skipped, scaled, swapped with another or rounded, the least bit flipped behind every check, a
  load that never happened, a lying version. In float32 the score alone shows it too.
- Entries of earlier weights in the cache are refused; where a server has no such cache, that is shown.
- Afterwards an honest load is proven.
"""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Literal

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from stretto.core.canary import Ask, Canary, Loaded, Proof, TensorDigest, text
from stretto.core.errors import UnprovenWeights
from stretto.engine.external.engine import ExternalEngine
from stretto.engine.external.vllm import VllmServer
from stretto.engine.spec import EngineSpec
from stretto.loop.engines.proving import Proving
from tests.engine.answering import shaken
from tests.real_engines.serving import MODEL, RealServer, engine

UPDATES = 100
TEXT = text(len(MODEL.vocabulary), MODEL.context_length, {1}, 3)
DOWN, OTHER = (f"model.layers.{layer}.mlp.down_proj.weight" for layer in (0, 1))
Tensors = Mapping[str, Tensor]
Spoil = Callable[[Tensors, Tensors], Tensors]


def canary_of(model: PreTrainedModel, version: int, digests: Mapping[str, TensorDigest]) -> Canary:
    """What a trainer would find of the text."""
    with torch.no_grad():
        lines = model(torch.tensor([TEXT])).logits[0, :-1].float().log_softmax(-1)
    found = lines.gather(1, torch.tensor(TEXT[1:])[:, None])[:, 0]
    return Canary(version, TEXT, tuple(found.tolist()), MODEL.layers, digests=digests)


class _Client:
    def __init__(self, served: ExternalEngine) -> None:
        self._served = served

    async def update(self, version: int, ask: Ask | None = None) -> Loaded:
        return await self._served.update(version, await ask(version) if ask is not None else None)


class Trainer:
    """Publishes versions, each a little other than the one before, and has them loaded and proven."""

    def __init__(self, server: RealServer, served: ExternalEngine, publish: Any) -> None:
        self._served, self._publish = served, publish
        self.model: Any = AutoModelForCausalLM.from_pretrained(server.policy, dtype=torch.float32).eval()
        self.version = 0
        self.said: list[str] = []
        self.proving = Proving()
        self.proving.expect(self.said.append)
        config = msgspec.json.encode({"kind": server.kind, "dtype": server.dtype}).decode()
        self._spec = EngineSpec(server.kind, "", "", "", "", config, 1, 0.0)

    async def advance(self) -> Proof:
        """The next version: what the server has shown of it, whose weights are proven."""
        if self.version:
            self.model = shaken(self.model, self.version, scale=0.02)
        self.version += 1
        digests = self._publish(self.version, self.model)
        self.proving.published(canary_of(self.model, self.version, digests))
        client: Any = _Client(self._served)
        assert await self.proving.load(self._spec, client, self.version) == self.version
        return self.newest

    async def refused(self) -> Proof:
        """As `advance`, where the version is not proven."""
        with pytest.raises(UnprovenWeights, match=f"has not proven version {self.version + 1}"):
            await self.advance()
        return self.newest

    @property
    def newest(self) -> Proof:
        (proof,) = self.proving.record.newest
        return proof


@asynccontextmanager
async def training(
    server: RealServer, on_update: Literal["recompute", "keep"] = "recompute"
) -> AsyncIterator[tuple[Trainer, ExternalEngine]]:
    async with engine(server, on_update) as (served, publish):
        yield Trainer(server, served, publish), served


def flipped(tensor: Tensor) -> Tensor:
    """The least bit of one number is another one."""
    found = tensor.clone()
    found.view({2: torch.int16, 4: torch.int32}[tensor.element_size()])[3, 3] ^= 1
    return found


def rounded(tensor: Tensor) -> Tensor:
    coarse = torch.bfloat16 if tensor.dtype is torch.float32 else torch.float8_e4m3fn
    return tensor.to(coarse).to(tensor.dtype)


SPOILT: dict[str, Spoil] = {
    "old file": lambda new, old: old,
    "one tensor skipped": lambda new, old: dict(new) | {DOWN: old[DOWN]},
    "all scaled": lambda new, old: {name: 1.02 * tensor for name, tensor in new.items()},
    "one scaled": lambda new, old: dict(new) | {DOWN: 1.1 * new[DOWN]},
    "layers swapped": lambda new, old: dict(new) | {DOWN: new[OTHER], OTHER: new[DOWN]},
    "rounded": lambda new, old: {name: rounded(tensor) for name, tensor in new.items()},
    "a bit flipped": lambda new, old: dict(new) | {DOWN: flipped(new[DOWN])},
}
ALONE = {"one tensor skipped": DOWN, "one scaled": DOWN, "layers swapped": f"{DOWN}, {OTHER}", "a bit flipped": DOWN}


class Loads:
    """What the server loads in place of the folder that it is told: the adapter has checked that, and reports success.
    The tensors of the version before are at hand."""

    def __init__(self, honest: Callable[..., Any], folder: Path) -> None:
        self._honest, self._folder = honest, folder
        self._before: Tensors = {}
        self.spoil: Spoil | None = None

    async def __call__(self, folder: Path, version: int, *, keep: bool) -> None:
        (file,) = folder.glob("*.safetensors")
        tensors = {name: tensor.clone() for name, tensor in load_file(file).items()}
        if self.spoil is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            shutil.copytree(folder, self._folder, ignore=shutil.ignore_patterns("*.safetensors"))
            spoilt = {name: tensor.contiguous().clone() for name, tensor in self.spoil(tensors, self._before).items()}
            save_file(spoilt, self._folder / "model.safetensors", metadata={"format": "pt"})
            folder = self._folder
        else:
            self._before = tensors
        await self._honest(folder, version, keep=keep)


async def _hundred(server: RealServer) -> None:
    async with training(server) as (trainer, _):
        for version in range(1, UPDATES + 1):
            proof = await trainer.advance()
            assert (proof.version, proof.compared) == (version, proof.tensors)
    assert (trainer.said, trainer.proving.record.refused) == ([], 0)
    print(
        server.kind,
        server.dtype,
        trainer.proving.record.tolerances,
        max(one.units for one in trainer.proving.record.worst),
    )


def test_a_hundred_honest_updates_are_proven(either_server: RealServer) -> None:
    either_server.run(_hundred(either_server))


async def _sabotaged(server: RealServer, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with training(server) as (trainer, served):
        loads = Loads(served._make.load, folder)
        monkeypatch.setattr(served._make, "load", loads)
        await trainer.advance()
        for name, spoil in SPOILT.items():
            await trainer.advance()
            loads.spoil = spoil
            proof = await trainer.refused()
            assert proof.compared == proof.tensors == len(load_file(server.policy / "model.safetensors"))
            assert proof.evidence == ALONE.get(name, proof.evidence) != "", name
            if server.dtype == "float32" and name != "a bit flipped":
                assert proof.distance > 3 * proof.tolerance, name
            loads.spoil = None
            await trainer.advance()
        with monkeypatch.context() as patch:  # the order to load is never carried out
            patch.setattr(served._make, "load", _nothing)
            assert (await trainer.refused()).evidence
        await trainer.advance()


async def _nothing(*arguments: object, **settings: object) -> None: ...


def test_what_goes_wrong_in_a_load_is_refused_and_what_goes_well_is_proven(
    either_server: RealServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    either_server.run(_sabotaged(either_server, tmp_path / "spoilt", monkeypatch))


async def _lying(server: RealServer) -> None:
    async with training(server) as (trainer, _):
        await trainer.advance()
        with server.loads_spoilt("old"):
            assert (await trainer.refused()).evidence
        await trainer.advance()
        with server.loads_spoilt("flipped", DOWN.removesuffix(".weight")):
            assert (await trainer.refused()).evidence == DOWN
        await trainer.advance()


@pytest.mark.parametrize("installed", ["vllm"], indirect=True)
def test_what_goes_wrong_in_a_servers_own_memory_is_refused(either_server: RealServer) -> None:
    """It says that it has loaded the version and has not; a bit of a layer flips when all is loaded."""
    either_server.run(_lying(either_server))


async def _stale_cache(server: RealServer, monkeypatch: pytest.MonkeyPatch) -> None:
    async with training(server) as (trainer, _):
        await trainer.advance()
        with monkeypatch.context() as patch:
            patch.setattr(VllmServer, "pause", _keeps_the_cache)
            proof = await trainer.refused()
            assert (proof.evidence, proof.compared) == ("", proof.tensors), "its weights are right"
        await trainer.advance()


async def _keeps_the_cache(self: VllmServer, *, keep: bool) -> None:
    await self._http.exchange("POST", "/pause?mode=abort&clear_cache=false")


@pytest.mark.parametrize("installed", ["vllm"], indirect=True)
def test_entries_of_earlier_weights_in_a_cache_are_refused(
    either_server: RealServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    either_server.run(_stale_cache(either_server, monkeypatch))


async def _cached(server: RealServer) -> list[int]:
    order = {
        "input_ids": list(TEXT) * 4,
        "sampling_params": {"max_new_tokens": 2, "temperature": 1.0, "ignore_eos": True},
    }
    async with engine(server, "recompute") as (served, _):
        make: Any = served._make
        return [(await make._http.exchange("POST", "/generate", order))["meta_info"]["cached_tokens"] for _ in range(3)]


@pytest.mark.parametrize("installed", ["sglang"], indirect=True)
def test_sglang_has_no_cache_that_could_outlive_its_weights_on_a_processor(server: RealServer) -> None:
    """A prompt that it has had is computed anew each time: `--disable-radix-cache`, without which it does not start."""
    assert server.run(_cached(server)) == [0, 0, 0]


async def _kept(server: RealServer) -> None:
    async with training(server, "keep") as (trainer, _):
        for _ in range(5):
            proof = await trainer.advance()
            assert proof.compared == proof.tensors > 0
    assert trainer.proving.record.refused == 0


def test_versions_are_proven_where_the_cache_is_kept(either_server: RealServer) -> None:
    either_server.run(_kept(either_server))


async def _coarser(server: RealServer) -> None:
    async with training(server) as (trainer, served):
        trainer._publish._publisher._dtype = None  # as in a run that has engines of float32 too
        for _ in range(3):
            proof = await trainer.advance()
            assert proof.compared == proof.tensors > 0
        loads = Loads(served._make.load, server.spoilt.with_suffix(".folder"))
        served._make.load = loads  # type: ignore[method-assign]
        await trainer.advance()
        loads.spoil = SPOILT["one tensor skipped"]
        assert (await trainer.refused()).evidence == DOWN


def test_a_coarser_server_is_compared_with_what_was_published_in_its_type(coarse_server: RealServer) -> None:
    coarse_server.run(_coarser(coarse_server))
