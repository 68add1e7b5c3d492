"""A trainer, a mailbox and an engine in one process, and the canary between them."""

import asyncio
import atexit
import contextlib
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal

import torch

from stretto.core.canary import Ask, Loaded, Proof, text
from stretto.core.records import GenerateRequest, Sampling
from stretto.engine.config import EngineConfig
from stretto.engine.native.engine import NativeEngine
from stretto.engine.native.generation import Generation
from stretto.engine.wire import EngineSpec
from stretto.loop.engines.proving import Proving
from stretto.model.hf.build import build_policy
from stretto.model.hf.folder import load_policy
from stretto.model.packed.attention import PACKED_ATTENTION
from stretto.model.packed.logprobs import pack_tokens
from stretto.trainer.adapters import adapt
from stretto.trainer.config import LoraConfig, TrainerConfig
from stretto.trainer.objective.algorithm import AlgorithmConfig
from stretto.trainer.trainer import Trainer
from stretto.weights.folder import remove
from stretto.weights.shared_memory import SharedMemoryPublisher, SharedMemorySubscriber
from tests.tiny_policy import TINY, make_of_family

RUN = "canary"
RATE = 1e-3


class InProcess:
    """The part of an engine's client that loads versions."""

    def __init__(self, generation: Generation) -> None:
        self._generation = generation

    async def update(self, version: int, ask: Ask | None = None) -> Loaded:
        return await self._generation.update(version, await ask(version) if ask is not None else None)


@dataclass
class Ground:
    """The trainer learns arithmetic nonsense, so that every version differs from the one before as in a run."""

    trainer: Trainer
    generation: Generation
    publisher: SharedMemoryPublisher
    spec: EngineSpec
    text: tuple[int, ...]
    held: torch.dtype
    proving: Proving = field(default_factory=Proving)
    said: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.proving.expect(self.said.append)

    @property
    def engine(self) -> NativeEngine:
        return self.generation.engine

    def learn(self) -> None:
        """One optimizer step: the next version."""
        drawn = torch.Generator().manual_seed(self.trainer.version)
        texts = torch.randint(2, len(TINY.vocabulary), (8, 24), generator=drawn).tolist()
        learner = self.trainer.learner
        (-learner.logprobs(pack_tokens([sorted(one) for one in texts])).logprobs.mean()).backward()
        learner.step(RATE, self.trainer.version)
        self.trainer.version += 1

    def publish(self) -> None:
        self.proving.published(self.trainer.publish(self.publisher, self.text, self.held))

    def load(self) -> int:
        """The engine loads what is published, and proves it; raises `UnprovenWeights`."""
        client = InProcess(self.generation)
        return asyncio.run(self.proving.load(self.spec, client, self.trainer.version))  # type: ignore[arg-type]  # a part

    def advance(self) -> int:
        self.learn()
        self.publish()
        return self.load()

    @property
    def newest(self) -> Proof:
        (proof,) = self.proving.record.newest
        return proof

    def sampled_in(self, seconds: float) -> int:
        """Tokens that the engine samples if it is let."""
        return asyncio.run(self._sampled_in(seconds))

    async def _sampled_in(self, seconds: float) -> int:
        before = self.engine.health().generated
        request = GenerateRequest(
            id=f"r{before}-{self.engine.version}", prompt_token_ids=(5, 6), seeds=(1,), sampling=Sampling(max_tokens=8)
        )
        stream = self.generation.submit_all([request])
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                running = asyncio.create_task(self.generation.run())
                try:
                    while stream.missing:
                        await asyncio.sleep(0.001)
                finally:
                    running.cancel()
                    await asyncio.wait([running])
        self.generation.close(request.id)
        self.generation.stopping = False
        return self.engine.health().generated - before


#: Families whose tokens are sent to two experts: their name in transformers, and how many experts they have.
MIXTURES: Mapping[str, dict[str, Any]] = {
    "qwen3_moe": {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
}


def build_mixture(family: str, layers: int, folder: Path, seed: int) -> None:
    """The tiny model with experts, as deep as asked for."""
    build_policy(TINY, folder, seed=seed)
    make_of_family(folder, family, MIXTURES[family], TINY.model_copy(update={"layers": layers}), seed)


@cache
def built(mixture: str, layers: int) -> Path:
    """One tiny model, or one with experts, for all tests of the session; nobody changes it."""
    folder = Path(tempfile.mkdtemp(prefix="st-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    if mixture:
        build_mixture(mixture, layers, folder / "model", seed=3)
    else:
        build_policy(TINY, folder / "model", seed=3)
    return folder / "model"


@contextlib.contextmanager
def ground(
    tmp_path: Path,
    dtype: Literal["float32", "bfloat16", "float16"] = "float32",
    *,
    lora: bool = False,
    mixture: str = "",
    layers: int = 2,
    trained: Literal["float32", "bfloat16"] = "float32",
    on_update: Literal["recompute", "keep"] = "recompute",
) -> Iterator[Ground]:
    """Trainer and engine of one tiny model, or of one with experts, neither of which has published or loaded
    anything."""
    model = built(mixture, layers if mixture else 0)
    policy = load_policy(model, attention=PACKED_ATTENTION, dtype=torch.float32)
    config = TrainerConfig(steps=1, dtype=trained, lora=LoraConfig(rank=4, alpha=16) if lora else None)
    if config.lora is not None:
        adapt(policy, config.lora)
    trainer = Trainer(policy, config, AlgorithmConfig(), evidence="uninterrupted" if on_update == "keep" else "all")
    engine_config = EngineConfig(slots=8, cache_gib=0.05, dtype=dtype, on_update=on_update)
    engine = NativeEngine.load(model, engine_config, name="engine-0")
    memory, held = tmp_path / "memory", getattr(torch, dtype)
    spec = EngineSpec("engine-0", "", str(model), RUN, str(memory), engine_config.model_dump_json(), 1, 0.0)
    try:
        yield Ground(
            trainer,
            Generation(engine, SharedMemorySubscriber(RUN, memory)),
            SharedMemoryPublisher(RUN, memory, None if lora else held),
            spec,
            text(len(TINY.vocabulary), TINY.context_length, {1}, 7),
            held,
        )
    finally:
        remove(RUN, memory)
