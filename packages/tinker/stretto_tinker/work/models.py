"""Models in memory. The state of each is a function of its recorded requests.

    create 0 ─ forward_backward 1 ─ optim_step 2 ─ forward_backward 3 ─ optim_step 4 ─ ...
                                                 └ snapshot 2

A model in memory equals its snapshot on disk plus the effect of the requests after it, in order. After a kill these
requests are computed again, bit for bit, so that nothing is lost and each step is taken once. A snapshot is written
when the computation since the last one has taken a second, and 20 times as long as writing one takes. So writing costs
at most 5 % of the time, and a restart has little more than this to compute again. A model that leaves the memory is
written too, with the gradient that it has accumulated.
"""

from __future__ import annotations

import logging
import sqlite3
import time
from collections import OrderedDict
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from stretto.core.errors import RefusedRequest, StoreError, StrettoError, described, nearest
from stretto_tinker.checkpoints import Place, Weights
from stretto_tinker.compute.base import LocalBackend
from stretto_tinker.compute.files import Shape
from stretto_tinker.compute.learner import Found, Learner, Pieces
from stretto_tinker.compute.losses import loss_of
from stretto_tinker.record import DONE, JSON, PROTO, Asked, ModelRow, Record
from stretto_tinker.wire.bodies import Adam, CreateModel, LoadWeights, OptimStep, parse
from stretto_tinker.wire.datums import check, parse_job
from stretto_tinker.wire.outputs import encode_computed

log = logging.getLogger(__name__)

CREATE, LOAD, FORWARD, BACKWARD, STEP = "create_model", "load_weights", "forward", "forward_backward", "optim_step"
#: Kind of a request that was refused on arrival. It has a number, so that later requests can follow, and no effect.
REFUSED = "refused"
#: Kinds of requests that change a model; their bodies are kept until a snapshot holds their effect.
EFFECTS = frozenset({CREATE, LOAD, BACKWARD, STEP})
_STATE = "gradient.json"  # file of a snapshot with a gradient: the `_Accumulated`
_RATIO = 20.0
_LEAST_SECONDS = 1.0
_LEAST, _MOST = 2.0**-126, 2.0**127  # normal numbers of float32 (an integer in JSON may be larger than any float)


class ModelFacts(msgspec.Struct, frozen=True):
    """Recorded facts about a model. `base_model`: name of the base model. `corrupted`: a step that was computed again
    after a restart gave other weights than at first."""

    base_model: str
    shape: Shape
    user_metadata: dict[str, Any] | None = None
    corrupted: bool = False


class _Accumulated(msgspec.Struct, frozen=True):
    """State of the gradient in a snapshot: the fields `broken` and `grown` of `Live`."""

    broken: str
    grown: bool


@dataclass
class Live:
    """A model in memory.

    Attributes:
        seq: number of the last request whose effect it holds.
        broken: why the accumulated gradient is incomplete (a failed request); "" if it is complete.
        grown: whether a gradient is accumulated.
        behind: seconds of computation since the last snapshot.
        saving: seconds that writing the last snapshot took.
    """

    model: Learner
    facts: ModelFacts
    seq: int = -1
    broken: str = ""
    grown: bool = False
    behind: float = 0.0
    saving: float = 0.05


@dataclass
class ModelLane:
    """A model's queued requests, by number.

    Attributes:
        owner: id of the model's client.
        next: number of the request to compute next; it may not have arrived.
        started: number of the newest request that this process has started to compute; -1: none.
        waiting: requests that have arrived, without their bodies.
        work: rest of the computation of the request `next`; None if it has not begun.
    """

    owner: str
    next: int
    started: int = -1
    waiting: dict[int, Asked] = field(default_factory=dict)
    work: Pieces[None] | None = None


def busy_of(lanes: Mapping[str, ModelLane]) -> set[str]:
    """Ids of the models that have a request under way. `lanes`: by model id."""
    return {id for id, lane in lanes.items() if lane.work is not None}


