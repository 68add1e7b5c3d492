"""A small real inference server in this process (satisfies `stretto_servers.make.Make`), and an engine over it.

Its tokens depend on all tokens before them and on the version that samples them, and so do their log-probabilities:
of every token of a completion one can say whether it belongs there, and which version sampled it."""

import asyncio
import math
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Literal

import numpy as np

from stretto.core.errors import EngineLost, TornPublication, WireError
from stretto.core.frames import Unframer
from stretto.core.records import Completion, GenerateRequest, Sampling, Segment
from stretto.engine.backend import Stream
from stretto.engine.http.client import decoded
from stretto.engine.text import StopTexts
from stretto_servers.engine import ExternalEngine
from stretto_servers.make import Continuation, Delta, Limits, Occupancy, Served
from stretto_servers.staging import FolderAsItIs

VOCABULARY, CONTEXT, STOP = 50, 64, 1
OnUpdate = Literal["recompute", "keep"]


def token_after(tokens: Sequence[int], version: int) -> int:
    """What `version` samples behind these tokens."""
    state = 7 * version + len(tokens)
    for token in tokens:
        state = (31 * state + token + 1) % 1_000_003
    return state % VOCABULARY


def logprob_of(token: int, version: int) -> float:
    return -(version + 1.0) - token / 100


def assert_law(prompt: Sequence[int], segment: Completion | Segment) -> None:
    """Every token is the one that the version of its stamp samples behind all tokens before it."""
    tokens = list(prompt)
    for token, logprob, version in zip(segment.token_ids, segment.behavior_logprobs, segment.versions, strict=True):
        assert (token, logprob) == (token_after(tokens, version), logprob_of(token, version))
        tokens.append(token)
    assert list(segment.versions) == sorted(segment.versions)


class Letters:
    """A detokenizer: each token is one letter."""

    special_token_ids: frozenset[int] = frozenset()

    def decode(self, ids: Sequence[int], /) -> str:
        return "".join(chr(ord("A") + token) for token in ids)

    def text_of(self, token: int, /) -> str | None:
        return self.decode((token,))


@dataclass
class Running:
    """A request that the server has; what is sampled is on its way until it is delivered."""

    wanted: Continuation
    tokens: list[int] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    ended: str = ""
    delivered: int = 0
    inbox: asyncio.Queue[Delta | None] = field(default_factory=asyncio.Queue)

    def deliver(self) -> None:
        """What is on its way arrives."""
        new = slice(self.delivered, None)
        logprobs = tuple(map(logprob_of, self.tokens[new], self.versions[new]))
        spans = tuple(_spans(self.versions)) if self.ended else ()
        if logprobs or self.ended:
            self.inbox.put_nowait(Delta(tuple(self.tokens[new]), logprobs, ended=self.ended, spans=spans))
        self.delivered = len(self.tokens)


def _spans(versions: Sequence[int]) -> Iterator[tuple[str, int, int]]:
    at = 0
    for version, tokens in groupby(versions):
        end = at + len(list(tokens))
        yield str(version), at, end
        at = end


class ToyServer:
    """See the module. With `steps`, each change waits twice to be let on: before it is made and before it is told."""

    def __init__(self, *, steps: bool = False) -> None:
        self.version, self.paused, self.running = -1, False, dict[str, Running]()
        self.asked: list[Continuation] = []
        self.waiting: list[asyncio.Event] = []
        self.full: Occupancy | None = None
        self.refuses_load = self.ignores_pause = False
        self.read = 0
        self.cached = set[int]()  # versions that the cache has entries of
        self._steps = steps

    async def stream(self, continuation: Continuation) -> AsyncGenerator[Delta]:
        running = self.running[continuation.id] = Running(continuation)
        self.asked.append(continuation)
        try:
            while (delta := await running.inbox.get()) is not None:
                yield delta
                if delta.ended:
                    break
        finally:
            self.running.pop(continuation.id, None)

    def sample(self, count: int = 1) -> None:
        """Up to `count` tokens of every request, unless it is paused."""
        for running in self.running.values():
            wanted = running.wanted
            while not (self.paused or running.ended) and count > len(running.tokens) - running.delivered:
                token = token_after((*wanted.token_ids, *running.tokens), self.version)
                running.tokens.append(token)
                self.cached.add(self.version)
                running.versions.append(self.version)
                if token in wanted.sampling.stop_token_ids:
                    running.ended = "stop"
                elif len(running.tokens) == wanted.max_tokens:
                    running.ended = "length"

    def deliver(self) -> None:
        for running in list(self.running.values()):
            running.deliver()

    async def _step(self) -> None:
        if self._steps:
            self.waiting.append(go_on := asyncio.Event())
            await go_on.wait()

    async def occupancy(self) -> Occupancy:
        if self.full is None:
            raise WireError("the toy does not say how full it is")
        return self.full

    async def score(self, token_ids: Sequence[int]) -> tuple[float, ...]:
        return tuple(logprob_of(token, self.version) for token in token_ids[1:])

    async def held(self, folder: Path, shapes: Mapping[str, Sequence[int]]) -> Sequence[Mapping[str, str]]:
        return ()

    async def pause(self, *, keep: bool) -> None:
        await self._step()
        self.paused = True
        for running in self.running.values():
            if not (keep or self.ignores_pause):
                running.ended = running.ended or "abort"
        self.cached &= self.cached if keep else set()
        if not self._steps:
            self.deliver()
        await self._step()

    async def load(self, folder: Path, version: int, *, keep: bool) -> None:
        await self._step()
        if self.refuses_load:
            raise WireError(f"no weights in {folder}")
        self.version = version
        await self._step()

    async def resume(self) -> None:
        await self._step()
        self.paused = False
        await self._step()

    async def ready(self) -> bool:
        return True

    async def describe(self) -> Served:
        return Served("Toy 1", "toy", CONTEXT)

    async def close(self) -> None:
        for running in self.running.values():
            running.inbox.put_nowait(None)


