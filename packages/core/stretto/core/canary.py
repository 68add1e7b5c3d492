"""The canary: a fixed text whose log-probabilities prove which weights an engine computes with.

    trainer   log p of the text under version v ─────────────► conductor: expected
    engine    load v, then log p of the text by its own forward ► conductor: the distance of both, against a tolerance

Beside the log-probabilities travels the digest of each published tensor, as the trainer wrote it. An engine that can
look into its memory hashes what it computes from: what a coarse type hides of a score shows there, to the last bit.

A version is live at an engine once the distance is within the tolerance. Both sides round, so the tolerance is counted
in units of rounding: what the text's log-probabilities err by in the coarser of the two types.

    unit       u √(2 depth) · mean |log p|        u: the unit roundoff of the type; two sums per layer, each rounded
    tolerance  units allowed to this make, dtype and version of the engine (`loop.engines.proving`) · unit
"""

from __future__ import annotations

import math
import random
from collections.abc import Awaitable, Callable, Collection, Mapping
from statistics import fmean

from stretto.core.records import Record

#: Tokens of the text; shorter where the model's context is.
LENGTH = 64
#: The last tokens of the text, which an engine computes one at a time over its KV cache.
DECODED = 2
#: Nats between two log-probabilities of which one is no finite number; no distance is larger.
FARTHEST = 1e4

#: Nats between log-probabilities of sampled tokens on average, by the coarser type of engine and trainer.
AGREEING = {"float32": 1e-3, "float16": 0.1, "bfloat16": 0.1}

