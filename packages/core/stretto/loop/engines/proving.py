"""Engines prove each version that they load, by the run's canary (`core.canary`), before it is live there.

    trainer ─► canary of version v ─► challenge ─► engine: load v, score the text ─► verdict
                                                     ▲      not proven: once more ───┘
                                                     └ then it is replaced; then the run ends with `UnprovenWeights`

The first proof of a make in a run sets its tolerance: `_MARGIN` times the rounding units that were measured, at least
those granted to its type, at most those allowed to a first proof.

Between canaries an engine is judged by its sampled tokens (`Proving.agreed`). The trainer recomputes those it trains
on; where these are few, the engine is asked to recompute some of its own.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from stretto.core.canary import (
    FARTHEST,
    Agreement,
    Canary,
    CanaryRecord,
    Challenge,
    Loaded,
    MakeTolerance,
    Proof,
    Proven,
    agreeing,
    agreement,
    coarser,
    distance,
    spare,
)
from stretto.core.deadlines import deadline
from stretto.core.engine import Engine
from stretto.core.errors import UnprovenWeights
from stretto.engine.spec import EngineSpec

_KEPT = 4  # canaries: engines load the newest version, or the one before
_LOOK_SECONDS = 0.02
_CANARY_SECONDS = 600.0  # a trainer that died after publishing trains the step again
_MARGIN = 6.0
_ENOUGH_TOKENS = 32  # tokens of an engine needed for a meaningful mean
_ASKED_TOKENS = 64  # tokens that an engine recomputes
_UNJUDGED = 2  # versions loaded without a judgement before it is asked to recompute
THE_TRAINER, ITSELF = "the trainer", "its own forward"  #: the judge that recomputed sampled tokens
_NAMED = 3  # most tensors named in a message


@dataclass(frozen=True)
class _Units:
    """Limits in units of rounding, by the coarser dtype of engine and trainer: what any make is granted, and the most
    that a first proof may need."""

    least: float
    first: float


_UNITS = {"float32": _Units(48.0, 64.0), "bfloat16": _Units(2.0, 3.0), "float16": _Units(2.0, 3.0)}


#: Called with the doubt about an engine, and whether it replaced one doubted for the same reason (final).
Distrust = Callable[[UnprovenWeights, bool], None]


class _ComputesIn(msgspec.Struct):
    """The fields of an `EngineConfig` needed here."""

    kind: str = "native"
    dtype: str = "float32"


class Proving:
    """The canaries of a run, the engines' results on them, and the tolerances.

    Without a trainer nothing is published and nothing needs proof.
    """

    def __init__(self) -> None:
        self._expected = False
        self._canaries: dict[int, Canary] = {}
        self._tolerances: dict[str, MakeTolerance] = {}
        self._ranges: dict[str, list[tuple[int, int]]] = {}
        self._newest: dict[str, Proof] = {}
        self._worst: dict[str, Proof] = {}
        self._refused = self._since = 0
        self._doubted: set[str] = set()  # engines whose last proof failed
        self._text: tuple[int, ...] = ()
        self._trained_in, self._routed = "float32", False  # the trainer's dtype, and whether its model has experts
        self._compared: dict[tuple[str, str], Agreement] = {}  # compared tokens, still too few, by engine and judge
        self._unjudged: Counter[str] = Counter()  # versions loaded since the last judgement, by engine
        self._apart: set[tuple[str, str]] = set()  # (engine, judge) pairs over the limit at the last judgement
        self._replaced: set[tuple[str, str]] = set()  # pairs whose engine was replaced for it, and has not passed since
        self._say: Callable[[str], None] = lambda text: None
        self._distrust: Distrust = lambda doubt, final: None

    def expect(self, say: Callable[[str], None]) -> None:
        """Require a proof of every version from now on; `say` gets a log line for each failure."""
        self._expected, self._say = True, say

    def replace_with(self, distrust: Distrust) -> None:
        """Set `distrust`: called for an engine that must be replaced."""
        self._distrust = distrust

    def published(self, canary: Canary | None) -> None:
        """Note the canary of a version that the trainer has published."""
        if canary is not None:
            self._text, self._trained_in, self._routed = canary.token_ids, canary.dtype, canary.routed
            self._canaries[canary.version] = canary
            for version in sorted(self._canaries)[:-_KEPT]:
                del self._canaries[version]

    def doubts(self, engine: str) -> bool:
        """Note a failed proof of this engine; True if its previous proof failed too."""
        before = engine in self._doubted
        self._doubted.add(engine)
        return before

    def agreed(self, agreement: Sequence[Agreement], judge: str = THE_TRAINER) -> None:
        """Take comparisons of an engine's log-probabilities with those recomputed by `judge`, summed until there are
        enough tokens. An engine over the limit twice in a row is replaced; if its replacement is too, that is final."""
        for one in agreement:
            case = one.engine, judge
            proof, added = self._newest.get(one.engine), _added(self._compared.get(case), one)
            if proof is None or added.tokens < _ENOUGH_TOKENS:
                self._compared[case] = added
                continue
            self._compared.pop(case, None)
            self._unjudged[one.engine] = 0
            dtype = coarser(proof.make.split()[1], self._trained_in)
            self._judge(case, added.error, agreeing(dtype, routed=self._routed, tokens=added.tokens))

    def _judge(self, case: tuple[str, str], error: float, limit: float) -> None:
        engine, judge = case
        told = f"differs from {judge} by {error:.2g} nats a token, {limit:.2g} allowed"
        if error <= limit:
            self._apart.discard(case)
            self._replaced.discard(case)
        elif case not in self._apart:
            self._apart.add(case)
            self._say(f"{engine} {told}")
        else:
            self._apart.discard(case)
            final = case in self._replaced
            self._replaced.add(case)
            self._distrust(UnprovenWeights(engine, told, 1), final)

    def _to_compute_again(self, engine: str) -> int:
        """How many of its own tokens an engine is asked to recompute."""
        doubted = {(engine, ITSELF)} & (self._apart | self._replaced)
        return _ASKED_TOKENS if doubted or self._unjudged[engine] >= _UNJUDGED else 0

    async def load(self, spec: EngineSpec, client: Engine, version: int, served: int = -1) -> int:
        """Make an engine load a version, twice if the first proof fails; returns the version it has proven. Without a
        trainer there is no proof, and an engine that already serves the version (`served`) loads nothing.

        Raises:
            UnprovenWeights: both proofs failed.
            EngineLost, WireError, DeadlineExceeded: as for `Engine.update`.
        """
        if not self._expected:
            return (await client.update(version)).version if version > served else served
        engine, facts = spec.name, msgspec.json.decode(spec.config, type=_ComputesIn)
        make, asked = f"{facts.kind} {facts.dtype}", Challenge(Canary(-1, (), (), 0), 0.0)

        async def ask(wanted: int) -> Challenge:
            nonlocal asked
            canary = await self._canary_of(wanted, engine)
            dtype = coarser(facts.dtype, canary.dtype)
            allowed = self._tolerances[make].allowed if make in self._tolerances else _UNITS[dtype].first
            more = spare(dtype, routed=canary.routed)
            asked = Challenge(canary, allowed * canary.unit(dtype), self._to_compute_again(engine), more)
            return asked

        for again in (False, True):
            loaded = await client.update(version, ask)
            proof = _judged(engine, make, asked, loaded, asked.canary.unit(facts.dtype))
            self._note(proof, coarser(facts.dtype, asked.canary.dtype))
            if loaded.scores is not None and loaded.scores.sampled:
                self.agreed([agreement(engine, loaded.scores.sampled)], ITSELF)
            if proof.proven:
                self._unjudged[engine] += 1
                self._doubted.discard(engine)
                return loaded.version
            if again:
                raise UnprovenWeights(engine, f"has not proven version {proof.version}: {_told(proof)}", 1)
            self._say(f"{engine} has not proven version {proof.version} and loads it again: {_told(proof)}")
        raise AssertionError("the second time is the last")

    async def _canary_of(self, version: int, engine: str) -> Canary:
        async with deadline("conductor", f"the canary of version {version} for {engine}", _CANARY_SECONDS):
            while version not in self._canaries:
                await asyncio.sleep(_LOOK_SECONDS)
        return self._canaries[version]

    def _note(self, proof: Proof, dtype: str) -> None:
        self._newest[proof.engine] = proof
        worst = self._worst.get(proof.engine)
        if worst is None or proof.distance * worst.tolerance >= worst.distance * proof.tolerance:
            self._worst[proof.engine] = proof
        if not proof.proven:
            self._refused += 1
            return
        if proof.make not in self._tolerances:
            units = _UNITS[dtype]
            allowed = min(max(_MARGIN * proof.units, units.least), units.first)
            self._tolerances[proof.make] = MakeTolerance(proof.make, proof.units, allowed)
        ranges = self._ranges.setdefault(proof.engine, [])
        if ranges and ranges[-1][0] <= proof.version <= ranges[-1][1] + 1:
            ranges[-1] = ranges[-1][0], max(proof.version, ranges[-1][1])
        else:
            ranges.append((proof.version, proof.version))

    def shares(self) -> dict[str, float]:
        """Latest distance of each engine from the trainer, as a share of its tolerance."""
        return {name: one.distance / one.tolerance for name, one in self._newest.items() if one.tolerance}

    @property
    def record(self) -> CanaryRecord:
        """The state to keep in the ledger."""
        return CanaryRecord(
            since=self._since,
            token_ids=self._text,
            tolerances=tuple(self._tolerances.values()),
            proven=tuple(Proven(engine, tuple(ranges)) for engine, ranges in self._ranges.items()),
            newest=tuple(self._newest.values()),
            worst=tuple(self._worst.values()),
            refused=self._refused,
        )

    def restore(self, record: CanaryRecord) -> None:
        """Continue from the record of an earlier process of the run."""
        self._since, self._refused, self._text = record.since, record.refused, record.token_ids
        self._tolerances = {one.make: one for one in record.tolerances}
        self._ranges = {one.engine: list(one.ranges) for one in record.proven}
        self._newest = {one.engine: one for one in record.newest}
        self._worst = {one.engine: one for one in record.worst}


def _added(one: Agreement | None, other: Agreement) -> Agreement:
    if one is None:
        return other
    tokens = one.tokens + other.tokens
    return Agreement(other.engine, tokens, (one.error * one.tokens + other.error * other.tokens) / tokens)


def _judged(engine: str, make: str, asked: Challenge, loaded: Loaded, unit: float) -> Proof:
    scores, canary = loaded.scores, asked.canary
    missing = "" if scores is not None else "it did not score the canary"
    if loaded.version != canary.version:
        missing = f"it says that it has version {loaded.version}"
    gap = distance(canary, scores) if scores is not None and not missing else FARTHEST
    allowed = asked.allowed(gap, scores.compared) if scores is not None else asked.tolerance
    evidence = missing or ", ".join(_shortened(scores.differing if scores is not None else ()))
    return Proof(
        engine=engine,
        make=make,
        version=canary.version,
        distance=gap,
        tolerance=allowed,
        unit=unit,
        proven=not evidence and gap <= allowed,
        evidence=evidence,
        compared=scores.compared if scores is not None else 0,
        tensors=len(canary.digests),
    )


def _shortened(names: tuple[str, ...]) -> list[str]:
    more = len(names) - _NAMED
    return [*names[:_NAMED], *([f"{more} more"] if more > 0 else [])]


def _told(proof: Proof) -> str:
    found = f"{proof.distance:.2g} nats from the trainer, {proof.tolerance:.2g} allowed"
    return found + (f"; not as published: {proof.evidence}" if proof.evidence else "")
