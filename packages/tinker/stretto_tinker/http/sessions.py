"""HTTP handlers for sessions: open, heartbeat, list, end; and for the SDK's settings, capabilities and telemetry."""

from __future__ import annotations

import uuid
from collections import Counter
from typing import Any

import msgspec
from starlette.responses import Response

from stretto.core.errors import RefusedRequest
from stretto_tinker.dates import written
from stretto_tinker.http.exchange import Call, Handler, NotServed, told
from stretto_tinker.http.service import Service
from stretto_tinker.record import SessionRow
from stretto_tinker.wire.bodies import FINISHED, EndSession, OfSession, OpenSession, SearchSessions

#: Flags that the SDK reads once (``ClientConfigResponse``).
_FLAGS: dict[str, Any] = {
    "pjwt_auth_enabled": False,
    "credential_default_source": "api_key",
    "fwdbwd_max_chunk_len": 256,  # small requests, so that turns between clients are short
    "parallel_fwdbwd_chunks": True,
    "proto_compress_fwdbwd": False,
    "sample_use_retrieve_futures": True,
    "sample_join_sampling_session": True,
    "custom_loss_server_side": False,
    "use_pyqwest_transport": False,
}
#: Flags that it reads repeatedly (``ClientDynamicConfigResponse``).
_DYNAMIC = {"refresh_interval_sec": 300, "sample_cancel_enabled": True, "sample_cancel_max_batch_size": 64}
_MOST = 1_000


class Sessions:
    """Handlers for sessions, and for what the SDK asks at its start."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def routes(self) -> dict[str, Handler]:
        """Handlers by "METHOD PATH"; all require an API key."""
        return {
            "GET /api/v1/get_server_capabilities": self._capabilities,
            "POST /api/v1/client/config": self._config,
            "POST /api/v1/client/dynamic_config": self._dynamic,
            "POST /api/v1/create_session": self._open,
            "POST /api/v1/session_heartbeat": self._heartbeat,
            "POST /api/v1/telemetry": self._telemetry,
            "GET /api/v1/sessions": self._list,
            "POST /api/v1/sessions/search": self._search,
            "GET /api/v1/sessions/{id}": self._show,
            "POST /api/v1/sessions/{id}/finish": self._finish,
        }

    async def _capabilities(self, call: Call) -> Response:
        backend = self._service.backend
        served = {"model_name": backend.name, "max_context_length": backend.context}
        return told({"supported_models": [{**served, "trainable": True, "sampleable": True}]})

    async def _config(self, call: Call) -> Response:
        return told(_FLAGS)

    async def _dynamic(self, call: Call) -> Response:
        return told(_DYNAMIC)

    async def _telemetry(self, call: Call) -> Response:
        await call.body()  # telemetry is dropped
        return told({"status": "accepted"})

    async def _open(self, call: Call) -> Response:
        body = await call.parsed(OpenSession)
        if body.project_id is not None:
            raise RefusedRequest("project_id", "is not served: there are no projects", "null")
        asked = call.request.headers.get("x-idempotency-key") or uuid.uuid4().hex
        described = msgspec.json.encode(body)
        record = self._service.record
        id = self._service.guarded(lambda: record.open_session(str(uuid.uuid4()), call.owner, asked, described))
        self._service.session(id, call.owner)
        return told({"type": "create_session", "session_id": id})

    async def _heartbeat(self, call: Call) -> Response:
        self._service.session((await call.parsed(OfSession)).session_id, call.owner)
        return told({"type": "session_heartbeat"})

    async def _list(self, call: Call) -> Response:
        limit, offset = call.number("limit", 20, _MOST), call.number("offset", 0, 10**9)
        rows = self._service.record.sessions(call.owner)
        return told({"sessions": [row.id for row in rows[offset : offset + limit]]})

    async def _search(self, call: Call) -> Response:
        wanted = await call.parsed(SearchSessions)
        if wanted.project_ids is not None:
            raise RefusedRequest("project_ids", "is not served: there are no projects", "null")
        rows = self._service.record.sessions(call.owner)
        if wanted.owner.type == "user":
            rows = [row for row in rows if row.owner in wanted.owner.owner_urns]
        if (cursor := wanted.cursor) is not None:  # the newest come first
            places = [at for at, row in enumerate(rows) if row.id == cursor.last_session_id]
            rows = rows[places[0] + 1 :] if places else []
        fitting = list[SessionRow]()
        for row in rows:
            opened = _opened(row)
            if wanted.fits(row.id, opened.display_name or "", opened.user_metadata, row.ended):
                fitting.append(row)
        found = fitting[: wanted.limit or 50]
        following = None
        if len(found) < len(fitting):
            following = {"last_created_at": written(found[-1].created), "last_session_id": found[-1].id}
        saved = Counter(one.model.partition(":")[0] for one in self._service.record.checkpoints(owner=call.owner))
        return told({"sessions": [_summary(row, saved[row.id]) for row in found], "next_cursor": following})

    async def _show(self, call: Call) -> Response:
        row = self._service.session(call.path("id"), call.owner, open=False)
        models = [one.id for one in self._service.record.models(call.owner) if one.session == row.id]
        samplers = [one.id for one in self._service.record.samplers(row.id)]
        opened = _opened(row)
        of_user = {"user_metadata": opened.user_metadata, "display_name": opened.display_name}
        return told({"training_run_ids": models, "sampler_ids": samplers, **of_user})

    async def _finish(self, call: Call) -> Response:
        body = await call.parsed(EndSession)
        row = self._service.session(call.path("id"), call.owner, open=False)
        if body.reason.type not in FINISHED:
            raise NotServed(400, f"reason: {body.reason.type!r:.40}; success, errored or interrupted")
        self._service.guarded(lambda: self._service.end_session(row, body.reason.type))
        return told({})


def _opened(row: SessionRow) -> OpenSession:
    return msgspec.json.decode(row.body, type=OpenSession)


def _summary(row: SessionRow, checkpoints: int) -> dict[str, Any]:
    opened, status = _opened(row), dict[str, Any]()
    if row.ended is None:
        status = {"type": "active"}
    elif row.ended in FINISHED:
        status = {"type": "client_finished", "reason": {"type": row.ended}}
    return {
        "session_id": row.id,
        "created_at": written(row.created),
        "owner": row.owner,
        "project_id": "",
        "status": status or None,
        "checkpoints_count": checkpoints,
        "display_name": opened.display_name,
        "user_metadata": opened.user_metadata,
    }
