"""Counters and time spans of one engine, fetched from it while the run goes on."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import cast

import msgspec

from stretto.core.engine import Engine, EngineHealth
from stretto.core.errors import DeadlineExceeded, EngineLost, WireError
from stretto.core.events import Span
from stretto.core.tasks import cancel_and_wait
from stretto.processes.role import ReplaceableProcess


class EngineCounters:
    """Counters of one engine, summed over all of its processes, and its time spans.

    Attributes:
        health: counters of the present process, as of the last poll; None before the first.
    """

    def __init__(self, name: str, client: Engine, process: ReplaceableProcess) -> None:
        """`name`: of the engine, for its spans. `client`: asks it. `process`: converts its clock to the conductor's."""
        self.health: EngineHealth | None = None
        self._name, self._client, self._process = name, client, process
        self._earlier: list[EngineHealth] = []  # last counters of earlier processes
        self._ended = 0  # number of processes that were retired
        self._spans: list[Span] = []
        self._poll: asyncio.Task[None] | None = None

    def retire(self) -> None:
        """Keep the last counters of the process, which has ended or is of no use any more. Tokens of its unfinished
        completions now count as wasted. A reply of it that comes later is ignored."""
        if (last := self.health) is not None:
            self._earlier.append(msgspec.structs.replace(last, wasted=last.wasted + last.unfinished, unfinished=0))
        self.health = None
        self._ended += 1

    def poll(self, *, anew: bool = False) -> asyncio.Task[None]:
        """Fetch the counters and spans in a task, which is returned; it sets `health`, or changes nothing if the engine
        does not reply. A later call returns the same task until the reply has come, so a caller that stops waiting
        loses nothing. `anew`: return a task that asks again after that reply, which may be of a moment before this
        call."""
        before = self._poll
        if before is None or before.done():
            self._poll = asyncio.create_task(self._fetch())
        elif anew:
            self._poll = asyncio.create_task(self._fetch(before))
        return cast("asyncio.Task[None]", self._poll)

    async def _fetch(self, before: asyncio.Task[None] | None = None) -> None:
        if before is not None:
            await before
        asked = self._ended
        with contextlib.suppress(EngineLost, DeadlineExceeded, WireError):  # no news: a measurement ends no run
            health = await self._client.health()
            if asked == self._ended:  # else the counters are those of a process that is gone
                self.health = health
            spans = await self._client.spans()
            # Read after the wait: spans may have been drained during it. All are its own, whatever it calls them.
            shifted = (span.shifted(self._process.clock_offset) for span in spans)
            self._spans += [msgspec.structs.replace(span, role=self._name) for span in shifted]

    async def close(self) -> None:
        """Cancel a poll that is still open."""
        if self._poll is not None:
            await cancel_and_wait([self._poll])

    def drain_spans(self) -> list[Span]:
        """Return the spans fetched since the last call, and forget them."""
        spans, self._spans = self._spans, []
        return spans

    def total(self, counter: Callable[[EngineHealth], float]) -> float:
        """Sum of a counter over all processes of the engine, as of the last poll; 0 before the first. `counter`:
        returns it from a health reply."""
        return sum(counter(health) for health in (self.health, *self._earlier) if health is not None)
