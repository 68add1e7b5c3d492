"""A model that is trained: its state as a function of the requests on record.

    create 0 ─ forward_backward 1 ─ optim_step 2 ─ forward_backward 3 ─ optim_step 4 ─ ...
                                                 └ snapshot 2

What is in memory is always the snapshot and the effect of the requests behind it, in their order. So a kill loses
nothing: the requests are computed again, bit for bit, and each step is taken once. A snapshot is written when the
requests behind the last one have taken `_RATIO` times as long as it takes to write one: writing costs at most that
part of the time, and a restart computes at most so much again.
"""

from __future__ import annotations

import logging
import sqlite3
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from stretto.core.errors import RefusedRequest, StoreError, nearest
from stretto_tinker.compute.backend import Backend, Found, Pieces, Shape, TrainedModel
from stretto_tinker.compute.losses import loss_of
from stretto_tinker.record.checkpoints import Place, Weights
from stretto_tinker.record.record import DONE, Asked, ModelRow, Record
from stretto_tinker.wire.bodies import Adam, CreateModel, LoadWeights, OptimStep, parse
from stretto_tinker.wire.datums import check, parse_job
from stretto_tinker.wire.outputs import encode_computed

log = logging.getLogger(__name__)

CREATE, LOAD, FORWARD, BACKWARD, STEP = "create_model", "load_weights", "forward", "forward_backward", "optim_step"
#: A request that was refused when it came. It has its number, which those behind it wait for, and no effect.
REFUSED = "refused"
#: Requests that change the state of a model; their bodies are kept until a snapshot holds their effect.
EFFECTS = frozenset({CREATE, LOAD, BACKWARD, STEP})
_RATIO = 20.0
_LEAST_SECONDS = 1.0
_ANY = float("inf")


class ModelFacts(msgspec.Struct, frozen=True):
    """What is known of a model beside its weights."""

    base_model: str
    shape: Shape
    user_metadata: dict[str, Any] | None = None
    corrupted: bool = False


@dataclass
class Live:
    """A model in memory."""

    model: TrainedModel
    facts: ModelFacts
    seq: int = -1  # the last request whose effect it holds
    broken: str = ""  # why the gradient is not whole
    grown: bool = False  # whether there is a gradient
    behind: float = 0.0  # seconds of computation behind the snapshot
    saving: float = 0.05  # seconds that a snapshot takes


