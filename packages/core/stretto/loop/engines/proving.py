"""Check of the weights that an engine has loaded, before it samples with them.

    trainer ─► canary of version v ─► challenge ─► engine: load v, score the text ─► verdict
                                                     ▲      not proven: once more ───┘
                                                     └ then it is replaced; then the run ends with `UnprovenWeights`

A *canary* is a fixed text with the trainer's log-probabilities of its tokens (`core.canary`). The *proof* of a version:
the engine's log-probabilities of that text differ from the trainer's by no more than a tolerance. The first proof of a
make of engine sets the tolerance of that make: `_MARGIN` times the difference measured then, in rounding units of the
dtype, clamped between two limits per dtype (`_UNITS`).

Between canaries an engine is judged by its sampled tokens (`Proving.agreed`). The trainer recomputes the
log-probability of each token that it trains on. Where these are few, the engine is asked to recompute some of its own
tokens. With each load the engine also says whether the weights that it leaves are still the proven ones. If not, their
proof is taken back: what is not yet trained of the engine's tokens of that version is given up (`Proving.withdraw`).
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
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
    Scores,
    agreeing,
    agreement,
    coarser,
    distance,
    spare,
)
from stretto.core.deadlines import deadline
from stretto.core.engine import Engine
from stretto.core.errors import DeadlineExceeded, RoleFailed, UnprovenWeights, WireError
from stretto.engine.wire import EngineSpec

_KEPT = 32  # canaries: while a machine pulls a version, the trainer may publish as many as the staleness bound allows
_LOOK_SECONDS = 0.02
_CANARY_SECONDS = 600.0  # timeout; a trainer that died after publishing trains the step again first
_MARGIN = 6.0
_ENOUGH_TOKENS = 32  # tokens of an engine needed for a meaningful mean
_ASKED_TOKENS = 64  # tokens that an engine recomputes
_UNJUDGED = 2  # versions that an engine loads without a judgement before it is asked to recompute tokens
THE_TRAINER, ITSELF = "the trainer", "its own forward"  #: judges: what recomputed sampled tokens
_ITS_MEMORY = "its memory"  # another judge, which compares the weights that an engine leaves with the proven ones
_RECENT = 4  # judgements by each judge of an engine that count; two beyond the limit are too many, whose they may be
_RANGES = 64  # of proven versions kept by engine; beyond, the oldest two become one, with versions never loaded between
_NAMED = 3  # most tensors named in a message
_LONGEST_NAME = 200  # characters of the name of one, which an engine says


@dataclass(frozen=True)
class _Units:
    """Limits of a make's tolerance, in rounding units of the coarser dtype of engine and trainer. `least`: lower limit.
    `first`: tolerance of the first proof, and upper limit."""

    least: float
    first: float


_UNITS = {"float32": _Units(48.0, 64.0), "bfloat16": _Units(2.0, 3.0), "float16": _Units(2.0, 3.0)}


#: Called when an engine has wrong weights, with (error that names the engine, final). `final`: the engine was replaced
#: for the same reason before, and must not be replaced again.
Distrust = Callable[[UnprovenWeights, bool], None]


class _ComputesIn(msgspec.Struct):
    """The fields of an `EngineConfig` that determine an engine's make and rounding."""

    kind: str = "native"
    dtype: str = "float32"
    on_update: str = "recompute"


