"""A whole run on a virtual clock: the real controller, with simulated engines and trainer, and a workload of lengths,
durations and failure rates.

`rollout.controller` makes every decision (admit, filter, take, expire); only durations are simulated. A token's version
is the one live when it was sampled.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from stretto.core.columns import stamps_of
from stretto.core.events import Span
from stretto.core.records import Batch, Outcome, Prompt, Segment, StopReason, Trajectory, Verdict, trajectory_id
from stretto.rollout.adaptive import Pressure
from stretto.rollout.config import RolloutConfig
from stretto.rollout.controller import Controller, Ticket
from stretto.rollout.pacing import Pacing
from stretto.rollout.prompts import PromptStream
from stretto.store.selection import SelectionWatch
from stretto_foresight.simulator.accounts import Accounts, SimulationReport
from stretto_foresight.simulator.engines import Durations, EngineLimits, Flight, SimulatedEngine, VirtualClock


class GroupLengths(Protocol):
    """Lengths of a simulated run, and the shares (0 to 1) of groups that fail or are filtered (Protocol).
    `prompt_tokens`: length of each prompt in tokens of the model."""

    @property
    def prompt_tokens(self) -> int: ...
    @property
    def failure_rate(self) -> float: ...
    @property
    def filter_rate(self) -> float: ...

    def groups(self, chance: random.Random, members: int) -> Iterator[tuple[int, ...]]:
        """Draw groups of `members` lengths in simulated tokens without end, from `chance`."""


@dataclass(frozen=True)
class Workload:
    """Workload with log-normal lengths, a constant token rate, and training steps of equal time: both the
    `GroupLengths` and the `Durations` of a run.

    Times are in an arbitrary unit. Lengths are truncated at `max_tokens`. `sigma`: standard deviation of their
    logarithm. `failure_rate` and `filter_rate` are shares of groups. `load_seconds` pass from a publication until an
    engine loads it. Prompts and verdicts take no time, and a load does not pause generation.
    """

    median_tokens: float = 16.0
    sigma: float = 1.0
    max_tokens: int = 512
    seconds_per_token: float = 1.0 / 16.0
    train_seconds: float = 1.0
    load_seconds: float = 0.0
    failure_rate: float = 0.0
    filter_rate: float = 0.0
    prompt_tokens: int = 0

    def answer_tokens(self, chance: random.Random) -> int:
        """Draw the length of one completion in tokens: 1 to `max_tokens`."""
        return max(1, min(self.max_tokens, round(chance.lognormvariate(0.0, self.sigma) * self.median_tokens)))

    def groups(self, chance: random.Random, members: int) -> Iterator[tuple[int, ...]]:
        while True:
            yield tuple([self.answer_tokens(chance) for _ in range(members)])

    def decode(self, rows: int, cached: float) -> float:
        return self.seconds_per_token

    def prefill(self, contexts: Sequence[float]) -> float:
        return 0.0

    def transfer(self) -> float:
        return self.load_seconds

    def load(self) -> float:
        return 0.0

    def judge(self) -> float:
        return 0.0

    def train(self, sequences: Sequence[int]) -> float:
        return self.train_seconds


_PROMPTS = 997
_TOKEN_BYTES = 8  # of a token id and a log-probability
_LOOK = 64  # events between two checks whether the time is over
_POLL_SECONDS = 1.0  # as in the conductor


def without_mismatch(batch: Batch) -> Mapping[str, float]:
    """Return what the trainer would measure for a batch if staleness had no effect: a KL divergence of zero."""
    return {"kl_behavior": 0.0}


class SimulatedRun:
    """One run of `steps` training steps, the first `warm` of which are not in its report; deterministic for its seed.

    `workload`: lengths, and shares of failed and filtered groups. `durations`: None: those of the workload, which must
    be a `Workload` then. `limits`: number and capacity of the engines; None: one engine without limits. `pacing`: when
    admitted groups may start; None: at once. `judges`: number of completions judged at the same time. `measured`:
    returns the trainer's measurements of a batch by name, for adaptive bounds (default: no mismatch).
    """

    def __init__(
        self,
        config: RolloutConfig,
        workload: GroupLengths,
        steps: int,
        seed: int,
        *,
        durations: Durations | None = None,
        limits: EngineLimits | None = None,
        pacing: Pacing | None = None,
        warm: int = 0,
        judges: int = 1,
        measured: Callable[[Batch], Mapping[str, float]] = without_mismatch,
    ) -> None:
        if durations is None:
            assert isinstance(workload, Workload), "lengths alone say no durations"
            durations = workload
        self.clock = VirtualClock()
        self.accounts = Accounts()
        self.report = SimulationReport()
        self._workload, self._steps, self._warm = workload, steps, warm
        self._durations, self._measured = durations, measured
        self._limits = limits or EngineLimits()
        self._chance = random.Random(seed)
        self._lengths = workload.groups(self._chance, config.group_size)
        prompts = PromptStream([Prompt(id=str(i), token_ids=(0,), text="", answer="") for i in range(_PROMPTS)], seed)
        self.selection = SelectionWatch(
            self.accounts, self.clock.now, say=lambda said: self.report.warnings.append(said)
        )
        self.selection.sampled = lambda group_id: self._aborted.pop(group_id, 0)
        self.spans: list[Span] = []  # spans of the trainer and of the first engine
        self._aborted: dict[str, int] = {}  # sampled tokens of groups that are about to expire in flight
        self.controller = Controller(config, prompts, self.selection, seed, pacing=pacing)
        self._engines = [
            SimulatedEngine(
                self.clock, self._durations, self._limits, self._completed, self._loaded, None if number else self.spans
            )
            for number in range(self._limits.count)
        ]
        self._flights: dict[str, tuple[Flight, SimulatedEngine]] = {}
        self._idle_since: float | None = 0.0
        self._watched, self._preempted = False, 0  # whether pressure is polled; preemptions at the last poll
        self._free = [0.0] * judges  # heap of the times at which each judge is free

    def run(self, over: Callable[[], bool] = lambda: False) -> SimulationReport:
        """Run to the last step and return the report; called once. Once `over` returns True, the warm-up ends, and the
        run as soon as the report has a step. Raises RuntimeError if no event is left before the end, so the run is
        stuck."""
        self._admit()
        self._run_steps(self._warm, over)
        began, before, gone = self.clock.now(), self._engine_counts(), len(self.accounts.expired)
        self.report = SimulationReport()
        self._run_steps(self._steps - self._warm, lambda: self.report.steps > 0 and over())
        self.report.seconds = self.clock.now() - began
        counts = [now - then for now, then in zip(self._engine_counts(), before, strict=True)]
        self.report.generating, self.report.loading, self.report.recomputing = counts[:3]
        self.report.sampled, self.report.recomputed, self.report.preempted = counts[3:]
        self.report.max_staleness = self.controller.max_staleness
        self.report.max_in_flight = self.controller.max_in_flight
        for trajectory in self.accounts.expired[gone:]:
            length = trajectory.sampled_length
            self.report.expire(length, sampled=length)
        return self.report

    def _run_steps(self, steps: int, over: Callable[[], bool]) -> None:
        events = 0
        while self.report.steps < steps:
            if not self.clock.advance():
                raise RuntimeError(f"stuck at step {self.report.steps}: {self.accounts.balance}")
            events += 1
            if not events % _LOOK and over():
                return

    def _engine_counts(self) -> tuple[float, ...]:
        engines = self._engines
        return (
            sum(engine.busy for engine in engines),
            sum(engine.loading for engine in engines),
            sum(engine.recomputing for engine in engines),
            sum(engine.sampled for engine in engines),
            sum(engine.recomputed for engine in engines),
            sum(engine.preempted for engine in engines),
        )

    # ── generation ───────────────────────────────────────────────────────────────────────────────

    def _admit(self) -> None:
        while (ticket := self.controller.admit()) is not None:
            self._start(ticket)

    def _start(self, ticket: Ticket) -> None:
        flight = Flight(ticket, self._workload.prompt_tokens, next(self._lengths))
        loads = [engine.load for engine in self._engines]
        engine = self._engines[loads.index(min(loads))]
        self._flights[ticket.group_id] = flight, engine
        engine.start(flight)
        if self.controller.config.max_in_flight == "auto" and not self._watched:
            self._watched = True
            self.clock.call_after(_POLL_SECONDS, self._observe_pressure)

    def _observe_pressure(self) -> None:
        """Report the engines' load to the controller, and admit groups by its new bounds. Schedules itself again after
        a second while any group is in flight."""
        before, self._preempted = self._preempted, sum(engine.preempted for engine in self._engines)
        needed = max(engine.needed() for engine in self._engines)
        self.controller.observe_pressure(Pressure(needed, self._preempted - before, len(self._engines)))
        self._watched = bool(self._flights)
        if self._watched:
            self.clock.call_after(_POLL_SECONDS, self._observe_pressure)
        self._admit()

    def _completed(self, flight: Flight) -> None:
        """Begin to judge the group of a finished completion if it was the group's last one; else do nothing. A group
        whose judging takes no time is finished at once."""
        if len(flight.versions) < len(flight.lengths) or flight.judged:
            return
        flight.judged = True
        seconds, judged = self._durations.judge(), self.clock.now()
        if not seconds:
            self._finish(flight)
            return
        for _ in flight.lengths:
            judged = max(self._free[0], self.clock.now()) + seconds
            heapq.heapreplace(self._free, judged)
        self.clock.call_at(judged, lambda: self._judge(flight, seconds * len(flight.lengths)))

    def _judge(self, flight: Flight, seconds: float) -> None:
        self.report.judging += seconds
        self._finish(flight)

    def _finish(self, flight: Flight) -> None:
        ticket = flight.ticket
        if self._flights.pop(ticket.group_id, None) is None:
            return  # aborted
        if self._chance.random() < self._workload.failure_rate:
            self.controller.fail(ticket, "simulated failure")
        else:
            flat = self._chance.random() < self._workload.filter_rate
            rewards = (1.0 if flat else float(member % 2) for member in ticket.members)
            trajectories = [self._trajectory(flight, member, reward) for member, reward in enumerate(rewards)]
            self.controller.finish(ticket, trajectories)
        self._train()
        self._admit()

    def _trajectory(self, flight: Flight, member: int, reward: float) -> Trajectory:
        length = flight.lengths[member]
        stamps = stamps_of(flight.versions[member])
        segment = Segment.sealed(bytes(_TOKEN_BYTES * length), length, stamps, stop_reason=StopReason.STOP)
        verdict = Verdict(outcome=Outcome.RIGHT if reward else Outcome.WRONG, reward=reward)
        return Trajectory(
            id=trajectory_id(flight.ticket.group_id, member), segments=(segment,), verdict=verdict, text=""
        )

    # ── training ─────────────────────────────────────────────────────────────────────────────────

    def _train(self) -> None:
        if self._idle_since is None or (batch := self.controller.take()) is None:
            return
        self.report.waiting += self.clock.now() - self._idle_since
        self._idle_since = None
        prompt, grain = self._workload.prompt_tokens, self._limits.grain
        lengths = (trajectory.sampled_length for group in batch.groups for trajectory in group.trajectories)
        seconds = self._durations.train([prompt + length * grain for length in lengths])
        self.clock.call_after(seconds, lambda: self._publish(batch, seconds))

    def _publish(self, batch: Batch, seconds: float) -> None:
        self.report.train(batch)
        self.report.training += seconds
        now, version = self.clock.now(), batch.version + 1
        self.spans.append(Span("trainer", "update", now - seconds, now, version))
        self.spans.append(Span("trainer", "publish", now, now, version))
        self.report.steps += 1
        self._idle_since = self.clock.now()
        self.controller.observe(version, self._measured(batch))
        self.controller.publish(version)
        self._stop_overdue()
        for engine in self._engines:
            self.clock.call_after(self._durations.transfer(), partial(engine.arrives, version))
        self._train()

    def _stop_overdue(self) -> None:
        for ticket in self.controller.overdue():
            flight, engine = self._flights.pop(ticket.group_id)
            sampled = engine.stop(flight)
            for length, tokens in zip(flight.lengths, sampled, strict=True):
                self.report.expire(length, sampled=tokens)
            self._aborted[ticket.group_id] = sum(sampled)
            self.controller.expire(ticket)

    def _loaded(self) -> None:
        self.controller.load(min(engine.served for engine in self._engines))
        self._admit()