class Models:
    """The models in memory, and how one comes there."""

    def __init__(self, backend: Backend, record: Record, weights: Weights) -> None:
        self.backend, self._record, self._weights = backend, record, weights
        self._live: dict[str, Live] = {}

    def live(self, row: ModelRow) -> Pieces[Live]:
        """The model, from memory, or restored from the record.

        Raises:
            StoreError: its snapshot is not whole.
        """
        if (found := self._live.get(row.id)) is None:
            found = self._live[row.id] = yield from self._restored(row)
        return found

    def _restored(self, row: ModelRow) -> Pieces[Live]:
        facts = msgspec.json.decode(row.body, type=ModelFacts)
        live = Live(self.backend.create(facts.shape), facts, row.snapshot)
        if row.snapshot >= 0:
            live.model.load(self._weights.snapshot(row.id, row.snapshot), optimizer=True)
        for asked in self._record.settled(row.id, row.snapshot, EFFECTS):
            yield from self._again(live, asked)
        return live

    def _again(self, live: Live, asked: Asked) -> Pieces[None]:
        """The effect of a request that is settled."""
        live.seq = asked.seq
        if asked.state != DONE:
            self._failed(live, asked.kind, "a forward_backward before this step failed")
            return
        assert asked.body is not None, "bodies are kept until their effect is in a snapshot"
        yield from self._take_effect(live, asked)
        if asked.kind == STEP and asked.proof and asked.proof != live.model.digest():
            log.warning("%s: step %d gave other weights when it was computed again", asked.lane, asked.seq)
            live.facts = msgspec.structs.replace(live.facts, corrupted=True)
            self._record.describe_model(asked.lane, msgspec.json.encode(live.facts))

    def perform(self, live: Live, asked: Asked) -> Pieces[tuple[bytes, str, str]]:
        """The effect of a request that is new: its result, the result's form, and a proof of the weights after it.

        Raises:
            RefusedRequest, StoreError: the request fails.
        """
        try:
            result, form = yield from self._take_effect(live, asked)
        except GeneratorExit:  # the server ends: the request is computed by the next one
            raise
        except BaseException as error:
            self._failed(live, asked.kind, f"forward_backward {asked.seq} before this step failed: {error}")
            live.seq = asked.seq
            raise
        live.seq = asked.seq
        return result, form, live.model.digest() if asked.kind == STEP else ""

    def _failed(self, live: Live, kind: str, why: str) -> None:
        if kind == BACKWARD:
            live.broken = live.broken or why
        elif kind == STEP:
            live.model.clear()
            live.broken, live.grown = "", False

    def _take_effect(self, live: Live, asked: Asked) -> Pieces[tuple[bytes, str]]:
        body = asked.body or b""
        if asked.kind in (FORWARD, BACKWARD):
            return (yield from self._compute(live, body)), "proto"
        began = time.monotonic()
        found = self._at_once(live, asked, body)
        live.behind += time.monotonic() - began
        return found, "json"

    def _at_once(self, live: Live, asked: Asked, body: bytes) -> bytes:
        """The effect of a request that has one piece."""
        if asked.kind == STEP:
            metrics = self._step(live, adam_of(parse(body, OptimStep)))
            return msgspec.json.encode({"metrics": metrics})
        if asked.kind == LOAD:
            told = self._load(live, parse(body, LoadWeights))
            return msgspec.json.encode({"path": told, "model_id": asked.lane, "type": "load_weights"})
        assert asked.kind == CREATE
        return msgspec.json.encode({"model_id": asked.lane, "type": "create_model"})

    def _compute(self, live: Live, body: bytes) -> Pieces[bytes]:
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

    def _step(self, live: Live, adam: Adam) -> Mapping[str, float]:
        if live.broken:
            raise RefusedRequest("optim_step", live.broken, "send its data again, right, and then the step")
        if not live.grown:
            raise RefusedRequest("optim_step", "there is no gradient", "a forward_backward before it")
        metrics = live.model.optim_step(adam)
        live.grown = False
        return metrics

    def _load(self, live: Live, body: LoadWeights) -> str:
        place = Place.of(body.path)
        live.model.load(self._weights.folder(place), optimizer=body.optimizer)
        live.model.clear()
        live.broken, live.grown = "", False
        return place.path

    def snapshot_if_due(self, live: Live, id: str, *, now: bool = False) -> None:
        """Write a snapshot where it is worth it, or `now`; none while there is a gradient, which it could not hold.

        Raises:
            OSError: it cannot be written; the one before stays.
        """
        due = live.behind >= max(_LEAST_SECONDS, _RATIO * live.saving)
        if live.grown or live.broken or not (now or due):
            return
        began = time.monotonic()
        self._weights.write(self._weights.snapshot(id, live.seq), live.model.save)
        self._record.snapshotted(id, live.seq)
        self._weights.keep_snapshot(id, live.seq)
        live.saving, live.behind = time.monotonic() - began, 0.0

    def retire(self, id: str) -> None:
        """Take a model from memory; it is restored when it is asked for again."""
        live = self._live.get(id)
        if live is None:
            return
        try:
            if live.behind:
                self.snapshot_if_due(live, id, now=True)
        except (OSError, sqlite3.Error) as error:
            log.warning("%s: no snapshot: %s", id, error)
        self.forget(id)

    def end(self, id: str) -> None:
        """Take a model from memory and from the disk: nobody will ask for it again."""
        self.forget(id)
        self._weights.drop_snapshots(id)

    def forget(self, id: str) -> None:
        """Take a model from memory without a snapshot."""
        self._live.pop(id, None)

    def shape_at(self, folder: Path) -> Shape:
        """The shape of the model that wrote a checkpoint.

        Raises:
            RefusedRequest: there is no such checkpoint, or it is of another base model.
        """
        try:
            return self.backend.shape_of(folder)
        except StoreError as error:
            raise RefusedRequest("path", str(error), f"weights of {self.backend.name}") from None


def _timed(live: Live, pieces: Pieces[Found]) -> Pieces[Found]:
    """The pieces, whose seconds are behind the model's snapshot."""
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
    """The numbers of a step.

    Raises:
        RefusedRequest: they are not finite or out of their range, or are those of another optimizer.
    """
    if body.adam_params is not None and body.optimizer_params is not None:
        raise RefusedRequest("optimizer_params", "beside adam_params", "one of them")
    if body.adam_params is None:
        found = (body.optimizer_params or {}).get("type", "nothing")
        raise RefusedRequest("optimizer_params", f"the optimizer {found!r} is not served", "adamw")
    numbers = {"learning_rate": _ANY, "beta1": 1.0, "beta2": 1.0, "eps": _ANY, "weight_decay": _ANY}
    numbers["grad_clip_norm"] = _ANY
    for name, value in body.adam_params.items():
        field = f"adam_params.{name}"
        if name not in numbers:
            if value:
                raise RefusedRequest(field, "no setting of AdamW", nearest(name, numbers))
        elif isinstance(value, bool) or not isinstance(value, int | float) or not 0.0 <= value < numbers[name]:
            found = "null, as NaN and infinity are sent" if value is None else f"{value!r:.40}"
            raise RefusedRequest(field, found, f"0 to {numbers[name]:g}")
    return Adam(**{name: float(value) for name, value in body.adam_params.items() if name in numbers})


def facts_of(body: CreateModel, seed: int) -> ModelFacts:
    """What a request for a model says."""
    lora = body.lora_config
    seed = lora.seed if lora is not None and lora.seed is not None else seed
    return ModelFacts(body.base_model, Shape(lora, seed % 2**63), body.user_metadata)