class Proving:
    """Checks the engines of a run by canaries and by their sampled tokens; keeps the results and the tolerances. One
    instance serves all engines of a pool.

    Nothing is checked before `expect` is called: without a trainer there are no canaries. `distrust`: ends an engine
    whose sampled tokens disagree with recomputed ones, or whose weights have changed after their proof. `withdraw`:
    gives up the tokens, not yet trained on, that an engine (its name) has sampled with a version, for a reason.
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
        self._apart: dict[tuple[str, str], deque[bool]] = {}  # whether over the limit, by engine and judge, newest last
        self._replaced: set[tuple[str, str]] = set()  # (engine, judge) for which it was replaced, not passed since
        self._withdrawn: list[Proof] = []
        self._say: Callable[[str], None] = lambda text: None
        self.distrust: Distrust = lambda doubt, final: None
        self.withdraw: Callable[[str, int, str], None] = lambda engine, version, reason: None

    def expect(self, say: Callable[[str], None]) -> None:
        """Require from now on that engines prove each version that they load. `say` gets a log line if the first of the
        two tries fails, or if an engine's sampled tokens disagree for the first time."""
        self._expected, self._say = True, say

    def published(self, canary: Canary | None) -> None:
        """Keep the canary of a version that the trainer has published (None: do nothing); the newest 32 are kept."""
        if canary is not None:
            self._text, self._trained_in, self._routed = canary.token_ids, canary.dtype, canary.routed
            self._canaries[canary.version] = canary
            for version in sorted(self._canaries)[:-_KEPT]:
                del self._canaries[version]

    def doubts(self, engine: str) -> bool:
        """Record that `load` has failed for this engine; returns whether the load before failed too."""
        before = engine in self._doubted
        self._doubted.add(engine)
        return before

    def agreed(self, agreement: Sequence[Agreement], judge: str = THE_TRAINER) -> None:
        """Judge engines by the log-probabilities of their sampled tokens, compared with recomputed ones.

        Comparisons are summed, for each judge, until an engine has 32 tokens and a proof. An engine over the limit for
        the first time is logged; the second time within the last four judgements of each judge, it is replaced:
        `distrust` is called. If its replacement fails in the same way, that call says that it must not be replaced
        again.

        Args:
            agreement: one `Agreement` per engine.
            judge: `THE_TRAINER` or `ITSELF`; named in messages.
        """
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
        before = self._apart_of(engine)
        recent = self._apart.setdefault(case, deque(maxlen=_RECENT))
        recent.append(error > limit)
        if error > limit and before:
            for one in (case, *before):
                self._apart.pop(one, None)
            self._replace(engine, {case, *before}, told)
        elif error > limit:
            self._say(f"{engine} {told}")
        elif len(recent) == _RECENT and not any(recent):
            self._replaced.discard(case)

    def _apart_of(self, engine: str) -> set[tuple[str, str]]:
        return {case for case, recent in self._apart.items() if case[0] == engine and any(recent)}

    def _replace(self, engine: str, cases: set[tuple[str, str]], told: str) -> None:
        final = bool(cases & self._replaced)
        self._replaced |= cases
        self.distrust(UnprovenWeights(engine, told, 1), final)

    def _look_back(self, engine: str, scores: Scores) -> None:
        """Take back the proof of the version that an engine has left, if its weights were not the proven ones any more:
        the engine is replaced, and its tokens of that version are given up."""
        if scores.left < 0:
            return
        if not scores.changed:
            self._replaced.discard((engine, _ITS_MEMORY))
            return
        names = ", ".join(_shortened(scores.changed))
        told = f"has changed its weights after it had proven version {scores.left}: {names}"
        proof = msgspec.structs.replace(self._newest[engine], version=scores.left, proven=False, evidence=names)
        self._withdrawn.append(proof)
        self._refused += 1
        self._replace(engine, {(engine, _ITS_MEMORY)}, told)  # first: what is given up is sampled anew, by others
        self.withdraw(engine, scores.left, f"{engine} {told}")

    def _to_compute_again(self, engine: str) -> int:
        """Number of its own sampled tokens that an engine is asked to recompute at its next load; 0: it is judged often
        enough."""
        doubted = (engine, ITSELF) in self._apart_of(engine) | self._replaced
        return _ASKED_TOKENS if doubted or self._unjudged[engine] >= _UNJUDGED else 0

    async def load(self, spec: EngineSpec, client: Engine, version: int, served: int = -1) -> int:
        """Make an engine load `version` and check its weights; a load that fails or is not proven is repeated once.

        Before `expect` is called there is no check, and an engine whose version (`served`; -1: always load) is not
        older loads nothing.

        Returns:
            The version that the engine serves now: `version`, or a newer one.

        Raises:
            UnprovenWeights: the second check failed.
            RoleFailed: the second load failed, with an error of the engine.
            EngineLost: the engine does not reply.
            WireError: the version is not published, or not of this model, or so old that its canary is not kept, or the
                trainer's canary did not come in 600 s; the engine keeps its version.
            DeadlineExceeded: the engine made no progress with the load.
        """
        if not self._expected and version <= served:
            return served
        engine, facts = spec.name, msgspec.json.decode(spec.config, type=_ComputesIn)
        make, asked = f"{facts.kind} {facts.dtype}", Challenge(Canary(-1, (), (), 0), 0.0)

        async def ask(wanted: int) -> Challenge:
            nonlocal asked
            canary = await self._canary_of(wanted, engine)
            dtype = coarser(facts.dtype, canary.dtype)
            allowed = self._tolerances[make].allowed if make in self._tolerances else _UNITS[dtype].first
            more = spare(dtype, routed=canary.routed)
            keeps = facts.on_update == "keep"
            asked = Challenge(canary, allowed * canary.unit(dtype), self._to_compute_again(engine), more, keeps)
            return asked

        for again in (False, True):
            try:
                loaded = await client.update(version, ask if self._expected else None)
            except RoleFailed as failed:
                if again:
                    raise RoleFailed(engine, f"has not loaded version {version}: {failed.problem}", 1) from None
                self._say(f"{engine} has not loaded version {version} and loads it again: {failed.problem}")
                continue
            if not self._expected:
                return loaded.version
            if loaded.scores is not None and engine in self._newest:
                self._look_back(engine, loaded.scores)
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
        try:
            async with deadline("conductor", f"the canary of version {version} for {engine}", _CANARY_SECONDS):
                while version not in self._canaries:
                    if version < min(self._canaries, default=0):
                        raise WireError(f"{engine}: version {version} is too old to be proven; its canary is not kept")
                    await asyncio.sleep(_LOOK_SECONDS)
        except DeadlineExceeded as late:  # no engine is late
            raise WireError(str(late)) from None
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
        if len(ranges) > _RANGES:
            ranges[:2] = [(ranges[0][0], max(ranges[0][1], ranges[1][1]))]

    def shares(self) -> dict[str, float]:
        """Newest measured distance of each engine from the trainer, by name, as a share of its tolerance (above 1:
        refused)."""
        return {name: one.distance / one.tolerance for name, one in self._newest.items() if one.tolerance}

    @property
    def record(self) -> CanaryRecord:
        """The results so far, to keep in the ledger for `restore`."""
        return CanaryRecord(
            since=self._since,
            token_ids=self._text,
            tolerances=tuple(self._tolerances.values()),
            proven=tuple(Proven(engine, tuple(ranges)) for engine, ranges in self._ranges.items()),
            newest=tuple(self._newest.values()),
            worst=tuple(self._worst.values()),
            refused=self._refused,
            withdrawn=tuple(self._withdrawn),
        )

    def restore(self, record: CanaryRecord) -> None:
        """Take over the record of an earlier process of the run."""
        self._since, self._refused, self._text = record.since, record.refused, record.token_ids
        self._tolerances = {one.make: one for one in record.tolerances}
        self._ranges = {one.engine: list(one.ranges) for one in record.proven}
        self._newest = {one.engine: one for one in record.newest}
        self._worst = {one.engine: one for one in record.worst}
        self._withdrawn = list(record.withdrawn)


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
    return [*(name[:_LONGEST_NAME] for name in names[:_NAMED]), *([f"{more} more"] if more > 0 else [])]


def _told(proof: Proof) -> str:
    found = f"{proof.distance:.2g} nats from the trainer, {proof.tolerance:.2g} allowed"
    return found + (f"; not as published: {proof.evidence}" if proof.evidence else "")
