"""What samples behind `stretto.Engine`: the engine of this process, or (`processes`) engines of their own."""

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
    """The native engine, stepped in the thread of `background`. All methods but `close` are called in that thread."""

    def __init__(self, engine: NativeEngine) -> None:
        self._generation = SharedGeneration(engine)
        self._steps = background().start(self._generation.run())

    @property
    def engines(self) -> Engines:
        """What samples, one request at a time, each of which may go on after tokens that are known."""
        return _OneAtATime(self)

    async def version(self) -> int:
        """Of the weights that sample the next token."""
        return self._generation.engine.version

    async def generate(self, requests: Sequence[GenerateRequest]) -> list[Completion]:
        """All completions, in no order; requests that are given together begin in the same step.

        Raises:
            RefusedRequest: one of them will not be served, and so none.
            EngineLost: it was closed, or the logits of a request are not finite.
        """
        return [completion async for completion in self.stream(requests)]

    async def stream(self, requests: Sequence[GenerateRequest]) -> AsyncIterator[Completion]:
        """As `generate`, each completion as it ends."""
        self._check_open()
        await self._generation.prepare(requests)
        with self._generation.streaming(requests) as stream:
            async for ended in stream:
                for one in ended:
                    completion = Completion(one.request, one.member, one.segment)
                    yield replace(completion, top_logprobs=tuple(one.top_logprobs))

    def partials(self, known: Mapping[str, Sequence[int]]) -> Partials:
        """Tokens of unfinished completions beyond the `known` ones."""
        return self._generation.partials(known)

    async def score(self, texts: Sequence[tuple[int, ...]]) -> list[tuple[float, ...]]:
        """The log-probabilities of all tokens of each text but the first."""
        self._check_open()
        return self._generation.engine.score(texts)

    async def update(self, weights: PolicyWeights) -> None:
        """Interrupt what is sampled, and go on by these weights.

        Raises:
            RefusedRequest: they are older than those in use.
            TornPublication: they are of another model.
        """
        self._check_open()
        self._generation.engine.update(weights.version, weights.tensors)

    def close(self) -> None:
        """Begin to end it, in any thread, that of the collector too."""
        self._steps.cancel()

    def _check_open(self) -> None:
        if not self._steps.done():
            return
        if not self._steps.cancelled():
            self._steps.result()
        raise EngineLost("engine", "is closed; load another one")


class _OneAtATime:
    """The engine of this process as one of a run's (satisfies `loop.engines.in_flight.Engines`)."""

    def __init__(self, source: SourceHere) -> None:
        self._source = source

    def generate(self, request: GenerateRequest, /, *, least: int = 0) -> AsyncIterator[Completion]:
        return self._source.stream([request])

    async def partials(self, known: Mapping[str, Sequence[int]], patience: float | None) -> Partials:
        return self._source.partials(known)
