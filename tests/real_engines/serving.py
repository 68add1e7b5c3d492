"""A real server in a test's hands, and completions of it that updates interrupt."""

import asyncio
import json
import secrets
import tempfile
from collections.abc import AsyncIterator, Awaitable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from benchmarks.logprobs import SMALL
from stretto.core.canary import TensorDigest
from stretto.core.frames import Unframer
from stretto.core.records import Completion, GenerateRequest, Sampling
from stretto.core.tasks import cancel_and_wait
from stretto.engine.backend import Stream
from stretto.engine.config import EngineConfig
from stretto.engine.http.client import decoded
from stretto.engine.text import StopTexts
from stretto.model.hf.tokenizer import load_tokenizer
from stretto.weights.folder import remove
from stretto.weights.shared_memory import SharedMemoryPublisher, SharedMemorySubscriber
from stretto_servers.engine import ExternalEngine
from stretto_servers.http import JsonServer
from stretto_servers.make import Continuation, Launch, Limits, Make, launch_of, make_of
from stretto_servers.server import ServerProcess, port_of, reserve_port, until_ready
from stretto_servers.staging import StagedWeights
from tests.engine.answering import shaken

#: The folder of the first model in the distributions on record has the same shape.
MODEL = SMALL
#: The same as words of a command.
BUILT = tuple(f"model.build.{key}={json.dumps(value)}" for key, value in MODEL.model_dump().items())
#: Prompts of several lengths.
PROMPTS = tuple(tuple(range(2 + start, 2 + start + length)) for start, length in ((0, 1), (5, 4), (11, 12), (3, 30)))
_SPOILT = Path(__file__).with_name("spoilt")
_ATTEMPTS = 5
_PACE_SECONDS = 0.004
START_SECONDS = 400.0
Result = TypeVar("Result")


@dataclass(frozen=True)
class Installed:
    """A make with its environment."""

    kind: Literal["vllm", "sglang"]
    python: Path

    def config(self, **settings: object) -> EngineConfig:
        return EngineConfig.model_validate(
            {"kind": self.kind, "python": str(self.python), "cache_gib": 0.25, "slots": 64, "device": "cpu"} | settings
        )


class RealServer:
    """A server of a make, whose loads can be spoilt. Its event loop lives as long as it: tests run in it one after the
    other."""

    def __init__(self, installed: Installed, policy: Path, **settings: object) -> None:
        """It is started, and asked nothing before `until_up`: several start in the time of one."""
        self.kind = installed.kind
        self.policy = policy
        self.spoilt = policy.with_name(f"spoilt-{secrets.token_hex(4)}")
        self._runner = asyncio.Runner()
        self._config = installed.config(**settings)
        self.dtype = self._config.dtype
        self.likeliest: list[tuple[int, ...]] = []
        self._reserved = reserve_port()
        self.address = f"127.0.0.1:{port_of(self._reserved)}"
        self._process = self.run(self._start(port_of(self._reserved)))

    async def _start(self, port: int) -> ServerProcess:
        launch = launch_of(self._config, str(self.policy), port)
        path = f"{launch.environment['PYTHONPATH']}:{_SPOILT}"
        environment = launch.environment | {"PYTHONPATH": path, "SPOILT": str(self.spoilt)}
        words = ("--worker-extension-cls", "spoilt.Loader") if self.kind == "vllm" else ()
        return await ServerProcess.start(self.kind, Launch((*launch.command, *words), environment))

    def until_up(self) -> None:
        """Return when it can be asked."""
        self.run(self._until_up())

    async def _until_up(self) -> None:
        wire = self.wire()
        try:
            await until_ready(self._process, wire, START_SECONDS)
        finally:
            await wire.close()

    def note_likeliest(self, length: int = 64) -> None:
        """Sample greedily behind each of `PROMPTS` into `likeliest`, by the weights that the server has now."""
        self.likeliest = self.run(self._likeliest(length))

    async def _likeliest(self, length: int) -> list[tuple[int, ...]]:
        wire, found = self.wire(), []
        for number, prompt in enumerate(PROMPTS):
            greedy = Sampling(max_tokens=length, temperature=0.0)
            wanted = Continuation(f"likeliest-{number}", prompt, greedy, length, seed=0)
            found.append(tuple([token async for delta in wire.stream(wanted) for token in delta.token_ids]))
        await wire.close()
        return found

    def wire(self, load_seconds: float = 60.0) -> Make:
        """New connections to it."""
        http = JsonServer(self.kind, self.address, seconds=60.0, token_seconds=60.0)
        return make_of(self.kind, http, load_seconds)

    def run(self, work: Awaitable[Result]) -> Result:
        """Do something in the event loop of the server."""

        async def awaited() -> Result:
            return await work

        return self._runner.run(awaited())

    @contextmanager
    def loads_spoilt(self, *how: str) -> Iterator[None]:
        """While it lasts, loads go wrong or steps take longer in this way too (`spoilt/spoilt.py`)."""
        before = self.spoilt.read_text() if self.spoilt.exists() else ""
        self._spoil(f"{before}{' '.join(how)}\n")
        try:
            yield
        finally:
            self._spoil(before)

    def _spoil(self, ways: str) -> None:
        written = self.spoilt.with_suffix(".new")
        written.write_text(ways)
        written.replace(self.spoilt)  # its reader sees all lines or those of before

    def close(self) -> None:
        with self._runner:  # closes its event loop
            self.run(self._process.stop())
        self._reserved.close()
        self._runner.close()

    def updated_amid(
        self, requests: Sequence[GenerateRequest], on_update: Literal["recompute", "keep"], updates: int = 3
    ) -> "Run":
        """Completions of the requests, with updates that come while they are in flight: each version samples some, and
        they have tokens of more than half of the versions on average. On a busy machine a server may
        be done before an update, since it samples ahead of what it sends: then they are sampled again, by steps that
        take longer each time."""
        for attempt in range(_ATTEMPTS):
            with self.loads_spoilt("paced", str(attempt * _PACE_SECONDS)):
                run = self.run(_updated_amid(self, requests, on_update, updates))
            versions = [version for completion in run.completions for version in set(completion.versions)]
            if set(versions) == run.models.keys() and 2 * len(versions) > len(run.completions) * len(run.models):
                return run
        raise AssertionError(f"{self.kind} sampled too little under one of the versions, {_ATTEMPTS} times")


