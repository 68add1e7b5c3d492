"""Correct a machine's record by whole runs, in which roles also exchange messages and disturb each other.

Pairs of runs are predicted and measured. In the first run of a pair, roles alternate. Its times, and the times measured
in isolation, are two estimates of the same costs; the record becomes their geometric mean. In the second run, roles
overlap; the difference that remains is their mutual slowdown.
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

_ROUNDS = 3  # iterations: a changed slowdown changes which roles overlap
_DECODE = (DECODE_SECONDS, ("decode_flops", "weight_bandwidth", "cache_bandwidth"))
_TRAINING = (TRAIN_SECONDS, ("train_flops",))
_STEP, _GENERATION = "step_seconds", "engines.generate"
_TRAINER = ("trainer.proximal", "trainer.update", "trainer.publish")


@dataclass(frozen=True)
class RunSample:
    """A measured run on this machine: its job with the lengths that occurred, and its seconds of a step by role and
    work."""

    job: Job
    measured: Mapping[str, float]

    def slower(self, machine: MachineProfile) -> Callable[..., float]:
        """Compare this run with its prediction for `machine`.

        Returns:
            A function that takes names of `LayoutPrediction.terms`, such as "engines.generate", and returns the ratio
            of their measured to their predicted seconds, each summed over the names; 1 if either sum is zero.
        """
        predicted = predict(self.job, machine, own_layout(self.job)).terms

        def ratio(*terms: str) -> float:
            expected = sum(predicted[term] for term in terms)
            seen = sum(self.measured.get(term, 0.0) for term in terms)
            return seen / expected if expected > 0 and seen > 0 else 1.0

        return ratio


class RunPair(NamedTuple):
    """A synchronous and an asynchronous run of the same model."""

    in_turn: RunSample
    beside: RunSample


def fit_runs(machine: MachineProfile, pairs: Sequence[RunPair]) -> MachineProfile:
    """Return the record with its costs moved halfway towards the measured runs. On shared cores, its slowdown `beside`
    is fitted too."""
    slower = [pair.in_turn.slower(machine) for pair in pairs]
    machine = _times(machine, _DECODE, sqrt(geometric_mean(of(_GENERATION) for of in slower)))
    machine = _times(machine, _TRAINING, sqrt(geometric_mean(of(*_TRAINER) for of in slower)))
    for _ in range(_ROUNDS if machine.cores else 0):
        both = geometric_mean([pair.beside.slower(machine)(_STEP) for pair in pairs])
        machine = msgspec.structs.replace(machine, beside=max(0.0, (1 + machine.beside) * both - 1))
    return machine


def _times(machine: MachineProfile, fields: tuple[Sequence[str], Sequence[str]], ratio: float) -> MachineProfile:
    """The record with the seconds in `fields` multiplied, and the rates divided, by the ratio."""
    seconds, rates = fields
    changed = {name: getattr(machine, name) * ratio for name in seconds}
    changed |= {name: getattr(machine, name) / ratio for name in rates}
    return msgspec.structs.replace(machine, **changed)
