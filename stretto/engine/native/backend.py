"""The native engine behind a server (satisfies `engine.backend.Backend`): versions come out of a mailbox."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from stretto.core.engine import EngineHealth
from stretto.core.events import Span
from stretto.core.records import GenerateRequest, Partials
from stretto.engine.backend import Stream
from stretto.engine.native.generation import Generation
from stretto.weights.mailbox import Subscriber


class NativeBackend:
    """No method awaits while it touches the engine, so weights are loaded between two steps."""

    def __init__(self, generation: Generation, subscriber: Subscriber) -> None:
        self._generation, self._engine, self._subscriber = generation, generation.engine, subscriber

    def submit_all(self, requests: Sequence[GenerateRequest]) -> Stream:
        """All requests begin in the same step."""
        return self._generation.submit_all(requests)

    def close(self, request: str) -> None:
        self._generation.close(request)

    def partials(self, known: Mapping[str, Sequence[int]]) -> Partials:
        found: Partials = {}
        for progress in self._engine.progress(known):
            found.setdefault(progress.request, {})[progress.member] = progress.segment
        return found

    async def update(self, version: int) -> int:
        if version != self._engine.version or not self._engine.updates:
            self._engine.update(version, self._subscriber.load(version))
        return self._engine.version

    async def health(self) -> EngineHealth:
        return self._engine.health()

    def drain_spans(self) -> list[Span]:
        return self._engine.drain_spans()
