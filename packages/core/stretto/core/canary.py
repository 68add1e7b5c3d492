"""The canary: a fixed text whose log-probabilities prove which weights an engine computes with.

    trainer   log p of the text under version v ─────────────► conductor: expected
    engine    load v, then log p of the text by its own forward ► conductor: the distance of both, against a tolerance

The canary also holds the trainer's digest of each published tensor. An engine that can read its own memory compares
these with its weights, which finds even differences that rounding hides in a log-probability.

A version is live at an engine once the distance is within the tolerance. Before an engine loads the next one, it
compares its weights once more with what it has proven: the proof of a version whose weights have changed since is taken
back. Both sides round, so the tolerance is counted
in units of rounding: the expected error of the text's log-probabilities in the coarser of the two dtypes.

    unit       u √(2 depth) · mean |log p|        u: the unit roundoff of the type; two sums per layer, each rounded
    tolerance  units allowed to this make, dtype and version of the engine (`loop.engines.proving`) · unit

In a mixture of experts rounding may send a token to another expert. That moves the log-probability of this token by far
more than a unit: in float16 more rarely than in bfloat16, but as far. So in half precision the unit and the limit
`AGREEING` of such a model are `_ROUTED` times those of bfloat16. The mean over n tokens of the text is multiplied by
√(n / 64), because a single token moves the mean of few tokens more. In float32 this is so rare that the limits stay
narrow. A token that moves nevertheless is allowed for in the mean of sampled tokens (`agreeing`), and in the canary if
every tensor was compared with its digest (`Challenge.spare`).
"""

from __future__ import annotations

import math
import random
from collections.abc import Awaitable, Callable, Collection, Mapping
from statistics import fmean
from typing import Any

import msgspec

from stretto.core.frames import Count, Whole
from stretto.core.records import Record, Segment

#: Tokens of the text; shorter where the model's context is.
LENGTH = 64
#: The last tokens of the text, which an engine computes one at a time over its KV cache.
DECODED = 2
#: Distance (nats) if a log-probability is not finite; the largest possible.
FARTHEST = 1e4

#: Limits of `agreeing` (nats per token), by the coarser dtype of engine and trainer.
AGREEING = {"float32": 1e-3, "float16": 0.1, "bfloat16": 0.1}
_JUMP = 1.8  # nats: more than one token of a mixture has jumped (1.74 in benchmarks/results/logprob-distribution.json)
_ROUTED = 3.0  # factor on the limit and the unit of bfloat16, for mixtures of experts in half precision
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")  # keys of config.json

