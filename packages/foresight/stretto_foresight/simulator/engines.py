"""Simulated engines: continuous batching on a virtual clock, which replaces `time.monotonic`, with step times that
depend on rows and cache.

All running completions of an engine get one token per step. So a single counter, the *tick*, gives the progress of all,
and the tick at which a completion ends is known when it enters. Between two events, the step time is that of the middle
of the interval.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from stretto.core.events import Span
from stretto.rollout.controller import Ticket


class VirtualClock:
    """Clock that starts at 0 and jumps from event to event, so that waiting costs no real time.

    >>> clock = VirtualClock()
    >>> clock.call_at(2.0, lambda: print("two"))
    >>> clock.call_at(1.0, lambda: print("one"))
    >>> while clock.advance(): pass
    one
    two
    >>> clock.now()
    2.0
    """

    def __init__(self) -> None:
        self._now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()

    def now(self) -> float:
        return self._now

    def call_at(self, when: float, callback: Callable[[], None]) -> None:
        """Schedule `callback` at the time `when` (seconds). Events of the same time run in the order of scheduling.
        Raises ValueError if the time is past."""
        if when < self._now:
            raise ValueError(f"cannot schedule at {when}, it is {self._now} already")
        heapq.heappush(self._events, (when, next(self._order), callback))

    def call_after(self, delay: float, callback: Callable[[], None]) -> None:
        self.call_at(self._now + delay, callback)

    def advance(self) -> bool:
        """Jump to the next event and run it; return True, or False if there was none left."""
        if not self._events:
            return False
        self._now, _, callback = heapq.heappop(self._events)
        callback()
        return True


#: Share of the cache that must stay free for growth when a completion enters, as in the native engine.
GROWTH = 1 / 16
_ROUNDING = 1e-9  # relative rounding error of the clock between adjacent spans


class Durations(Protocol):
    """Durations of all work in seconds; numbers of tokens are the model's, not simulated ones (Protocol)."""

    def decode(self, rows: int, cached: float) -> float:
        """Seconds of one decode step for `rows` completions with `cached` tokens in the KV cache in total."""

    def prefill(self, contexts: Sequence[float]) -> float:
        """Seconds to compute the KV cache of contexts of these lengths."""

    def transfer(self) -> float:
        """Seconds from a publication until an engine can load it; generation continues meanwhile."""

    def load(self) -> float:
        """Seconds for which an engine pauses to load weights."""

    def judge(self) -> float:
        """Seconds in which one worker judges one completion. Judging begins after the last completion of the group."""

    def train(self, sequences: Sequence[int]) -> float:
        """Seconds of one training step, from the batch to the publication. `sequences`: lengths in tokens, with
        prompt."""


@dataclass(frozen=True)
class EngineLimits:
    """Number of engines (`count`), and limits of each. `slots`: most running completions. `cache_tokens`: capacity of
    the KV cache in tokens of the model. `recompute`: the KV cache of running completions is recomputed after a load.
    `load_interval`: least seconds between two loads. `grain`: tokens of the model for which one simulated token
    stands."""

    count: int = 1
    slots: float = math.inf
    cache_tokens: float = math.inf
    recompute: bool = True
    load_interval: float = 0.0
    grain: int = 1


@dataclass(eq=False)
class Flight:
    """A group in flight. `prompt`: prompt length in tokens of the model; `lengths`: final lengths of its completions in
    simulated tokens; `versions`: by member, the version that sampled each token, for each completion that has ended;
    `judged`: all have ended, and judging has begun."""

    ticket: Ticket
    prompt: int
    lengths: tuple[int, ...]
    versions: dict[int, tuple[int, ...]] = field(default_factory=dict)
    judged: bool = False


@dataclass(eq=False)
class _CompletionRow:
    """A completion that runs or waits in an engine. `member`: its index in the group. `entered`: tick at which it
    entered last; `before`: versions of the tokens that it had sampled before that tick, if it was preempted."""

    flight: Flight
    member: int
    entered: float = 0.0
    before: tuple[int, ...] = ()

    @property
    def left(self) -> int:
        return self.flight.lengths[self.member] - len(self.before)