class Models:
    """Models in memory: restores them from record and snapshot, applies requests, writes snapshots.

    Together they have at most the backend's `models_bytes`. Beyond this, the model that was used least recently leaves
    the memory, and is restored at its next request.
    """

    def __init__(self, backend: LocalBackend, record: Record, weights: Weights) -> None:
        self.backend, self._record, self._weights = backend, record, weights
        self._live: dict[str, Live] = {}
        self._held = OrderedDict[str, int]()  # bytes of the models that have room, the most recently used last

    def make_room(self, id: str, busy: Collection[str]) -> bool:
        """Make room in memory for the model `id`, if needed by removing models that are not in `busy` (ids), least
        recently used first. Return True, or False, with nothing changed, if the busy ones leave too little. If none is
        busy, there is room for any model, also for one that was accepted by a server with more memory."""
        if id not in self._held:
            row = self._record.model(id)
            assert row is not None, "a model is on record before its requests"
            needed = self.backend.memory_of(msgspec.json.decode(row.body, type=ModelFacts).shape)
            kept = sum(size for one, size in self._held.items() if one in busy)
            if kept and kept + needed > self.backend.models_bytes:
                return False
            for other in [one for one in self._held if one not in busy]:
                if sum(self._held.values()) + needed <= self.backend.models_bytes:
                    break
                self.retire(other)
            self._held[id] = needed
        self._held.move_to_end(id)
        return True

    def live(self, row: ModelRow) -> Pieces[Live]:
        """Return a model from memory, or restore it from its snapshot and the requests after it, in pieces.

        Raises:
            StoreError: files of its snapshot are missing or damaged.
        """
        if (found := self._live.get(row.id)) is None:
            found = self._live[row.id] = yield from self._restored(row)
        return found

    def _restored(self, row: ModelRow) -> Pieces[Live]:
        facts = msgspec.json.decode(row.body, type=ModelFacts)
        live = Live(self.backend.create(facts.shape), facts, row.snapshot)
        if row.snapshot >= 0:
            folder = self._weights.snapshot(row.id, row.snapshot)
            live.model.load(folder, optimizer=True)
            if (folder / _STATE).exists():
                known = msgspec.json.decode((folder / _STATE).read_bytes(), type=_Accumulated)
                live.broken, live.grown = known.broken, known.grown
        for asked in self._record.settled(row.id, row.snapshot, EFFECTS):
            yield from self._again(live, asked)
        return live

    def _again(self, live: Live, asked: Asked) -> Pieces[None]:
        """Apply a settled request to a model that is being restored; of a failed one, only what its failure did to the
        gradient. If a step gives other weights than at first, the model is recorded as corrupted."""
        live.seq = asked.seq
        if asked.state != DONE:
            why = msgspec.json.decode(asked.result)["error"] if asked.result else "it was not computed"
            self._failed(live, asked, why)
            return
        assert asked.body is not None, "bodies are kept until their effect is in a snapshot"
        yield from self._take_effect(live, asked)
        if asked.kind == STEP and asked.proof and asked.proof != live.model.digest():
            log.warning("%s: step %d gave other weights when it was computed again", asked.lane, asked.seq)
            live.facts = msgspec.structs.replace(live.facts, corrupted=True)
            self._record.describe_model(asked.lane, msgspec.json.encode(live.facts))

    def perform(self, live: Live, asked: Asked) -> Pieces[tuple[bytes, str, str]]:
        """Apply a new request, in pieces; returns its result, the result's encoding, and after a step a checksum of the
        weights ("" otherwise). After an error the request counts as applied: a failed forward_backward makes the
        gradient incomplete, a failed step clears it.

        Raises:
            RefusedRequest: a field is wrong, the loss is not finite, or a step has no complete and finite gradient.
            StoreError: weights to load are missing or damaged.
        """
        try:
            result, form = yield from self._take_effect(live, asked)
        except GeneratorExit:  # the server stops; after its restart the request is computed again
            raise
        except BaseException as error:
            self._failed(live, asked, said(error))
            live.seq = asked.seq
            raise
        live.seq = asked.seq
        return result, form, live.model.digest() if asked.kind == STEP else ""

    def _failed(self, live: Live, asked: Asked, why: str) -> None:
        """Note what a failed request does to the accumulated gradient: a failed backward pass leaves it incomplete
        (`Live.broken`), and a failed step clears it."""
        if asked.kind == BACKWARD:
            live.broken = live.broken or f"forward_backward {asked.seq} before this step failed: {why}"
        elif asked.kind == STEP:
            live.model.clear()
            live.broken, live.grown = "", False

    def _take_effect(self, live: Live, asked: Asked) -> Pieces[tuple[bytes, str]]:
        """Compute a request in pieces, and change `live` by its effect; returns its result and its encoding (protobuf
        for passes, else JSON)."""
        body = asked.body or b""
        if asked.kind in (FORWARD, BACKWARD):
            return (yield from self._compute(live, body)), PROTO
        began = time.monotonic()
        found = self._at_once(live, asked, body)
        live.behind += time.monotonic() - began
        return found, JSON

    def _at_once(self, live: Live, asked: Asked, body: bytes) -> bytes:
        """Apply a request that is computed in one piece (step; load, which also clears the gradient; creation, which
        changes nothing); returns its result as JSON. Raises RefusedRequest for a wrong field or a step without a
        complete gradient, and StoreError for a load of damaged weights."""
        if asked.kind == STEP:
            adam = adam_of(parse(body, OptimStep))
            if live.broken:
                raise RefusedRequest("optim_step", live.broken, "send its data again, right, and then the step")
            if not live.grown:
                raise RefusedRequest("optim_step", "there is no gradient", "a forward_backward before it")
            metrics, live.grown = live.model.optim_step(adam), False
            return msgspec.json.encode({"metrics": metrics})
        if asked.kind == LOAD:
            load = parse(body, LoadWeights)
            place = Place.of(load.path)
            live.model.load(self._weights.folder(place), optimizer=load.optimizer)
            live.model.clear()
            live.broken, live.grown = "", False
            return msgspec.json.encode({"path": place.path, "model_id": asked.lane, "type": "load_weights"})
        assert asked.kind == CREATE
        return msgspec.json.encode({"model_id": asked.lane, "type": "create_model"})

    def _compute(self, live: Live, body: bytes) -> Pieces[bytes]:
        if not body:
            raise RefusedRequest("body", "too large to be read", "send fewer datums")
        job = parse_job(body)
        loss = loss_of(job.loss)
        config = loss.configured(job.loss, job.config)
        data = job.datums()
        check(data, loss.takes, self.backend.vocabulary, self.backend.context, several=loss.several)
        computed = yield from _timed(
            live, live.model.forward_backward(data, job.loss, config, backward=not job.forward_only)
        )
        live.grown = live.grown or not job.forward_only
        return encode_computed(computed)

    def snapshot_if_due(self, live: Live, id: str, *, now: bool = False) -> None:
        """Write a snapshot if it is due, or at once with `now`. It is due once the computation since the last one has
        taken 20 times as long as its writing, and at least a second. None is due while a gradient is accumulated; with
        `now`, the snapshot includes the gradient. Older snapshots are then deleted.

        Raises:
            OSError, sqlite3.Error: the snapshot cannot be written; the earlier one stays.
        """
        accumulates = live.grown or bool(live.broken)
        due = not accumulates and live.behind >= max(_LEAST_SECONDS, _RATIO * live.saving)
        if not (now or due):
            return

        def write(folder: Path) -> None:
            live.model.save(folder, gradient=accumulates)
            if accumulates:
                (folder / _STATE).write_bytes(msgspec.json.encode(_Accumulated(live.broken, live.grown)))

        began = time.monotonic()
        self._weights.write(self._weights.snapshot(id, live.seq), write)
        self._record.snapshotted(id, live.seq)
        self._weights.keep_snapshot(id, live.seq)
        live.saving, live.behind = time.monotonic() - began, 0.0

    def retire(self, id: str) -> None:
        """Remove a model from memory, after a snapshot if it has changed; an unknown id is ignored. It is restored at
        its next request. If the snapshot cannot be written, this is logged, and the requests since the last snapshot
        are computed again when the model is restored."""
        live = self._live.get(id)
        try:
            if live is not None and live.behind:
                self.snapshot_if_due(live, id, now=True)
        except (OSError, sqlite3.Error) as error:
            log.warning("%s: no snapshot: %s", id, error)
        self.forget(id)

    def end(self, id: str) -> None:
        """Remove a model from memory and delete its snapshots, when no request for it can come any more."""
        self.forget(id)
        self._weights.drop_snapshots(id)

    def forget(self, id: str) -> None:
        """Remove a model from memory without writing a snapshot."""
        self._live.pop(id, None)
        self._held.pop(id, None)

    def shape_at(self, folder: Path) -> Shape:
        """Read the shape of the model in a checkpoint's folder.

        Raises:
            RefusedRequest: the folder is missing or damaged, or has another base model.
        """
        try:
            return self.backend.shape_of(folder)
        except StoreError as error:
            raise RefusedRequest("path", str(error), f"weights of {self.backend.name}") from None


