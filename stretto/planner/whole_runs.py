"""A machine's record corrected by whole runs: what roles take inside a run, over what they took alone.

A role in a run meets cold caches, messages, records and neighbours that no measurement of a function alone has. So two
runs are predicted and measured: one in which the roles work in turn corrects generation and training, one in which they
work beside each other says how much they slow each other down, and corrects the contexts that are computed again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import msgspec

from stretto.planner.job import Job
from stretto.planner.layouts import own_layout
from stretto.planner.machine import MachineProfile
from stretto.planner.predict import predict

_ROUNDS = 3  # until prediction and run agree: what one role takes moves what the others do meanwhile
_DECODE = (
    ("step_seconds", "layer_seconds", "row_seconds", "row_width_seconds"),
    ("decode_flops", "weight_bandwidth", "cache_bandwidth"),
)
_PREFILL = (("prefill_seconds", "prefill_token_seconds"), ("prefill_flops",))
_TRAINING = (
    ("train_seconds", "micro_batch_seconds", "token_width_seconds", "sequence_seconds", "parameter_seconds"),
    ("train_flops",),
)
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


def fit_runs(machine: MachineProfile, in_turn: RunSample, beside: RunSample) -> MachineProfile:
    """The record with which both runs come out about as they were measured.

    Args:
        in_turn: a synchronous run.
        beside: an asynchronous one, in which contexts are computed again; not looked at where each role has a device.
    """
    for _ in range(_ROUNDS):
        slower = in_turn.slower(machine)
        machine = _times(machine, _DECODE, slower("engines.generate"))
        machine = _times(machine, _TRAINING, slower(*_TRAINER))
        if not machine.cores:
            continue
        slower = beside.slower(machine)
        both = (slower("engines.generate") + slower(*_TRAINER)) / 2
        machine = _times(machine, _PREFILL, slower("engines.recompute"))
        machine = msgspec.structs.replace(machine, beside=max(0.0, (1 + machine.beside) * both - 1))
    return machine


def _times(machine: MachineProfile, fields: tuple[tuple[str, ...], tuple[str, ...]], ratio: float) -> MachineProfile:
    """Seconds times the ratio, rates divided by it."""
    seconds, rates = fields
    changed = {name: getattr(machine, name) * ratio for name in seconds}
    changed |= {name: getattr(machine, name) / ratio for name in rates}
    return msgspec.structs.replace(machine, **changed)
