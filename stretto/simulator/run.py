"""A whole run on a virtual clock: the real controller, simulated engines and trainer.

`rollout.controller` makes every decision (admit, filter, take, expire); only durations are simulated. A token's
version is the one that was live when it was sampled.
"""

from __future__ import annotations

import bisect
import math
import random
from dataclasses import dataclass

from stretto.core.clock import VirtualClock
from stretto.core.records import (
    Batch,
    Outcome,
    Prompt,
    Segment,
    StopReason,
    Trajectory,
    Verdict,
    trajectory_id,
)
from stretto.measures.selection import SelectionWatch
from stretto.rollout.config import RolloutConfig
from stretto.rollout.controller import Controller, Ticket
from stretto.rollout.prompts import PromptStream
from stretto.simulator.accounts import Accounts
from stretto.simulator.report import SimulationReport
from stretto.simulator.workload import Workload


@dataclass(frozen=True)
class Flight:
    """A group in flight: when it started, and the final lengths of its completions."""

    ticket: Ticket
    start: float
    lengths: tuple[int, ...]


class SimulatedRun:
    """One run of `steps` training steps; the same seed gives the same run."""

    def __init__(self, config: RolloutConfig, workload: Workload, steps: int, seed: int) -> None:
        self.clock = VirtualClock()
        self.accounts = Accounts()
        self.report = SimulationReport()
        self._workload, self._steps = workload, steps
        self._chance = random.Random(seed)
        prompts = PromptStream([Prompt(id=str(i), token_ids=(0,), text="", answer="") for i in range(997)], seed)
        self.selection = SelectionWatch(self.accounts, self.clock.now, say=self.report.warnings.append)
        self.selection.ask(self._sampled)
        self.controller = Controller(config, prompts, self.selection, seed)
        self._switches: list[float] = []  # times at which version 1, 2, ... became live
        self._flights: dict[str, Flight] = {}
        self._idle_since: float | None = 0.0

    def run(self) -> SimulationReport:
        """Run to the last step. Raises RuntimeError when no event is left before it: the run is stuck."""
        self._admit()
        while self.report.steps < self._steps:
            if not self.clock.advance():
                raise RuntimeError(f"stuck at step {self.report.steps}: {self.accounts.balance}")
        self.report.seconds = self.clock.now()
        for trajectory in self.accounts.expired:
            length = len(trajectory.token_ids)
            self.report.expire(length, sampled=length)
        return self.report

    def _admit(self) -> None:
        while (ticket := self.controller.admit()) is not None:
            self._start(ticket)

    def _start(self, ticket: Ticket) -> None:
        lengths = tuple(self._workload.answer_tokens(self._chance) for _ in ticket.members)
        flight = self._flights[ticket.group_id] = Flight(ticket, self.clock.now(), lengths)
        self.clock.call_after(max(lengths) * self._workload.seconds_per_token, lambda: self._finish(flight))

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
        ticket, length = flight.ticket, flight.lengths[member]
        segment = Segment(
            token_ids=(0,) * length,
            behavior_logprobs=(0.0,) * length,
            versions=self._versions(flight.start, length),
            stop_reason=StopReason.STOP,
        )
        verdict = Verdict(outcome=Outcome.RIGHT if reward else Outcome.WRONG, reward=reward)
        return Trajectory(id=trajectory_id(ticket.group_id, member), segments=(segment,), verdict=verdict, text="")

    def _versions(self, start: float, length: int) -> tuple[int, ...]:
        """The version that is live at ``start + t * seconds_per_token``, for each token t."""
        rate = self._workload.seconds_per_token
        version = bisect.bisect_right(self._switches, start)
        versions: tuple[int, ...] = ()
        for switch in self._switches[version:]:
            sampled = min(length, math.ceil((switch - start) / rate))
            versions += (version,) * (sampled - len(versions))
            version += 1
        return versions + (version,) * (length - len(versions))

    def _train(self) -> None:
        if self._idle_since is None or (batch := self.controller.take()) is None:
            return
        self.report.waiting += self.clock.now() - self._idle_since
        self._idle_since = None
        self.clock.call_after(self._workload.train_seconds, lambda: self._publish(batch))

    def _publish(self, batch: Batch) -> None:
        self.report.train(batch)
        self.report.steps += 1
        self._idle_since = self.clock.now()
        version = batch.version + 1
        self.controller.publish(version)
        self._stop_overdue()
        self.clock.call_after(self._workload.load_seconds, lambda: self._load(version))
        self._train()

    def _stop_overdue(self) -> None:
        for ticket in self.controller.overdue():
            self.controller.expire(ticket)
            flight = self._flights.pop(ticket.group_id)
            for length, sampled in zip(flight.lengths, self._so_far(flight), strict=True):
                self.report.expire(length, sampled)

    def _sampled(self, group_id: str) -> int:
        return sum(self._so_far(self._flights[group_id]))

    def _so_far(self, flight: Flight) -> list[int]:
        """The tokens that each completion has by now."""
        elapsed = int((self.clock.now() - flight.start) / self._workload.seconds_per_token)
        return [min(length, elapsed) for length in flight.lengths]

    def _load(self, version: int) -> None:
        self._switches.append(self.clock.now())
        self.controller.load(version)
        self._admit()