class SimulatedEngine:
    """One engine on the virtual clock. `ended` is called with the group of each finished completion, once for each;
    `loaded` without arguments after each load. Spans of its work are appended to `spans`; None: they are not kept.
    `version`: of new tokens; `served`: the same, once its load is complete. `load`: completions that run or wait."""

    def __init__(
        self,
        clock: VirtualClock,
        durations: Durations,
        limits: EngineLimits,
        ended: Callable[[Flight], None],
        loaded: Callable[[], None],
        spans: list[Span] | None = None,
    ) -> None:
        self.version = self.served = 0  # version of new tokens; the same, once the load is complete
        self.busy = 0.0  # seconds, of which:
        self.loading = self.recomputing = 0.0
        self.sampled = self.recomputed = 0.0  # tokens of the model
        self.preempted = 0
        self.load = 0  # completions that run or wait
        self._clock, self._durations, self._limits = clock, durations, limits
        self._ended, self._loaded, self._spans = ended, loaded, spans
        self._tick, self._at, self._step = 0.0, 0.0, 1.0  # the tick at time `_at`, which is in the future in a pause
        self._running: list[tuple[float, int, _CompletionRow]] = []  # heap by the tick at which they end
        self._waiting: deque[_CompletionRow] = deque()
        self._entered = 0
        self._cached = 0.0
        self._switches: list[tuple[float, int]] = []  # ticks at which versions became the current one
        self._arrived, self._last_load = 0, -math.inf
        self._plan_number = 0

    def start(self, flight: Flight) -> None:
        """Queue the completions of a group, and run as many as there is room for."""
        self.load += len(flight.lengths)
        self._waiting.extend(_CompletionRow(flight, member) for member in range(len(flight.lengths)))
        self._go_on()

    def stop(self, flight: Flight) -> list[int]:
        """Abort a group: free its slots and cache, and return the number of tokens that each completion has sampled, by
        member. A preempted completion counts with the tokens from before its preemption."""
        self._advance()
        sampled = {member: len(versions) for member, versions in flight.versions.items()}
        sampled |= {row.member: len(row.before) for row in self._waiting if row.flight is flight}
        for row in self._rows():
            if row.flight is flight:
                self._cached -= self._context(row)
                sampled[row.member] = min(
                    int(len(row.before) + self._tick - row.entered), row.flight.lengths[row.member]
                )
        self._running = [entry for entry in self._running if entry[2].flight is not flight]
        heapq.heapify(self._running)
        self._waiting = deque(row for row in self._waiting if row.flight is not flight)
        self.load = len(self._running) + len(self._waiting)
        self._go_on()
        return [sampled.get(member, 0) for member in range(len(flight.lengths))]

    def needed(self) -> float:
        """Return the share of the slots, or of the KV cache if that is larger, that the running and waiting completions
        need; above 1 if there are too many."""
        self._advance()
        mean = self._cached / max(1, len(self._running))
        tokens = (row.flight.prompt + len(row.before) * self._limits.grain for row in self._waiting)
        cached = self._cached + sum(max(mean, count) for count in tokens)
        return max(self.load / self._limits.slots, cached / self._limits.cache_tokens)

    def arrives(self, version: int) -> None:
        """Make a version available. The engine loads it at once if it is idle; else not before `load_interval` seconds
        after its previous load. A version that is not newer than its own is not loaded."""
        self._arrived = max(self._arrived, version)
        self._load_when_due()

    def _load_when_due(self) -> None:
        if self._arrived <= self.version:
            return
        due = self._last_load + self._limits.load_interval if self._running else 0.0
        if self._clock.now() < due:
            self._clock.call_at(due, self._load_when_due)
            return
        self._advance()
        self.version, self._last_load = self._arrived, self._clock.now()
        self._switches.append((self._tick, self.version))
        seconds = self._durations.load()
        self.loading += seconds
        self._pause(seconds, "load")
        ready = self._at
        if self._limits.recompute and self._running:
            contexts = list(self._own_contexts())
            self.recomputed += sum(contexts)
            seconds = self._durations.prefill(contexts)
            self.recomputing += seconds
            self._pause(seconds, "recompute")
        self._go_on()
        version = self.version
        if ready > self._clock.now():
            self._clock.call_at(ready, lambda: self._serve(version))
        else:
            self._serve(version)

    def _serve(self, version: int) -> None:
        self.served = version
        self._loaded()

    # ── ticks ────────────────────────────────────────────────────────────────────────────────────

    def _rows(self) -> Iterator[_CompletionRow]:
        return (row for _, _, row in self._running)

    def _context(self, row: _CompletionRow) -> float:
        return row.flight.prompt + (len(row.before) + self._tick - row.entered) * self._limits.grain

    def _own_contexts(self) -> Iterator[float]:
        """Yield the number of tokens to recompute for each running completion; a group's prompt counts once."""
        seen = set[int]()
        for row in self._rows():
            shared = row.flight.prompt if id(row.flight) in seen else 0
            seen.add(id(row.flight))
            yield max(1.0, self._context(row) - shared)

    def _advance(self, tick: float | None = None) -> None:
        """Advance the tick to the present time (None) or to `tick`, where it is known exactly, and count the tokens
        that were sampled since. Does nothing in a pause."""
        now = self._clock.now()
        if now < self._at:
            return
        if self._running:
            before = self._tick
            reached = tick if tick is not None else before + (now - self._at) / self._step
            # Rounding must neither pass the tick at which a completion ends nor go back; versions would be wrong.
            self._tick = max(before, min(reached, self._running[0][0]))
            tokens = (self._tick - before) * len(self._running) * self._limits.grain
            self._cached += tokens
            self.sampled += tokens
            self._work("generate", self._at, now)
        self._at = now

    def _pause(self, seconds: float, name: str = "generate") -> None:
        start = max(self._at, self._clock.now())
        self._at = start + seconds
        self._work(name, start, self._at)

    def _work(self, name: str, start: float, end: float) -> None:
        self.busy += end - start
        if self._spans is None or start == end:
            return
        if self._spans and (last := self._spans[-1]).name == name and start - last.end < _ROUNDING * end:
            self._spans[-1] = Span(last.role, name, last.start, end, self.version)
        else:
            self._spans.append(Span("engine-0", name, start, end, self.version))

    def _go_on(self) -> None:
        """Admit waiting completions, and schedule the next event: a completion ends, or the cache is full. None is
        scheduled if no completion runs. An event that was scheduled before is void."""
        self._advance()
        self._enter()
        self._plan_number += 1
        if not self._running:
            self._cached = 0.0
            return
        limits, rows = self._limits, len(self._running)
        until_full = (limits.cache_tokens - self._cached) / rows / limits.grain if rows > 1 else math.inf
        ticks = max(0.0, min(self._running[0][0] - self._tick, until_full))
        full = until_full <= ticks
        self._step = limits.grain * self._durations.decode(rows, self._cached + rows * ticks * limits.grain / 2)
        target = self._tick + ticks if full else self._running[0][0]
        number = self._plan_number
        when = max(self._at + ticks * self._step, self._clock.now())
        self._clock.call_at(when, lambda: self._reach(number, target, full))

    def _reach(self, number: int, tick: float, full: bool) -> None:
        if number != self._plan_number:
            return  # outdated: something else was scheduled since
        self._advance(tick)
        ended = []
        while self._running and self._running[0][0] <= tick:
            row = heapq.heappop(self._running)[2]
            self._cached -= self._context(row)
            row.flight.versions[row.member] = row.before + self._versions(row, row.left)
            ended.append(row.flight)
        self.load -= len(ended)
        if full and not ended:
            self._preempt()
        self._go_on()
        if not self._running:
            self._load_when_due()
        for flight in ended:
            self._ended(flight)

    def _enter(self) -> None:
        limits, contexts, seen = self._limits, list[float](), set[int]()
        if not self._running:
            self._tick = self._next_step()  # an idle engine is not within a step
        while self._waiting and len(self._running) < limits.slots:
            row = self._waiting[0]
            tokens = row.flight.prompt + len(row.before) * limits.grain
            if self._running and self._cached + tokens > limits.cache_tokens * (1 - GROWTH):
                break
            self._waiting.popleft()
            row.entered = self._next_step()
            heapq.heappush(self._running, (row.entered + row.left, self._entered, row))
            self._entered += 1
            self._cached += self._context(row)
            self.sampled -= (row.entered - self._tick) * limits.grain  # corrects for the ticks until it enters
            if row.before:
                contexts.append(tokens)
                self.recomputed += tokens
            elif id(row.flight) not in seen:  # the prompt is computed once for the completions that enter together
                seen.add(id(row.flight))
                contexts.append(tokens)
        if contexts:
            self._pause(self._durations.prefill(contexts))

    def _next_step(self) -> float:
        """Return the tick at which a completion that enters now begins: the end of the current step, so that
        completions end and others enter together. With a grain above 1 a tick is many steps, so it is the present
        tick."""
        return math.ceil(self._tick) if self._limits.grain == 1 else self._tick

    def _preempt(self) -> None:
        """Evict the newest completion from the full cache to the front of the queue. It keeps its tokens, and enters
        again when there is room."""
        newest = max(self._running, key=lambda entry: entry[1])
        self._running.remove(newest)
        heapq.heapify(self._running)
        row = newest[2]
        self._cached -= self._context(row)
        row.before += self._versions(row, min(row.left - 1, math.ceil(self._tick - row.entered)))
        self._waiting.appendleft(row)
        self.preempted += 1

    def _versions(self, row: _CompletionRow, tokens: int) -> tuple[int, ...]:
        """Return the version that sampled each of the `tokens` tokens of a row since its entry. Token t is sampled at
        tick ``entered + t``."""
        behind = len(self._switches)
        while behind and self._switches[behind - 1][0] > row.entered:
            behind -= 1
        version = self._switches[behind - 1][1] if behind else 0
        versions: tuple[int, ...] = ()
        for tick, newer in self._switches[behind:]:
            versions += (version,) * (min(tokens, math.ceil(tick - row.entered)) - len(versions))
            version = newer
        return versions + (version,) * (tokens - len(versions))
