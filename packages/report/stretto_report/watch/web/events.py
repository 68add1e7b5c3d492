"""Changes of a run as server-sent events."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

import msgspec
import numpy as np

from stretto_report.watch.index.steps import finite
from stretto_report.watch.runs.run import RunSummary, WatchedRun
from stretto_report.watch.web.pages import evaluation_of

_LOOK_SECONDS, _LONGEST_SECONDS = 0.5, 1.0  # pause between two polls of a run: least and most
_LOOK_SHARE = 200  # the same pause, as a multiple of a poll's time
_READ_SECONDS = 0.1
_PING_SECONDS = 10.0
_MOST_STEPS = 500  # most steps of one poll; a client further behind loads the curves again

Event = tuple[str, int | None, Any]  # name, id, data


class Follower:
    """State of one client of the event stream: what it has been sent of a run."""

    def __init__(self, run: WatchedRun, last_step: int | None) -> None:
        """Begin to follow `run` for one client. `last_step`: the newest step that the client has; None: the client
        loads the curves itself."""
        self._run, self._last = run, last_step
        self._summary: RunSummary | None = None
        self._seen: dict[str, Any] = {}
        self._alarms: set[tuple[str, str]] = set()
        self._epoch: int | None = None
        self._stands = False
        self._evaluations: int | None = None

    def news(self) -> list[Event]:
        """Read on for about 0.1 s, and return the events since the last call, each as (name, id or None, data).

        If the run's tables were released, only summary events are returned until one of its pages is opened. Otherwise
        two large runs would evict each other's tables again and again.
        """
        if self._epoch is not None and not self._run.is_open:
            news = [*self._row()] if self._stands else [("standing", None, {}), *self._row()]
            self._stands = True
            return news
        stood, self._stands = self._stands, False
        self._run.advance(_READ_SECONDS)
        return [*([("reset", None, {})] if stood else []), *self._row(), *self._news()]

    def _row(self) -> Iterator[Event]:
        if (summary := self._run.summary()) != self._summary:
            self._summary = summary
            yield "run", None, summary

    def _news(self) -> Iterator[Event]:
        tables = self._run.tables
        if self._epoch not in (None, tables.steps.epoch):
            self._last, self._evaluations = None, None
            yield "reset", None, {}
        self._epoch = tables.steps.epoch
        yield from self._steps()
        known, self._evaluations = self._evaluations, len(tables.steps.evaluations)
        if known is not None:
            yield from (("evaluation", None, evaluation_of(line)) for line in tables.steps.evaluations[known:])
        findings = self._run.findings()
        alarms = {(alarm.name, alarm.title): alarm for alarm in findings.alarms}
        fresh, self._alarms = alarms.keys() - self._alarms, {*alarms}
        yield from (("alarm", None, alarm) for key, alarm in alarms.items() if key in fresh)
        if self._changed("findings", told := findings.told()):
            yield "findings", None, told
        table = {"total": tables.trajectories.table.rows, "indexed": tables.trajectories.indexed}
        if self._changed("trajectories", tables.trajectories.changes):
            yield "trajectories", None, table
        if self._changed("timeline", tables.spans.end):
            yield "timeline", None, {"end": tables.spans.end}

    def _steps(self) -> Iterator[Event]:
        steps = self._run.tables.steps
        numbers = steps.table["step"]
        if not len(numbers):
            return
        newest = int(numbers[-1])
        if self._last is None or self._last > newest:
            self._last = newest
            return
        first = int(np.searchsorted(numbers, self._last, side="right"))
        if len(numbers) - first > _MOST_STEPS:
            self._last = newest
            yield "reset", newest, {}
            return
        if first == len(numbers):
            return
        columns = {name: steps.column(name) for name in steps.names}
        trained = np.cumsum(self._run.trained_by_step())
        tokens = np.cumsum(steps.table["trained_tokens"])
        for row in range(first, len(numbers)):
            values = {name: finite(float(column[row])) for name, column in columns.items()}
            x = {"step": int(numbers[row]), "wall_seconds": values["wall_seconds"], "rl_seconds": values["rl_seconds"]}
            x |= {"trained_tokens": float(tokens[row]), "trajectories": float(trained[row])}
            yield "step", int(numbers[row]), {"step": int(numbers[row]), "values": values, "x": x}
        self._last = newest

    def _changed(self, name: str, value: Any) -> bool:
        before, self._seen[name] = self._seen.get(name), value
        return bool(before != value)


async def stream(
    news: Callable[[], Awaitable[list[Event]]], is_gone: Callable[[], Awaitable[bool]]
) -> AsyncIterator[bytes]:
    """Poll `news` every half a second to a second, and yield its events as bytes of server-sent events, until the
    client disconnects (`is_gone` returns True). A comment follows the events of a poll, and is sent alone after ten
    seconds without events."""
    yield b"retry: 1000\n\n"
    pinged = time.monotonic()
    while not await is_gone():
        since = time.monotonic()
        events = await news()
        took = time.monotonic() - since
        for name, id, data in events:
            number = "" if id is None else f"id: {id}\n"
            yield f"event: {name}\n{number}".encode() + b"data: " + msgspec.json.encode(data) + b"\n\n"
        if events or time.monotonic() - pinged > _PING_SECONDS:
            pinged = time.monotonic()
            yield b": ping\n\n"
        await asyncio.sleep(min(_LONGEST_SECONDS, max(_LOOK_SECONDS, _LOOK_SHARE * took)))
