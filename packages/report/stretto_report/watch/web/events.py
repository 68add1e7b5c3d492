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

Event = tuple[str, str | None, Any]  # name, id, data


class Follower:
    """State of one client of the event stream: what it has been sent of a run."""

    def __init__(self, run: WatchedRun, last_id: str | None) -> None:
        """Begin to follow `run` for one client. `last_id`: id of the newest event that the client has. None: the client
        loads the curves itself; it is told to if the step of `last_id` is not there, or was trained again since."""
        self._run, self._last_id = run, last_id
        self._last: int | None = None
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
            yield "findings", self._newest_id, told  # with the first news: a client may come back before a step
        table = {"total": tables.trajectories.table.rows, "indexed": tables.trajectories.indexed}
        if self._changed("trajectories", tables.trajectories.changes):
            yield "trajectories", None, table
        if self._changed("timeline", tables.spans.end):
            yield "timeline", None, {"end": tables.spans.end}

    def _steps(self) -> Iterator[Event]:
        steps, told = self._run.tables.steps, self._last_id
        numbers = steps.table["step"]
        if told is not None:
            self._last, self._last_id = steps.step_of(told), None
            if self._last is None:
                yield "reset", self._newest_id, {}
        if not len(numbers):
            return
        newest = int(numbers[-1])
        if self._last is None or self._last > newest:
            self._last = newest
            return
        first = int(np.searchsorted(numbers, self._last, side="right"))
        if len(numbers) - first > _MOST_STEPS:
            self._last = newest
            yield "reset", self._newest_id, {}
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
            yield "step", steps.id(row), {"step": int(numbers[row]), "values": values, "x": x}
        self._last = newest

    @property
    def _newest_id(self) -> str | None:
        steps = self._run.tables.steps
        return steps.id(-1) if len(steps.table["step"]) else None

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
