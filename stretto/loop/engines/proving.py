"""Engines prove each version that they load, by the run's canary (`core.canary`), before it is live there.

    trainer ─► canary of version v ─► challenge ─► engine: load v, score the text ─► verdict
                                                     ▲      not proven: once more ───┘
                                                     └ then it is replaced; then the run ends with `UnprovenWeights`

A make is measured at its first proof of a run: from then on it is allowed `_MARGIN` times as many units of rounding,
never fewer than its type is granted, nor more than what a first proof may have.
"""

from __future__ import annotations

import asyncio
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
    distance,
)
from stretto.core.deadlines import deadline
from stretto.core.engine import Engine
from stretto.core.errors import UnprovenWeights
from stretto.engine.spec import EngineSpec

_KEPT = 4  # canaries: engines load the newest version, or the one before
_LOOK_SECONDS = 0.02
_CANARY_SECONDS = 600.0  # a trainer that has died after it has published trains the step again
_MARGIN = 6.0
_ENOUGH_TOKENS = 32  # of an engine in a step, for its mean to say something
_NAMED = 3  # tensors that a sentence names


@dataclass(frozen=True)
class _Units:
    """Limits by the type that an engine computes in. In units of rounding: what its make is granted whatever was
    measured, and what a first proof may need at most. In nats: how far sampled tokens may be from the trainer's on
    average of a step."""

    least: float
    first: float
    limit: float


_UNITS = {
    "float32": _Units(16.0, 64.0, 1e-3),
    "bfloat16": _Units(2.0, 3.0, 0.1),
    "float16": _Units(2.0, 3.0, 0.1),
}


class _ComputesIn(msgspec.Struct):
    """What is needed of an `EngineConfig`."""

    kind: str = "native"
    dtype: str = "float32"


class Proving:
    """The canaries of a run, what its engines made of them, and what they are allowed.

    A run without a trainer publishes nothing, and its engines prove nothing.
    """

    def __init__(self) -> None:
        self._expected = False
        self._canaries: dict[int, Canary] = {}
        self._tolerances: dict[str, MakeTolerance] = {}
        self._ranges: dict[str, list[tuple[int, int]]] = {}
        self._newest: dict[str, Proof] = {}
        self._worst: dict[str, Proof] = {}
        self._refused = self._since = 0
        self._doubted: set[str] = set()  # engines that have not proven a version, and none since
        self._text: tuple[int, ...] = ()
        self._apart: set[str] = set()  # engines that were beyond the limit in the last step that compared them
        self._replaced: set[str] = set()  # engines that were replaced for that, and have not been within it since
        self._say: Callable[[str], None] = lambda text: None
        self._distrust: Callable[[str, str], None] = lambda engine, why: None

    def expect(self, say: Callable[[str], None]) -> None:
        """Every version is proven from now on; `say` gets a sentence for each that is not."""
        self._expected, self._say = True, say

    def replace_with(self, distrust: Callable[[str, str], None]) -> None:
        """`distrust` gets the name of an engine that is to be replaced, and why."""
        self._distrust = distrust

    def published(self, canary: Canary | None) -> None:
        """The trainer has published a version with this canary."""
        if canary is not None:
            self._text = canary.token_ids
            self._canaries[canary.version] = canary
            for version in sorted(self._canaries)[:-_KEPT]:
                del self._canaries[version]

    def doubts(self, engine: str) -> bool:
        """Whether the engine has failed to prove a version before, and has proven none since; it is noted now."""
        before = engine in self._doubted
        self._doubted.add(engine)
        return before

    def agreed(self, agreement: Sequence[Agreement]) -> None:
        """The trainer has compared log-probabilities of a step. An engine that is beyond the limit of its type in two
        such steps, one after the other, is replaced.

        Raises:
            UnprovenWeights: it was replaced for that before, and has not been within the limit since.
        """
        for one in agreement:
            proof = self._newest.get(one.engine)
            if proof is None or one.tokens < _ENOUGH_TOKENS:
                continue
            limit = _UNITS[proof.make.split()[1]].limit
            told = f"differs from the trainer by {one.error:.2g} nats a token, {limit:g} allowed"
            if one.error <= limit:
                self._apart.discard(one.engine)
                self._replaced.discard(one.engine)
            elif one.engine not in self._apart:
                self._apart.add(one.engine)
                self._say(f"{one.engine} {told}")
            elif one.engine in self._replaced:
                raise UnprovenWeights(one.engine, told, 1)
            else:
                self._apart.discard(one.engine)
                self._replaced.add(one.engine)
                self._distrust(one.engine, told)

    async def load(self, spec: EngineSpec, client: Engine, version: int, served: int = -1) -> int:
        """Have an engine load a version, and once more where it does not prove it; returns the version that it has
        proven. Without a trainer nothing can be proven: an engine that serves the version as `served` loads nothing.

        Raises:
            UnprovenWeights: it has not proven it.
            EngineLost, WireError, DeadlineExceeded: as for `Engine.update`.
        """
        if not self._expected:
            return (await client.update(version)).version if version > served else served
        engine, facts = spec.name, msgspec.json.decode(spec.config, type=_ComputesIn)
        make, asked = f"{facts.kind} {facts.dtype}", Challenge(Canary(-1, (), (), 0), 0.0)

        async def ask(wanted: int) -> Challenge:
            nonlocal asked
            canary = await self._canary_of(wanted, engine)
            allowed = self._tolerances[make].allowed if make in self._tolerances else _UNITS[facts.dtype].first
            asked = Challenge(canary, allowed * canary.unit(facts.dtype))
            return asked

        for again in (False, True):
            loaded = await client.update(version, ask)
            proof = _judged(engine, make, asked, loaded, asked.canary.unit(facts.dtype))
            self._note(proof, facts.dtype)
            if proof.proven:
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
        """The newest distance of each engine from the trainer, as a share of its tolerance."""
        return {name: one.distance / one.tolerance for name, one in self._newest.items() if one.tolerance}

    @property
    def record(self) -> CanaryRecord:
        """What is known, for the ledger."""
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
        """Go on from the record of an earlier process of the run."""
        now, self._since = self.record, record.since
        ours = {one.make: one for one in now.tolerances}
        self._tolerances = {one.make: one for one in record.tolerances} | ours
        own = self._ranges
        self._ranges = {one.engine: list(one.ranges) for one in record.proven}
        for engine, ranges in own.items():
            self._ranges[engine] = [*self._ranges.get(engine, ()), *ranges]
        self._newest = {one.engine: one for one in record.newest} | self._newest
        self._worst = {one.engine: one for one in record.worst} | self._worst
        self._refused += record.refused


def _judged(engine: str, make: str, asked: Challenge, loaded: Loaded, unit: float) -> Proof:
    scores, canary = loaded.scores, asked.canary
    missing = "" if scores is not None else "it did not score the canary"
    if loaded.version != canary.version:
        missing = f"it says that it has version {loaded.version}"
    gap = distance(canary, scores) if scores is not None and not missing else FARTHEST
    evidence = missing or ", ".join(_shortened(scores.differing if scores is not None else ()))
    return Proof(
        engine=engine,
        make=make,
        version=canary.version,
        distance=gap,
        tolerance=asked.tolerance,
        unit=unit,
        proven=not evidence and gap <= asked.tolerance,
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
