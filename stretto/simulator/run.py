"""A whole run on a virtual clock: the real controller, simulated engines and trainer.

Every decision (admit, filter, take, expire) is made by `rollout.controller`; only durations are made up. A token's
version is the one that was live at the moment at which it was sampled.
"""

from __future__ import annotations

import bisect
import random
from collections import Counter
from dataclasses import dataclass, field

from stretto.core.clock import VirtualClock
from stretto.core.records import (
    Batch,
    Completion,
    Outcome,
    Prompt,
    Sampling,
    State,
    StopReason,
    Trajectory,
    Verdict,
    trajectory_id,
)
from stretto.rollout.config import RolloutConfig
from stretto.rollout.controller import Controller, Ticket
from stretto.rollout.prompts import PromptStream
from stretto.simulator.accounts import Accounts
from stretto.simulator.workload import Workload


@dataclass
class Report:
    """What a simulated run realised. Token counts are of answers; `staleness` counts trained tokens by their age."""

    steps: int = 0
    seconds: float = 0.0
    waiting: float = 0.0  # seconds in which the trainer had nothing to do
    staleness: Counter[int] = field(default_factory=Counter)
    masked: Counter[int] = field(default_factory=Counter)  # by the answer's length
    trained: Counter[int] = field(default_factory=Counter)  # by the answer's length, masked tokens included
    touched: int = 0  # trajectories with a masked token
    trajectories: int = 0
    dropped_tokens: int = 0  # of groups that expired

    @property
    def worst_staleness(self) -> int:
        return max(self.staleness, default=0)

    @property
    def mean_staleness(self) -> float:
        return sum(age * n for age, n in self.staleness.items()) / max(1, self.staleness.total())

    @property
    def masked_share(self) -> float:
        return self.masked.total() / max(1, self.trained.total())


class SimulatedRun:
    """One run of `steps` training steps; the same seed gives the same run."""

    def __init__(self, config: RolloutConfig, workload: Workload, steps: int, seed: int) -> None:
        self.clock = VirtualClock()
        self.accounts = Accounts()
        self.report = Report()
        self._config, self._workload, self._steps = config, workload, steps
        self._chance = random.Random(seed)
        prompts = PromptStream([Prompt(id=str(i), token_ids=(0,), text="", answer="") for i in range(997)], seed)
        self.controller = Controller(config, prompts, self.accounts, Sampling(max_tokens=workload.max_tokens), seed)
        self._switches: list[float] = []  # when version 1, 2, ... became live
        self._stopped: set[str] = set()
        self._idle_since: float | None = 0.0

    def run(self) -> Report:
        """Raises RuntimeError when nothing can happen any more before the last step: the run would be stuck."""
        self._admit()
        while self.report.steps < self._steps:
            if not self.clock.advance():
                raise RuntimeError(f"stuck at step {self.report.steps}: {self.accounts.balance}")
        self.report.seconds = self.clock.now()
        return self.report

    def _admit(self) -> None:
        while (ticket := self.controller.admit()) is not None:
            lengths = [self._workload.answer_tokens(self._chance) for _ in ticket.members]
            self._start(ticket, lengths, self.clock.now())

    def _start(self, ticket: Ticket, lengths: list[int], start: float) -> None:
        self.clock.call_after(
            max(lengths) * self._workload.seconds_per_token, lambda: self._finish(ticket, lengths, start)
        )

    def _finish(self, ticket: Ticket, lengths: list[int], start: float) -> None:
        if ticket.group_id in self._stopped:
            self._stopped.remove(ticket.group_id)
            return
        if self._chance.random() < self._workload.failure_rate:
            self.controller.fail(ticket, "simulated failure")
        else:
            flat = self._chance.random() < self._workload.filter_rate
            trajectories = [
                self._trajectory(ticket, member, length, start, reward=1.0 if flat else float(member % 2))
                for member, length in enumerate(lengths)
            ]
            self.controller.finish(ticket, trajectories)
        self._train()
        self._admit()

    def _trajectory(self, ticket: Ticket, member: int, length: int, start: float, reward: float) -> Trajectory:
        rate = self._workload.seconds_per_token
        versions = tuple(bisect.bisect_right(self._switches, start + t * rate) for t in range(length))
        completion = Completion(
            request=ticket.group_id,
            member=member,
            token_ids=(0,) * length,
            behavior_logprobs=(0.0,) * length,
            versions=versions,
            stop_reason=StopReason.STOP,
        )
        verdict = Verdict(outcome=Outcome.RIGHT if reward else Outcome.WRONG, reward=reward)
        return Trajectory(id=trajectory_id(ticket.group_id, member), completion=completion, verdict=verdict, text="")

    def _train(self) -> None:
        if self._idle_since is None:
            return
        expired = self.accounts.balance[State.EXPIRED]
        batch = self.controller.take()
        self.report.dropped_tokens += self.accounts.balance[State.EXPIRED] - expired
        if batch is None:
            return
        self.report.waiting += self.clock.now() - self._idle_since
        self._idle_since = None
        self._measure(batch)
        self.clock.call_after(self._workload.train_seconds, lambda: self._publish(batch.version + 1))

    def _publish(self, version: int) -> None:
        self.report.steps += 1
        self._idle_since = self.clock.now()
        self.controller.publish(version)
        for ticket in self.controller.overdue():
            self._stopped.add(ticket.group_id)
            self.controller.expire(ticket)
        self.clock.call_after(self._workload.load_seconds, lambda: self._load(version))
        self._train()

    def _load(self, version: int) -> None:
        self._switches.append(self.clock.now())
        self.controller.load(version)
        self._admit()

    def _measure(self, batch: Batch) -> None:
        report = self.report
        for trajectory in (t for group in batch.groups for t in group.trajectories):
            versions = trajectory.completion.versions
            fresh = [v for v in versions if v >= batch.oldest_trainable]
            report.staleness.update(batch.version - v for v in fresh)
            report.trained[len(versions)] += len(versions)
            report.masked[len(versions)] += len(versions) - len(fresh)
            report.touched += len(fresh) < len(versions)
            report.trajectories += 1
