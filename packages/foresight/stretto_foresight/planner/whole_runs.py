"""A machine's record corrected by whole runs, in which roles meet messages, records and neighbours.

Pairs of runs are predicted and measured. In the first run of a pair the roles work in turn: what they take in it and
what they took alone are two measurements of the same, and the record is in the middle of them. In the second one they
work beside each other: what is then left of its step is by how much they slow each other down.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import sqrt
from statistics import geometric_mean
from typing import NamedTuple

import msgspec

from stretto_foresight.planner.fit import DECODE_SECONDS, TRAIN_SECONDS
from stretto_foresight.planner.job import Job
from stretto_foresight.planner.layouts import own_layout
from stretto_foresight.planner.machine import MachineProfile
from stretto_foresight.planner.predict import predict

_ROUNDS = 3  # until prediction and run agree: what one role takes moves what the others do meanwhile
_DECODE = (DECODE_SECONDS, ("decode_flops", "weight_bandwidth", "cache_bandwidth"))
_TRAINING = (TRAIN_SECONDS, ("train_flops",))
_STEP, _GENERATION = "step_seconds", "engines.generate"
_TRAINER = ("trainer.proximal", "trainer.update", "trainer.publish")


@dataclass(frozen=True)
class RunSample:
    """A run of this machine: its job, with the lengths that it had, and the seconds of a step by role and work."""

    job: Job
    measured: Mapping[str, float]

    def slower(self, machine: MachineProfile) -> Callable[..., float]:
        """A function of terms: their measured over their predicted seconds together, 1 where either is nothing."""
        predicted = predict(self.job, machine, own_layout(self.job)).terms

        def ratio(*terms: str) -> float:
            expected = sum(predicted[term] for term in terms)
            seen = sum(self.measured.get(term, 0.0) for term in terms)
            return seen / expected if expected > 0 and seen > 0 else 1.0

        return ratio


class RunPair(NamedTuple):
    """A synchronous run and an asynchronous one of the same model."""

    in_turn: RunSample
    beside: RunSample


def fit_runs(machine: MachineProfile, pairs: Sequence[RunPair]) -> MachineProfile:
    """The record in the middle of what it says and what the runs say; where cores are shared, its `beside` too."""
    slower = [pair.in_turn.slower(machine) for pair in pairs]
    machine = _times(machine, _DECODE, sqrt(geometric_mean(of(_GENERATION) for of in slower)))
    machine = _times(machine, _TRAINING, sqrt(geometric_mean(of(*_TRAINER) for of in slower)))
    for _ in range(_ROUNDS if machine.cores else 0):
        both = geometric_mean([pair.beside.slower(machine)(_STEP) for pair in pairs])
        machine = msgspec.structs.replace(machine, beside=max(0.0, (1 + machine.beside) * both - 1))
    return machine


def _times(machine: MachineProfile, fields: tuple[Sequence[str], Sequence[str]], ratio: float) -> MachineProfile:
    """Seconds times the ratio, rates divided by it."""
    seconds, rates = fields
    changed = {name: getattr(machine, name) * ratio for name in seconds}
    changed |= {name: getattr(machine, name) / ratio for name in rates}
    return msgspec.structs.replace(machine, **changed)
