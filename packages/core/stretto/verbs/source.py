"""The native engine in this process, as `stretto.Engine` uses it. `verbs.apart.engines` has the same methods for
engines in processes of their own."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence

from msgspec.structs import replace

from stretto.core.errors import EngineLost
from stretto.core.records import Completion, GenerateRequest, Partials
from stretto.engine.native.engine import NativeEngine
from stretto.engine.native.generation import SharedGeneration
from stretto.loop.engines.in_flight import Engines
from stretto.verbs.background import background
from stretto.verbs.weights import PolicyWeights


class SourceHere:
    """Runs the native engine in the thread of `background`. All methods but `close` must be called in that thread."""

    def __init__(self, engine: NativeEngine) -> None:
        self._generation = SharedGeneration(engine)
        self._steps = background().start(self._generation.run())

    @property
    def engines(self) -> Engines:
        """This source as the engines of a run: one request at a time, which may have prefixes."""
        return _OneAtATime(self)

    async def version(self) -> int:
        """Version of the weights that sample the next token."""
        return self._generation.engine.version

    async def generate(self, requests: Sequence[GenerateRequest]) -> list[Completion]:
        """Sample the completions of all requests, which begin in the same step; returns them in the order in which they
        end.

        Raises:
            RefusedRequest: a request is invalid; then none is sampled.
            EngineLost: the engine is closed, or the logits of a request are not finite.
        """
        return [completion async for completion in self.stream(requests)]

    async def stream(self, requests: Sequence[GenerateRequest]) -> AsyncIterator[Completion]:
        """Sample as `generate`, and yield each completion as it ends."""
        self._check_open()
        await self._generation.prepare(requests)
        with self._generation.streaming(requests) as stream:
            async for ended in stream:
                for one in ended:
                    completion = Completion(one.request, one.member, one.segment)
                    yield replace(completion, top_logprobs=tuple(one.top_logprobs))

    def partials(self, known: Mapping[str, Sequence[int]]) -> Partials:
        """Return the new tokens of unfinished completions, by request id and member. `known`: number of tokens already
        known of each member, by request id."""
        return self._generation.partials(known)

    async def score(self, texts: Sequence[tuple[int, ...]]) -> list[tuple[float, ...]]:
        """Compute the log-probabilities of all tokens but the first of each text (token ids)."""
        self._check_open()
        return self._generation.engine.score(texts)

    async def update(self, weights: PolicyWeights) -> None:
        """Load new weights; completions that are being sampled continue with them.

        Raises:
            RefusedRequest: the weights are older than those in use.
            TornPublication: the weights belong to another model.
        """
        self._check_open()
        self._generation.engine.update(weights.version, weights.tensors)

    def close(self) -> None:
        """Begin to end the engine. May be called in any thread, also by the garbage collector."""
        self._steps.cancel()

    def _check_open(self) -> None:
        if not self._steps.done():
            return
        if not self._steps.cancelled():
            self._steps.result()
        raise EngineLost("engine", "is closed; load another one")


class _OneAtATime:
    """Adapter from `SourceHere` to the engines of a run (satisfies `loop.engines.in_flight.Engines`)."""

    def __init__(self, source: SourceHere) -> None:
        self._source = source

    def generate(self, request: GenerateRequest, /, *, least: int = 0) -> AsyncIterator[Completion]:
        return self._source.stream([request])

    async def partials(self, known: Mapping[str, Sequence[int]], patience: float | None) -> Partials:
        return self._source.partials(known)