@dataclass(frozen=True)
class Run:
    """What came of requests, and the plain model of each version."""

    completions: list[Completion]
    models: dict[int, PreTrainedModel]


async def _updated_amid(
    server: RealServer, requests: Sequence[GenerateRequest], on_update: Literal["recompute", "keep"], updates: int
) -> Run:
    plain: Any = AutoModelForCausalLM.from_pretrained(server.policy, dtype=torch.float32).eval()
    models: dict[int, PreTrainedModel] = {1: plain}
    models |= {version: shaken(plain, version) for version in range(2, updates + 2)}
    share = sum(len(request.seeds) * request.sampling.max_tokens for request in requests) // 60
    async with engine(server, on_update) as (served, publish):
        publish(1, plain)
        await served.update(1)
        stream = served.submit_all(requests)
        for version in range(2, updates + 2):
            await generate(served, share)
            publish(version, models[version])
            assert (await served.update(version)).version == version
        return Run(await completions_of(stream), models)


async def generate(served: ExternalEngine, tokens: int) -> None:
    """Wait for more tokens, or for the end of all requests. Tokens come in bursts on a busy machine: a count from the
    start may be passed by far, and updates that wait for it would follow upon each other with nothing sampled between
    them."""
    async with asyncio.timeout(120):
        health = await served.health()
        wanted = health.generated + tokens
        while health.running and health.generated < wanted:
            await asyncio.sleep(0.005)
            health = await served.health()


async def completions_of(stream: Stream) -> list[Completion]:
    """All completions of a stream, once they have ended."""
    unframer, found = Unframer(), []
    async with asyncio.timeout(180):
        while stream.missing:
            assert not stream.broken, "the stream broke off"
            found += [decoded(body, Completion) for body in unframer.feed(await stream.next())]
        if stream.ready:
            found += [decoded(body, Completion) for body in unframer.feed(await stream.next())]
    return found


class _Publish:
    """Publishes a model's parameters as a version."""

    def __init__(self, publisher: SharedMemoryPublisher) -> None:
        self._publisher = publisher

    def __call__(self, version: int, model: PreTrainedModel) -> dict[str, TensorDigest]:
        return self._publisher.publish(version, model.named_parameters())


@asynccontextmanager
async def engine(
    server: RealServer, on_update: Literal["recompute", "keep"], wire: Make | None = None
) -> AsyncIterator[tuple[ExternalEngine, _Publish]]:
    """An engine over the server, without a version yet, and a trainer's end of its mailbox."""
    with tempfile.TemporaryDirectory(prefix="stretto-real-") as name:
        folder, run = Path(name), "real"
        publisher = SharedMemoryPublisher(run, folder / "mailbox", getattr(torch, server.dtype))
        weights = StagedWeights(SharedMemorySubscriber(run, folder / "mailbox"), server.policy, folder / "staged")
        wire = wire or server.wire()
        context = (await wire.describe()).context_length or MODEL.context_length
        limits = Limits(len(MODEL.vocabulary), min(MODEL.context_length, context))
        texts = StopTexts(partial(load_tokenizer, str(server.policy)))
        served = ExternalEngine(server.kind, wire, limits, weights, texts, on_update)
        working = asyncio.create_task(served.run())
        try:
            yield served, _Publish(publisher)
        finally:
            await cancel_and_wait([working])
            remove(run, folder / "mailbox")
