"""HTTP handlers for sampling sessions and their requests."""

from __future__ import annotations

import secrets

import msgspec
from starlette.responses import Response

from stretto.core.errors import RefusedRequest
from stretto_tinker.checkpoints import EXTERNAL, Place
from stretto_tinker.dates import now
from stretto_tinker.http.exchange import Call, Handler, NotServed, told
from stretto_tinker.http.service import Service
from stretto_tinker.record import Asked, SamplerRow
from stretto_tinker.wire.bodies import JoinSampler, OfRequest, OpenSampler, Sample
from stretto_tinker.work.sampling import Seeded, check_sample
from stretto_tinker.work.saving import sampler_id
from stretto_tinker.work.worker import SAMPLE

#: Range of request numbers of each client of a sampling session: client n has n * CLONE to (n + 1) * CLONE - 1.
CLONE = 1_000_000_000


class SamplingHandlers:
    """Handlers for sampling sessions and their requests."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def routes(self) -> dict[str, Handler]:
        """Handlers by "METHOD PATH"; all require an API key."""
        return {
            "POST /api/v1/create_sampling_session": self._open,
            "POST /api/v1/join_sampling_session": self._join,
            "GET /api/v1/samplers/{id}": self._show,
            "POST /api/v1/asample": self._sample,
            "POST /api/v1/cancel_future": self._cancel,
        }

    async def _open(self, call: Call) -> Response:
        body = await call.parsed(OpenSampler)
        self._service.session(body.session_id, call.owner)
        path = self._weights(body.model_path, body.base_model, call.owner)
        id = sampler_id(body.session_id, body.sampling_session_seq_id)
        row = SamplerRow(id, body.session_id, call.owner, now(), path, None)
        self._service.guarded(lambda: self._service.record.add_sampler(row))
        if self._service.sampler(id, call.owner).path != path:
            raise NotServed(422, f"sampling_session_seq_id: {body.sampling_session_seq_id} is another sampler already")
        return told({"type": "create_sampling_session", "sampling_session_id": id})

    def _weights(self, path: str | None, base: str | None, owner: str) -> str | None:
        """Check the weights that a client requests; returns `path`, or None for the base model (no `path`). Raises
        NotServed or RefusedRequest if they do not exist or cannot be sampled from, or both are None."""
        self._service.knows(base)
        if path is None:
            if base is None:
                raise RefusedRequest("model_path", "neither model_path nor base_model", "one of them")
            return None
        place = Place.of(path, "model_path")
        if place.kind == EXTERNAL:
            raise RefusedRequest(
                "model_path", f"{path!r:.160} is for other programs, not for sampling", "weights or sampler_weights"
            )
        return self._service.checkpoint(place.path, owner).path

    async def _join(self, call: Call) -> Response:
        body = await call.parsed(JoinSampler)
        row = self._service.sampler(body.sampling_session_id, call.owner)
        number = self._service.guarded(lambda: self._service.record.join_sampler(row.id))
        return told({"type": "join_sampling_session", "client_counter": number})

    async def _show(self, call: Call) -> Response:
        row = self._service.sampler(call.path("id"), call.owner, open=False)
        return told({"sampler_id": row.id, "base_model": self._service.backend.name, "model_path": row.path})

    async def _sample(self, call: Call) -> Response:
        body = await call.parsed(Sample)
        if body.sampling_session_id is None or body.seq_id is None:
            raise RefusedRequest("sampling_session_id", "missing", "a sampling session, and seq_id")
        row = self._service.sampler(body.sampling_session_id, call.owner)
        check_sample(body, body.prompt.token_ids())
        if self._service.worker.crowded(call.owner):
            raise NotServed(429, "too many requests of this key, or too large ones, wait already; try again")
        id = f"{row.id}:{body.seq_id}"
        seed = body.sampling_params.seed
        seeded = Seeded(body, secrets.randbits(62) if seed is None else seed % 2**62, row.path)
        asked = Asked(id, row.id, body.seq_id, call.owner, SAMPLE, msgspec.json.encode(seeded))
        self._service.accept(asked, said=msgspec.json.encode(body))
        ids = [f"{id}:{member}" for member in range(body.num_samples)]
        return told({"request_id": id, "sample_sequence_ids": ids})

    async def _cancel(self, call: Call) -> Response:
        asked = self._service.asked((await call.parsed(OfRequest)).request_id, call.owner)
        if asked.kind == SAMPLE:
            self._service.worker.cancel(asked.id)
        return told({})