_ROUNDOFF = {"float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}


def coarser(*dtypes: str) -> str:
    """The dtype with the coarsest rounding, of float32, float16 and bfloat16.

    >>> coarser("float32", "bfloat16", "float16")
    'bfloat16'
    """
    return max(dtypes, key=_ROUNDOFF.__getitem__)


def routes(config: Mapping[str, Any]) -> bool:
    """Whether a model with this `config.json` is a mixture of experts: more than one expert in it or a table of it.

    >>> routes({"num_experts": 8}), routes({"text_config": {"num_local_experts": 4}}), routes({"num_experts": None})
    (True, True, False)
    """
    tables = [config, *(part for part in config.values() if isinstance(part, Mapping))]
    counts = [table.get(key) for table in tables for key in _EXPERTS]
    return any(isinstance(count, int) and count > 1 for count in counts)


def agreeing(dtype: str, *, routed: bool, tokens: int = 0) -> float:
    """Allowed mean absolute difference (nats per token) of sampled tokens' log-probabilities: limit of an `Agreement`.

    Args:
        dtype: the coarser dtype of engine and trainer.
        routed: whether the model is a mixture of experts.
        tokens: number of tokens in the mean. In float32 it adds an allowance for one token that another expert moves;
            0: none.

    >>> agreeing("bfloat16", routed=False), agreeing("float32", routed=True, tokens=1800)
    (0.1, 0.002)
    """
    if _jumps(dtype, routed=routed):
        return _ROUTED * AGREEING["bfloat16"]
    return AGREEING[dtype] + (_JUMP / tokens if routed and tokens else 0.0)


def spare(dtype: str, *, routed: bool) -> float:
    """Nats added to the tolerance of a mixture of experts in float32 if every tensor is proven by its digest; 0 for
    other models and dtypes. A token sent to another expert moves its own log-probability, and slightly those of later
    tokens.

    >>> spare("float32", routed=True), spare("float32", routed=False), spare("bfloat16", routed=True)
    (0.1, 0.0, 0.0)
    """
    return AGREEING["bfloat16"] if routed and dtype == "float32" else 0.0


def _jumps(dtype: str, *, routed: bool) -> bool:
    return routed and dtype != "float32"


class TensorDigest(Record, frozen=True):
    """Checksums of a tensor. `dtype`: its name in safetensors (F32, BF16). `checksum`: xxh3 (64 bits, 16 hex digits) of
    its values in this dtype, row-major and little endian. `sums`: two sums of its bits in 32 hex digits
    (`weights.mailbox.sums`), only from a trainer on a GPU; an engine on a GPU compares the sums, since it can compute
    them on the GPU. What was not computed is "". Compare digests by `agrees`, since == would compare "" too."""

    dtype: str
    checksum: str
    sums: str = ""

    def agrees(self, other: TensorDigest) -> bool:
        """Whether both are of equal tensors: the dtypes are equal, both digests have `checksum` or both have `sums`,
        and what both have is equal.

        >>> published, found = TensorDigest("F32", "12", sums="7 9"), TensorDigest("F32", "12")
        >>> published == found, published.agrees(found), published.agrees(TensorDigest("F32", "", sums="7 8"))
        (False, True, False)
        """
        both = [pair for pair in ((self.checksum, other.checksum), (self.sums, other.sums)) if all(pair)]
        return self.dtype == other.dtype and bool(both) and all(one == another for one, another in both)


class Canary(Record, frozen=True):
    """The trainer's scores of the text `token_ids` under one version. `logprobs`: log-probabilities (nats, temperature
    1) of all tokens but the first. `depth`: layers of the model; `dtype`: the trainer's. `digests`: digest of each
    published tensor by name, and of the base weights if adapters are published. `routed`: whether the model is a
    mixture of experts."""

    version: int
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    depth: int
    dtype: str = "float32"
    digests: Mapping[str, TensorDigest] = {}
    routed: bool = False

    def unit(self, dtype: str) -> float:
        """Unit of rounding: expected mean difference (nats per token) of the text's log-probabilities between the
        trainer and an engine that computes in `dtype`, if both have the same weights."""
        coarse = coarser(dtype, self.dtype)
        jumps = _jumps(coarse, routed=self.routed)
        roundoff = _ROUTED * _ROUNDOFF["bfloat16"] if jumps else _ROUNDOFF[coarse]
        return roundoff * math.sqrt(2 * self.depth) * fmean(map(abs, self.logprobs))


class Challenge(Record, frozen=True):
    """A canary sent with the order to load its version. The engine continues to sample only if its distance is within
    `tolerance` (nats per token); otherwise it must load again. `sampled`: number of tokens that the engine sampled with
    the previous version and recomputes before loading. `spare`: nats added to the tolerance if the engine has compared
    every tensor with its digest. `keeps`: whether KV entries of earlier versions may remain (`engine.on_update`)."""

    canary: Canary
    tolerance: float
    sampled: int = 0
    spare: float = 0.0
    keeps: bool = False

    def allowed(self, gap: float, compared: int) -> float:
        """Tolerance (nats per token) for scores at the distance `gap` from the canary: `tolerance`, plus `spare` if
        `gap` exceeds it and every tensor was compared with its digest. `compared`: number of compared tensors."""
        is_short = gap > self.tolerance and 0 < len(self.canary.digests) <= compared
        return self.tolerance + self.spare if is_short else self.tolerance

    def is_answered(self, scores: Scores) -> bool:
        """Whether `scores` prove that the engine computes with the canary's version; False if any tensor differs."""
        gap = distance(self.canary, scores)
        return not scores.differing and gap <= self.allowed(gap, scores.compared)


#: Returns the challenge to send with the order to load a version.
Ask = Callable[[int], Awaitable[Challenge]]


class Scores(Record, frozen=True):
    """An engine's scores of the text, right after loading a version.

    `logprobs`: log-probabilities of all tokens but the first. The last `decoded` of them were computed one token at a
    time over the KV cache, the others in one forward pass. `pairs`: two log-probabilities of each further token that a
    server such as vLLM sampled: computed over the cache, and in one forward pass. `differing`: names of tensors in the
    engine's memory that differ from the publication; `compared`: number of tensors compared with digests. `sampled`:
    two log-probabilities of each token that the engine sampled with the previous version: as reported, and recomputed.
    `left`: the version whose weights were compared again before they were replaced (-1: none); `changed`: names of
    those that were not the proven ones any more.
    """

    logprobs: tuple[float, ...]
    decoded: Count = 0
    pairs: tuple[tuple[float, float], ...] = ()
    differing: tuple[str, ...] = ()
    compared: Count = 0
    sampled: tuple[tuple[float, float], ...] = ()
    left: Whole = -1
    changed: tuple[str, ...] = ()

    def behind(self, before: Scores) -> Scores:
        """These scores, with what `before` says of the version that was left."""
        return msgspec.structs.replace(self, sampled=before.sampled, left=before.left, changed=before.changed)


def differing(digests: Mapping[str, TensorDigest], held: Mapping[str, TensorDigest]) -> tuple[str, ...]:
    """Names of the tensors whose digest in `held` (of an engine's memory, by name) does not agree with the published
    one in `digests`, which must have all names of `held`.

    >>> published = {"a": TensorDigest("F32", "12"), "b": TensorDigest("F32", "34")}
    >>> differing(published, {"a": TensorDigest("F32", "12"), "b": TensorDigest("F32", "35")})
    ('b',)
    """
    return tuple(name for name, digest in held.items() if not digests[name].agrees(digest))


def is_of(segment: Segment, engine: str, version: int) -> bool:
    """Whether a segment has tokens of `engine` and tokens of `version`: these may be the same tokens."""
    of_version = any(stamp[0] == version for stamp in segment.stamps)
    return of_version and any(name == engine for name, _ in segment.writers)


class Loaded(Record, frozen=True):
    """An engine's reply to an order to load: the version that samples its next token, and its scores; None if no
    challenge was sent."""

    version: Whole
    scores: Scores | None = None


def distance(canary: Canary, scores: Scores) -> float:
    """Mean absolute difference (nats per token) of an engine's log-probabilities from the expected ones. It is the
    largest of three means: of tokens computed in one forward pass, of tokens decoded one at a time, and of
    `scores.pairs`. If the model is a mixture of experts, each mean is multiplied by √(number of its tokens / 64). A
    log-probability that is not finite counts as a difference of 10,000, the largest that there is. The result is 10,000
    if the numbers of scores and of the canary's log-probabilities differ, or `scores.decoded` is more than either.

    >>> canary = Canary(version=1, token_ids=(5, 2, 7), logprobs=(-1.0, -2.0), depth=2)
    >>> distance(canary, Scores(logprobs=(-1.0, -2.5), decoded=1))
    0.5
    """
    if len(scores.logprobs) != len(canary.logprobs) or not 0 <= scores.decoded <= len(canary.logprobs):
        return FARTHEST
    gaps = [_gap(*pair) for pair in zip(canary.logprobs, scores.logprobs, strict=True)]
    together = len(gaps) - scores.decoded
    parts = gaps[:together], gaps[together:], [_gap(*pair) for pair in scores.pairs]
    weights = [math.sqrt(len(part) / LENGTH) if canary.routed else 1.0 for part in parts]
    return max(weight * fmean(part) for weight, part in zip(weights, parts, strict=True) if part)


def _gap(one: float, other: float) -> float:
    both = math.isfinite(one) and math.isfinite(other)
    return min(abs(one - other), FARTHEST) if both else FARTHEST


class Proof(Record, frozen=True):
    """Result of an engine's proof that it computes with a version. `make`: of the engine, with its dtype, as "native
    float32". `distance` of its scores from the canary, `tolerance` and `unit` (of rounding) are in nats per token.
    `evidence`: names of tensors that differ, as text; "" if none does. `compared`: number of tensors compared with
    their digests, of `tensors` in the version."""

    engine: str
    make: str
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
        """The distance in units of rounding; 10,000 if the unit is 0."""
        return self.distance / self.unit if self.unit else FARTHEST


class Agreement(Record, frozen=True):
    """Mean absolute difference (`error`, nats per token) between an engine's log-probabilities of sampled tokens, whose
    number is `tokens`, and log-probabilities recomputed under the same version. The trainer recomputes the tokens of a
    step; the engine itself recomputes as many as `Challenge.sampled` asks for."""

    engine: str
    tokens: int
    error: float


def agreement(engine: str, pairs: Collection[tuple[float, float]]) -> Agreement:
    """An `Agreement` with the mean absolute difference of `pairs`: (reported, recomputed) log-probabilities, at least
    one pair."""
    return Agreement(engine, len(pairs), fmean(_gap(*pair) for pair in pairs))


class MakeTolerance(Record, frozen=True):
    """Tolerance of a make of engine (`allowed`), fixed at its first proof, and the distance that was `measured` then;
    both in units of rounding (`Proof.units`)."""

    make: str
    measured: float
    allowed: float


class Proven(Record, frozen=True):
    """Versions that an engine has proven, as (first, last) ranges, both included."""

    engine: str
    ranges: tuple[tuple[int, int], ...]


class CanaryRecord(Record, frozen=True):
    """State of the canaries, saved in the ledger. `since`: first version with a canary (0, except in runs begun by an
    older stretto). `token_ids`: the text. `tolerances`: by make. `proven`: versions by engine. `newest` and `worst`:
    for each engine the newest proof, and the proof whose distance was the largest share of the tolerance. `refused`:
    number of failed proofs. `withdrawn`: proofs taken back, because the weights had changed before the next load."""

    since: int = 0
    token_ids: tuple[int, ...] = ()
    tolerances: tuple[MakeTolerance, ...] = ()
    proven: tuple[Proven, ...] = ()
    newest: tuple[Proof, ...] = ()
    worst: tuple[Proof, ...] = ()
    refused: int = 0
    withdrawn: tuple[Proof, ...] = ()


#: Ledger key of the `CanaryRecord`.
CANARY = "canary"


def text(vocabulary: int, context: int, reserved: Collection[int], seed: int) -> tuple[int, ...]:
    """The canary text of a run: random token ids drawn with the run's seed, 64 or `context` − 1 of them, whichever is
    less. `vocabulary`: number of token ids; `context`: of the model, in tokens; `reserved`: token ids that are not
    drawn.

    Random tokens make every part of the model matter: their log-probabilities are far from 0, since a trained model is
    never sure of them.
    """
    drawn = random.Random(f"canary {seed}")
    allowed = [token for token in range(vocabulary) if token not in reserved] or [0]
    return tuple(drawn.choices(allowed, k=min(LENGTH, context - 1)))