def said(error: BaseException) -> str:
    """Text of an error for the client: the message of an error of stretto or of the system, else type and message."""
    if isinstance(error, OSError):
        return described(error)
    return str(error) if isinstance(error, StrettoError) else f"{type(error).__name__}: {error}"


def _timed(live: Live, pieces: Pieces[Found]) -> Pieces[Found]:
    """Run `pieces`, and add their seconds to the model's computation since its snapshot; yields and returns what they
    do."""
    try:
        while True:
            began = time.monotonic()
            try:
                tokens = next(pieces)
            finally:
                live.behind += time.monotonic() - began
            yield tokens
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]
    finally:
        pieces.close()


def adam_of(body: OptimStep) -> Adam:
    """Read the AdamW settings of a step; those that it leaves out have the defaults of `Adam`.

    Raises:
        RefusedRequest: a setting is unknown (and not empty), not finite or out of range, another optimizer is
            requested, or the settings are given in both forms.
    """
    if body.adam_params is not None and body.optimizer_params is not None:
        raise RefusedRequest("optimizer_params", "given together with adam_params", "one of them")
    params, place = body.adam_params, "adam_params"
    if params is None:
        params, place = dict(body.optimizer_params or {}), "optimizer_params"
        if (found := params.pop("type", "nothing")) != "adamw":
            raise RefusedRequest("optimizer_params", f"the optimizer {found!r} is not served", "adamw")
    numbers = {"learning_rate": _MOST, "beta1": 1.0, "beta2": 1.0, "eps": _MOST, "weight_decay": _MOST}
    numbers["grad_clip_norm"] = _MOST
    for name, value in params.items():
        field = f"{place}.{name}"
        if name not in numbers:
            if value:
                raise RefusedRequest(field, "no setting of AdamW", nearest(name, numbers))
        elif isinstance(value, bool) or not isinstance(value, int | float) or not 0.0 <= value < numbers[name]:
            found = "null, as NaN and infinity are sent" if value is None else f"{value!r:.40}"
            raise RefusedRequest(field, found, f"0 to {numbers[name]:g}")
        elif name == "eps" and not value:  # a weight without any gradient would become NaN
            raise RefusedRequest(field, "0", "above 0")
        elif name == "eps" and value < _LEAST:  # float32 rounds it to 0, or a device may
            raise RefusedRequest(field, f"{value:g}, too small for float32", f"at least {_LEAST:g}")
    adam = Adam(**{name: float(value) for name, value in params.items() if name in numbers})
    if adam.weight_decay * adam.learning_rate > 1:
        found = f"{adam.weight_decay:g}: a step would take more than the whole weight"
        raise RefusedRequest(f"{place}.weight_decay", found, f"at most {1 / adam.learning_rate:g}, 1 / learning_rate")
    return adam


def facts_of(body: CreateModel, seed: int) -> ModelFacts:
    """Make the facts of a new model from the request that creates it. `seed`: used if the request has none."""
    lora = body.lora_config
    seed = lora.seed if lora is not None and lora.seed is not None else seed
    return ModelFacts(body.base_model, Shape(lora, seed % 2**63), body.user_metadata)
