"""HTTP handlers for training requests. They are recorded here and computed by the worker; clients fetch the results as
futures."""

from __future__ import annotations

import secrets
from collections.abc import Callable

import msgspec
from starlette.responses import Response

from stretto.core.errors import UNREADABLE, RefusedRequest
from stretto_tinker.checkpoints import Place
from stretto_tinker.dates import now
from stretto_tinker.http.exchange import Call, Handler, NotServed, told
from stretto_tinker.http.service import Service
from stretto_tinker.record import Asked, ModelRow
from stretto_tinker.wire.bodies import (
    CreateModel,
    LoadWeights,
    Numbered,
    OfModel,
    OptimizerKind,
    OptimStep,
    SaveWeights,
    parse,
)
from stretto_tinker.wire.datums import ends_forward_only, numbered, parse_job
from stretto_tinker.work.models import BACKWARD, CREATE, FORWARD, LOAD, REFUSED, STEP, ModelFacts, adam_of, facts_of
from stretto_tinker.work.saving import SAVE, SAVE_EXTERNAL, SAVE_FOR_SAMPLER

#: Statuses of refusals that are recorded as the request's result. After others the client repeats the request.
_RECORDED = frozenset({400, 404})


class Training:
    """Handlers for models and their training requests."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def routes(self) -> dict[str, Handler]:
        """Handlers by "METHOD PATH"; all require an API key."""
        saves = {f"POST /api/v1/{kind}": self._saving(kind) for kind in (SAVE, SAVE_FOR_SAMPLER, SAVE_EXTERNAL)}
        return {
            "POST /api/v1/create_model": self._create,
            "POST /api/v1/get_info": self._info,
            "POST /api/v1/forward_backward": self._forward_backward,
            "POST /api/v1/optim_step": self._numbered(self._step),
            "POST /api/v1/load_weights": self._numbered(self._load),
            **saves,
        }

    async def _create(self, call: Call) -> Response:
        raw = await call.body()
        body = parse(raw, CreateModel)
        self._service.session(body.session_id, call.owner)
        self._service.knows(body.base_model)
        _check_optimizer(body.optimizer_config)
        facts = facts_of(body, secrets.randbits(63))
        facts = msgspec.structs.replace(facts, base_model=self._service.backend.name)
        return self._first(call, body.session_id, body.model_seq_id, facts, CREATE, raw)

    def _first(self, call: Call, session: str, seq: int, facts: ModelFacts, kind: str, raw: bytes) -> Response:
        """Add a model to the record, and accept the request that creates it, which is its request number 0.

        Raises:
            RefusedRequest: such a model cannot be made.
            NotServed: 422 if a different request has this number, 429 if too many wait or the record cannot be written.
        """
        model = f"{session}:train:{seq}"
        if self._service.record.request(f"{model}:0") is None:  # else a retry of what a larger server has accepted
            self._service.backend.check(facts.shape)
        row = ModelRow(model, session, call.owner, now(), msgspec.json.encode(facts), -1)
        self._service.guarded(lambda: self._service.record.add_model(row))
        return self._accept(call, model, 0, kind, raw)

    def _accept(
        self, call: Call, model: str, seq: int | None, kind: str, raw: bytes, *, said: bytes | None = None
    ) -> Response:
        """Record a training request and queue it; returns the reply with its id. `said`: the body that the client sent,
        by which a retry is recognized; None: `raw`. Raises RefusedRequest for one without a number (`seq`), and
        NotServed: 422 if a different request has it, 429 if too many wait or the record cannot be written."""
        if seq is None:
            raise RefusedRequest("seq_id", str(seq), "1, 2, ... in the order of the requests of a model")
        if self._service.worker.crowded(call.owner, model, seq):
            raise NotServed(429, "too many requests of this key, or too large ones, wait already; try again")
        asked = self._service.accept(Asked(f"{model}:{seq}", model, seq, call.owner, kind, raw), said)
        return told({"request_id": asked.id, "model_id": model})

    async def _info(self, call: Call) -> Response:
        row = self._service.model((await call.parsed(OfModel)).model_id, call.owner, open=False)
        facts, backend = msgspec.json.decode(row.body, type=ModelFacts), self._service.backend
        tokenizer = str(backend.folder) if call.near else backend.name
        lora = facts.shape.lora
        data = {"arch": backend.architecture, "model_name": backend.name, "tokenizer_id": tokenizer}
        about = {"is_lora": lora is not None, "lora_rank": None if lora is None else lora.rank}
        return told({"type": "get_info", "model_id": row.id, "model_data": data, "model_name": backend.name, **about})

    async def _forward_backward(self, call: Call) -> Response:
        """Accept a pass. One whose body cannot be read, but begins with its number, fails in its turn, and so does the
        step behind it: the client has counted it."""
        raw = b""  # of one that is too large
        try:
            raw = await call.body()
        except NotServed as error:
            if error.status != 413 or not numbered(bytes(call.head)):
                raise
        said = raw or numbered(bytes(call.head))
        try:
            job = parse_job(said)
        except RefusedRequest:
            if not (named := numbered(raw)):
                raise
            job = parse_job(named)
        model = self._service.model(job.model_id, call.owner)
        if job.seq_id < 1:
            raise RefusedRequest("seq_id", str(job.seq_id), "1 or more")
        forward = job.forward_only if raw else ends_forward_only(bytes(call.tail))
        return self._accept(call, model.id, job.seq_id, FORWARD if forward else BACKWARD, raw, said=said)

    def _step(self, call: Call, raw: bytes) -> Response:
        body = parse(raw, OptimStep)
        model = self._service.model(body.model_id, call.owner)
        adam_of(body)  # refuses wrong settings here, where the gradient is kept
        return self._accept(call, model.id, body.seq_id, STEP, raw)

    def _saving(self, kind: str) -> Handler:
        def save(call: Call, raw: bytes) -> Response:
            body = parse(raw, SaveWeights)
            model = self._service.model(body.model_id, call.owner)
            return self._accept(call, model.id, body.seq_id, kind, raw)

        return self._numbered(save)

    def _numbered(self, handler: Callable[[Call, bytes], Response]) -> Handler:
        """Wrap a handler of numbered requests. A refusal (RefusedRequest, 400, 404) is recorded as the result of the
        request's number, because the client has counted it and later requests wait for it; other errors are raised."""

        async def run(call: Call) -> Response:
            raw = await call.body()
            try:
                named = self._named(call, raw)
                if named is not None and named.kind == REFUSED:  # a retry of a refused request
                    return self._accept(call, named.lane, named.seq, REFUSED, b"", said=raw)
                return handler(call, raw)
            except (RefusedRequest, NotServed) as error:
                if isinstance(error, NotServed) and error.status not in _RECORDED:
                    raise
                return self._refused(call, raw, error)

        return run

    def _named(self, call: Call, raw: bytes) -> Asked | None:
        """Find the recorded request with the model and number that a body names; if none is recorded, an empty one for
        them. None if the body does not name a number and a model of this client."""
        try:
            named = msgspec.json.decode(raw, type=Numbered)
        except UNREADABLE:
            return None
        row = None if named.model_id is None else self._service.record.model(named.model_id)
        if row is None or row.owner != call.owner or not named.seq_id:
            return None
        id = f"{row.id}:{named.seq_id}"
        return self._service.record.request(id) or Asked(id, row.id, named.seq_id, call.owner, "", None)

    def _refused(self, call: Call, raw: bytes, error: RefusedRequest | NotServed) -> Response:
        """Record a refusal as the result of the request's number, and reply that the request is accepted; raise `error`
        if the body does not name a number."""
        if (named := self._named(call, raw)) is None:
            raise error
        self._service.model(named.lane, call.owner)
        why = error.message if isinstance(error, NotServed) else str(error)
        return self._accept(call, named.lane, named.seq, REFUSED, why.encode(), said=raw)

    def _load(self, call: Call, raw: bytes) -> Response:
        body = parse(raw, LoadWeights)
        of_session = body.session_id is not None and body.model_seq_id is not None
        known = f"{body.session_id}:train:{body.model_seq_id}" if of_session else body.model_id or ""
        held = self._service.record.request(f"{known}:{0 if of_session else body.seq_id}")
        if held is not None and held.owner == call.owner:  # a retry: the weights may be deleted by now
            return self._accept(call, known, held.seq, LOAD, raw)
        if body.weights_access_token is not None:
            told = "is not served: what its owner has published is read without one"
            raise RefusedRequest("weights_access_token", told, "null")
        source = self._service.checkpoint(body.path, call.owner)
        folder = self._service.weights.folder(Place.of(source.path))
        shape = self._service.worker.models.shape_at(folder)
        if body.session_id is None or body.model_seq_id is None:
            if body.model_id is None:
                raise RefusedRequest("model_id", "missing", "a model and seq_id, or session_id and model_seq_id")
            model = self._service.model(body.model_id, call.owner)
            return self._accept(call, model.id, body.seq_id, LOAD, raw)
        self._service.session(body.session_id, call.owner)
        self._service.knows(body.base_model)
        if body.optimizer_config is not None:
            _check_optimizer(body.optimizer_config)
        facts = ModelFacts(self._service.backend.name, shape, body.user_metadata)
        return self._first(call, body.session_id, body.model_seq_id, facts, LOAD, raw)


def _check_optimizer(kind: OptimizerKind) -> None:
    if kind.type != "adamw":
        told = f"{kind.type!r:.40} is not served: its step is not published"
        raise RefusedRequest("optimizer_config.type", told, "adamw")
