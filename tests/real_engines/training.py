"""A trainer beside a real server: versions that are published, loaded and proven, and loads that go wrong unseen."""

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
from stretto.engine.wire import EngineSpec
from stretto.loop.engines.proving import Proving
from stretto_servers.engine import ExternalEngine
from stretto_servers.make import Make
from tests.engine.answering import shaken
from tests.real_engines.serving import MODEL, RealServer, engine

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

    def __init__(self, server: RealServer, served: ExternalEngine, publish: Any, on_update: str) -> None:
        self._served, self._publish = served, publish
        self.model: Any = AutoModelForCausalLM.from_pretrained(server.policy, dtype=torch.float32).eval()
        self.version = 0
        self.said: list[str] = []
        self.proving = Proving()
        self.proving.expect(self.said.append)
        config = {"kind": server.kind, "dtype": server.dtype, "on_update": on_update}
        self._spec = EngineSpec(server.kind, "", "", "", "", msgspec.json.encode(config).decode(), 1, 0.0)

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
    def folder(self) -> Path:
        """What the server was given last."""
        return self._served._folder

    @property
    def newest(self) -> Proof:
        (proof,) = self.proving.record.newest
        return proof


@asynccontextmanager
async def training(
    server: RealServer, on_update: Literal["recompute", "keep"] = "recompute", wire: Make | None = None
) -> AsyncIterator[tuple[Trainer, ExternalEngine]]:
    async with engine(server, on_update, wire) as (served, publish):
        yield Trainer(server, served, publish, on_update), served


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