_ROUNDOFF = {"float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}


def coarser(*dtypes: str) -> str:
    """The type that rounds the most.

    >>> coarser("float32", "bfloat16", "float16")
    'bfloat16'
    """
    return max(dtypes, key=_ROUNDOFF.__getitem__)


class TensorDigest(Record, frozen=True):
    """The xxh3 (64 bits, 16 hexadecimal digits) of a tensor's numbers, row by row without gaps, little endian, in this
    type. Types have the names of safetensors: F32, BF16."""

    dtype: str
    checksum: str


class Canary(Record, frozen=True):
    """The text under one version, by the trainer: the log-probabilities (nats, at temperature 1) of all tokens but the
    first. `depth`: layers of the model; `dtype`: what the trainer computed in; `digests`: of each tensor of the
    publication by its name there, and with adapters of what they are added to."""

    version: int
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    depth: int
    dtype: str = "float32"
    digests: Mapping[str, TensorDigest] = {}

    def unit(self, dtype: str) -> float:
        """What rounding comes to, in nats per token, where the engine computes in `dtype`."""
        return _ROUNDOFF[coarser(dtype, self.dtype)] * math.sqrt(2 * self.depth) * fmean(map(abs, self.logprobs))


class Challenge(Record, frozen=True):
    """A canary that comes with the order to load its version; within `tolerance` (nats per token) the engine goes on to
    sample, else it samples nothing until it has loaded the version again. `sampled`: tokens of its own, sampled with
    the version before, that it is to compute again before it loads."""

    canary: Canary
    tolerance: float
    sampled: int = 0

    def is_answered(self, scores: Scores) -> bool:
        """Whether an engine with these scores computes with the version of the canary."""
        return not scores.differing and distance(self.canary, scores) <= self.tolerance


#: The challenge that comes with a version.
Ask = Callable[[int], Awaitable[Challenge]]


class Scores(Record, frozen=True):
    """The text by an engine, right after it has loaded a version.

    `logprobs` are those of all tokens but the first; the last `decoded` of them were computed one at a time over the KV
    cache, the others together. `pairs` are of further tokens, which a server of another make has sampled: their
    log-probabilities over the cache, and computed together. `differing` names tensors in the engine's memory that are
    not the published ones; `compared` is how many tensors of the canary's digests it has compared. `sampled`: of tokens
    that it had sampled with the version before, the log-probability that it has told or will tell, and that of the same
    forward which computes the text.
    """

    logprobs: tuple[float, ...]
    decoded: int = 0
    pairs: tuple[tuple[float, float], ...] = ()
    differing: tuple[str, ...] = ()
    compared: int = 0
    sampled: tuple[tuple[float, float], ...] = ()


def differing(digests: Mapping[str, TensorDigest], held: Mapping[str, str]) -> tuple[str, ...]:
    """The tensors of `held` (checksums of an engine's memory, by name) that are not the published ones.

    >>> differing({"a": TensorDigest("F32", "12"), "b": TensorDigest("F32", "34")}, {"a": "12", "b": "35"})
    ('b',)
    """
    return tuple(name for name, checksum in held.items() if digests[name].checksum != checksum)


class Loaded(Record, frozen=True):
    """An engine's reply to the order to load a version: the version that the next step uses, and the text under it,
    where a canary came with the order."""

    version: int
    scores: Scores | None = None


def distance(canary: Canary, scores: Scores) -> float:
    """The mean difference of log-probabilities, nats: of the tokens computed together, of those over the cache, or of
    the pairs, whichever is largest; `FARTHEST` where a number is missing or is none.

    >>> canary = Canary(version=1, token_ids=(5, 2, 7), logprobs=(-1.0, -2.0), depth=2)
    >>> distance(canary, Scores(logprobs=(-1.0, -2.5), decoded=1))
    0.5
    """
    if len(scores.logprobs) != len(canary.logprobs) or not 0 <= scores.decoded <= len(canary.logprobs):
        return FARTHEST
    gaps = [_gap(*pair) for pair in zip(canary.logprobs, scores.logprobs, strict=True)]
    together = len(gaps) - scores.decoded
    parts = gaps[:together], gaps[together:], [_gap(*pair) for pair in scores.pairs]
    return max(fmean(part) for part in parts if part)


def _gap(one: float, other: float) -> float:
    both = math.isfinite(one) and math.isfinite(other)
    return min(abs(one - other), FARTHEST) if both else FARTHEST


class Proof(Record, frozen=True):
    """What an engine has shown of a version. `distance` and `tolerance` in nats per token; `unit` is that of the
    canary. `evidence`: the tensors that differ, of the `compared` ones; the version has `tensors`."""

    engine: str
    make: str  # native, vllm or sglang, and the type that it computes in: "native float32"
    version: int
    distance: float
    tolerance: float
    unit: float
    proven: bool
    evidence: str = ""
    compared: int = 0
    tensors: int = 0

    @property
    def units(self) -> float:
        """The distance in units of rounding."""
        return self.distance / self.unit if self.unit else FARTHEST


class Agreement(Record, frozen=True):
    """How far the log-probabilities of an engine's sampled tokens were from those computed again under their version:
    `error` is the mean difference (nats) over `tokens`. The trainer compares those of the version in training, of each
    step; an engine those of the version before, where it is asked to (`Challenge.sampled`)."""

    engine: str
    tokens: int
    error: float


def agreement(engine: str, pairs: Collection[tuple[float, float]]) -> Agreement:
    """That of an engine's sampled tokens, of which there are some."""
    return Agreement(engine, len(pairs), fmean(_gap(*pair) for pair in pairs))


class MakeTolerance(Record, frozen=True):
    """The units that a make is allowed from its first proof on, and what was measured then."""

    make: str
    measured: float
    allowed: float


class Proven(Record, frozen=True):
    """The versions that an engine has proven, as ranges of versions that it loaded one after the other."""

    engine: str
    ranges: tuple[tuple[int, int], ...]


class CanaryRecord(Record, frozen=True):
    """The canaries of a run, as the ledger keeps them: the version at which they began (0, except in a run that an
    earlier stretto began), the text, what makes are allowed, the versions proven, and of each engine its newest proof
    and the worst (the largest share of its tolerance)."""

    since: int = 0
    token_ids: tuple[int, ...] = ()
    tolerances: tuple[MakeTolerance, ...] = ()
    proven: tuple[Proven, ...] = ()
    newest: tuple[Proof, ...] = ()
    worst: tuple[Proof, ...] = ()
    refused: int = 0  # proofs that failed


#: The fact of the ledger that holds a `CanaryRecord`.
CANARY = "canary"


def text(vocabulary: int, context: int, reserved: Collection[int], seed: int) -> tuple[int, ...]:
    """The text of a run: token ids of the vocabulary, drawn by the run's seed among those that are not reserved.

    Random tokens make every part of the model matter: their log-probabilities are far from 0, where a trained model is
    sure of nothing.
    """
    drawn = random.Random(f"canary {seed}")
    allowed = [token for token in range(vocabulary) if token not in reserved] or [0]
    return tuple(drawn.choices(allowed, k=min(LENGTH, context - 1)))
