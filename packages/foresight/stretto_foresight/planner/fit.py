"""Fit a machine's record to measurements by least squares, with the formulas of `costs`, and correct it by whole runs,
in which roles also exchange messages and disturb each other.

Pairs of runs are predicted and measured. In the first run of a pair, roles alternate. Its times, and the times measured
in isolation, are two estimates of the same costs; the record becomes their geometric mean. In the second run, roles
overlap; the difference that remains is their mutual slowdown.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import inf, sqrt
from statistics import geometric_mean
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from stretto.model.hf.shape import ModelShape
from stretto_foresight.planner.costs import Job, forward_flops
from stretto_foresight.planner.layouts import own_layout
from stretto_foresight.planner.machine import MachineProfile
from stretto_foresight.planner.predict import predict

Floats = npt.NDArray[np.float64]
_FREE = 1e18  # a rate so high that the work costs nothing
#: Fields of `MachineProfile` in the order of the fitted coefficients; the rates follow them.
DECODE_SECONDS = ("step_seconds", "layer_seconds", "row_seconds", "row_width_seconds")
TRAIN_SECONDS = (
    "train_seconds",
    "micro_batch_seconds",
    "token_width_seconds",
    "pair_width_seconds",
    "sequence_seconds",
    "parameter_seconds",
)


@dataclass(frozen=True)
class DecodeSample:
    """Measured seconds of one decode step of `rows` completions with `cached` tokens in the KV cache in total."""

    shape: ModelShape
    rows: int
    cached: float
    seconds: float


@dataclass(frozen=True)
class PrefillSample:
    """Measured seconds by which a prefill of contexts of these lengths prolonged a decode step."""

    shape: ModelShape
    contexts: tuple[int, ...]
    seconds: float


@dataclass(frozen=True)
class TrainSample:
    """Measured seconds of a training step with one minibatch in `passes` micro-batches, the copy of the weights for
    publication included. `sequences`: number of tokens of each sequence."""

    shape: ModelShape
    sequences: tuple[int, ...]
    passes: int
    seconds: float


@dataclass(frozen=True)
class LoadSample:
    """Measured seconds for which an engine paused to load this number of parameters."""

    parameters: int
    seconds: float


def least_squares(
    features: Sequence[Sequence[float]], seconds: Sequence[float], known: Sequence[float] | float = 0.0
) -> Floats:
    """Fit non-negative coefficients to samples, by least squares of the relative errors; return one per feature. While
    any coefficient is negative, the most negative is set to zero and the others are fitted again.

    `features`: values of one sample, for each sample. `seconds`: measured seconds of each sample. `known`: seconds of
    each sample, or of all alike, that the features need not explain.
    """
    rows, times = np.asarray(features, np.float64), np.asarray(seconds, np.float64)
    wanted = 1.0 - np.asarray(known, np.float64) / times
    weighted = rows / times[:, None]
    scale = np.abs(weighted).max(axis=0)
    scale[scale == 0] = 1.0
    kept = list(range(weighted.shape[1]))
    found = np.zeros(weighted.shape[1])
    while kept:
        values = np.linalg.lstsq(weighted[:, kept] / scale[kept], wanted, rcond=None)[0]
        if values.min() >= 0:
            found[kept] = values / scale[kept]
            break
        kept.pop(int(values.argmin()))
    return found


def fit_decode(samples: Sequence[DecodeSample]) -> Mapping[str, float]:
    """Fit the fields of `MachineProfile` for a decode step, and return their values by name."""
    found = least_squares(
        [
            (
                1.0,
                one.shape.layers,
                one.rows,
                one.rows * one.shape.layers * one.shape.hidden_size,
                2.0 * (one.shape.body + one.shape.embedding) * one.rows,
                one.cached * one.shape.cache_bytes("float32"),
            )
            for one in samples
        ],
        [one.seconds for one in samples],
    )
    rates = {"decode_flops": _rate(found[4]), "cache_bandwidth": _rate(found[5])}
    return dict(zip(DECODE_SECONDS, map(float, found[:4]), strict=True)) | rates


def fit_prefill(samples: Sequence[PrefillSample], layer_seconds: float) -> Mapping[str, float]:
    """Fit the fields of `MachineProfile` for prefill, and return their values by name.

    Each sample is one forward pass over all its contexts. The fixed time of a pass, `layer_seconds` (from `fit_decode`)
    per layer, is subtracted before the fit.
    """
    found = least_squares(
        [(1.0, sum(one.contexts), forward_flops(one.shape, one.contexts, len(one.contexts))) for one in samples],
        [one.seconds for one in samples],
        [one.shape.layers * layer_seconds for one in samples],
    )
    fixed, each = map(float, found[:2])
    return {"prefill_seconds": fixed, "prefill_token_seconds": each, "prefill_flops": _rate(found[2])}


def fit_training(samples: Sequence[TrainSample]) -> Mapping[str, float]:
    """Fit the fields of `MachineProfile` for a training step, and return their values by name."""
    found = least_squares(
        [
            (
                1.0,
                one.passes * one.shape.layers,
                sum(one.sequences) * one.shape.layers * one.shape.hidden_size,
                sum(length * length for length in one.sequences) * one.shape.layers * one.shape.width,
                len(one.sequences),
                one.shape.parameters,
                3.0 * forward_flops(one.shape, one.sequences, sum(one.sequences)),
            )
            for one in samples
        ],
        [one.seconds for one in samples],
    )
    return dict(zip(TRAIN_SECONDS, map(float, found[:6]), strict=True)) | {"train_flops": _rate(found[6])}


def fit_loads(samples: Sequence[LoadSample]) -> Mapping[str, float]:
    """Fit the fields of `MachineProfile` for a load of weights, and return their values by name."""
    fixed, each = least_squares([(1.0, one.parameters) for one in samples], [one.seconds for one in samples])
    return {"load_seconds": float(fixed), "load_parameter_seconds": float(each)}


def _rate(seconds: float) -> float:
    return float(min(_FREE, 1.0 / seconds if seconds > 0 else inf))


_ROUNDS = 3  # iterations: a changed slowdown changes which roles overlap
_DECODE = (DECODE_SECONDS, ("decode_flops", "weight_bandwidth", "cache_bandwidth"))
_TRAINING = (TRAIN_SECONDS, ("train_flops",))
_STEP, _GENERATION = "step_seconds", "engines.generate"
_TRAINER = ("trainer.proximal", "trainer.update", "trainer.publish")


@dataclass(frozen=True)
class RunSample:
    """A measured run on this machine. `job`: with the lengths that occurred. `measured`: mean seconds of a step by role
    and work, under the names of `LayoutPrediction.terms`."""

    job: Job
    measured: Mapping[str, float]

    def slower(self, machine: MachineProfile) -> Callable[..., float]:
        """Compare this run with its prediction for `machine`.

        Returns:
            A function that takes names of `LayoutPrediction.terms`, such as "engines.generate", and returns the ratio
            of their measured to their predicted seconds, each summed over the names; 1 if either sum is zero. It raises
            KeyError for a name that the prediction lacks.
        """
        predicted = predict(self.job, machine, own_layout(self.job)).terms

        def ratio(*terms: str) -> float:
            expected = sum(predicted[term] for term in terms)
            seen = sum(self.measured.get(term, 0.0) for term in terms)
            return seen / expected if expected > 0 and seen > 0 else 1.0

        return ratio


class RunPair(NamedTuple):
    """A synchronous run (`in_turn`) and an asynchronous run (`beside`) of the same model."""

    in_turn: RunSample
    beside: RunSample


def fit_runs(machine: MachineProfile, pairs: Sequence[RunPair]) -> MachineProfile:
    """Return the record with its costs of decode and training replaced by the geometric mean of themselves and what the
    synchronous runs took. If roles share cores (`machine.cores`), the slowdown `beside` is fitted to the asynchronous
    runs; else it stays."""
    slower = [pair.in_turn.slower(machine) for pair in pairs]
    machine = _times(machine, _DECODE, sqrt(geometric_mean(of(_GENERATION) for of in slower)))
    machine = _times(machine, _TRAINING, sqrt(geometric_mean(of(*_TRAINER) for of in slower)))
    for _ in range(_ROUNDS if machine.cores else 0):
        both = geometric_mean([pair.beside.slower(machine)(_STEP) for pair in pairs])
        machine = msgspec.structs.replace(machine, beside=max(0.0, (1 + machine.beside) * both - 1))
    return machine


def _times(machine: MachineProfile, fields: tuple[Sequence[str], Sequence[str]], ratio: float) -> MachineProfile:
    """Return the record with some fields multiplied and others divided by the ratio. `fields`: names of seconds, which
    are multiplied, then names of rates, which are divided."""
    seconds, rates = fields
    changed = {name: getattr(machine, name) * ratio for name in seconds}
    changed |= {name: getattr(machine, name) / ratio for name in rates}
    return msgspec.structs.replace(machine, **changed)