class Shaping(ToyServer):
    """Samples what it is asked for at once, from one distribution."""

    def __init__(self, raw: bool) -> None:
        super().__init__()
        self._raw, self.likelihoods = raw, np.log(np.arange(1, VOCABULARY + 1) / sum(range(VOCABULARY + 1)))

    async def stream(self, continuation: Continuation) -> AsyncGenerator[Delta]:
        self.asked.append(continuation)
        count, shaped = continuation.max_tokens, self.likelihoods / continuation.sampling.temperature
        shaped -= np.log(np.exp(shaped - shaped.max()).sum()) + shaped.max()
        tokens = np.random.default_rng(continuation.seed).choice(VOCABULARY, count, p=np.exp(shaped)).tolist()
        told = (self.likelihoods if self._raw else shaped)[tokens].tolist()
        yield Delta(tuple(tokens), tuple(told), ended="length")

    async def score(self, token_ids: Sequence[int]) -> tuple[float, ...]:
        return tuple(self.likelihoods[list(token_ids[1:])].tolist())


class Publications(FolderAsItIs):
    """Versions that can be staged."""

    def __init__(self) -> None:
        super().__init__(Path("/toy"))
        self.torn: set[int] = set()

    def folder_of(self, version: int, /) -> Path:
        if version in self.torn:
            raise TornPublication(f"version {version} is torn")
        return self._folder / f"{version}"


def engine_over(
    server: ToyServer, on_update: OnUpdate = "recompute", weights: FolderAsItIs | None = None, slots: float = math.inf
) -> ExternalEngine:
    limits = Limits(VOCABULARY, CONTEXT, slots)
    return ExternalEngine("engine-0", server, limits, weights or Publications(), StopTexts(Letters), on_update)


async def at(
    version: int, on_update: OnUpdate = "recompute", server: ToyServer | None = None
) -> tuple[ToyServer, ExternalEngine]:
    """A server and its engine, with this version loaded."""
    server = server or ToyServer()
    engine = engine_over(server, on_update)
    assert (await engine.update(version)).version == version
    return server, engine


def in_steps(on_update: OnUpdate = "recompute") -> tuple[ToyServer, ExternalEngine]:
    """At version 0; every change waits to be let on."""
    engine = engine_over(server := ToyServer(steps=True), on_update)
    server.version = engine.version = 0
    return server, engine


def request(
    name: str,
    completions: int = 1,
    max_tokens: int = 12,
    stop: tuple[str, ...] = (),
    prefixes: tuple[Segment, ...] = (),
) -> GenerateRequest:
    """A request whose prompt depends on its name."""
    sampling = Sampling(max_tokens=max_tokens, stop_token_ids=(STOP,), stop=stop)
    prompt = tuple(ord(letter) % VOCABULARY for letter in name)
    seeds = tuple(range(100, 100 + completions))
    return GenerateRequest(id=name, prompt_token_ids=prompt, seeds=seeds, sampling=sampling, prefixes=prefixes)


async def settle() -> None:
    """Let every task go on as far as it can without the server."""
    for _ in range(30):
        await asyncio.sleep(0)


async def play(server: ToyServer, count: int = 1, rounds: int = 1) -> None:
    """The server samples and delivers, several times."""
    for _ in range(rounds):
        await settle()
        server.sample(count)
        server.deliver()
    await settle()


async def completions_of(server: ToyServer, stream: Stream) -> list[Completion]:
    """All that is left of a stream, in the order of members; the server goes on as long as some are missing."""
    unframer, found = Unframer(), list[Completion]()
    while (stream.missing or stream.ready) and not stream.broken:
        while not stream.ready and not stream.broken:
            await play(server)
        with suppress(EngineLost):
            found += [decoded(body, Completion) for body in unframer.feed(await stream.next())]
    return sorted(found, key=lambda completion: completion.member)
