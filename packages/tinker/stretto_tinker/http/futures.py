"""HTTP handlers that return results: of one request, or the list of requests that a sampler has finished. Both wait up
to 25 s for a result before they reply without one."""

from __future__ import annotations

import time
from typing import Any

from starlette.responses import Response

from stretto_tinker import record as records
from stretto_tinker.http.exchange import JSON, PROTO, Call, Handler, NotServed, told
from stretto_tinker.http.sampling import CLONE
from stretto_tinker.http.service import Service
from stretto_tinker.record import Asked
from stretto_tinker.wire.bodies import OfRequest, RetrieveFutures

_WAIT_SECONDS = 25.0  # the SDK gives up after 45
_INLINE_BYTES = 4 << 20  # for a larger result, the reply may first tell its size only


class Futures:
    """Handlers that return results of requests, waiting for them up to 25 seconds."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def routes(self) -> dict[str, Handler]:
        """Handlers by "METHOD PATH"; all require an API key."""
        return {
            "POST /api/v1/retrieve_future": self._retrieve,
            "POST /api/v1/retrieve_futures": self._retrieve_all,
        }

    async def _retrieve(self, call: Call) -> Response:
        body = await call.parsed(OfRequest)
        until = time.monotonic() + _WAIT_SECONDS
        while (asked := self._service.asked(body.request_id, call.owner)).state == records.QUEUED:
            left = until - time.monotonic()
            if left <= 0:
                return told({"type": "try_again", "request_id": asked.id, "queue_state": "active"}, 408)
            await self._service.changes.wait(asked.id, left)
        found = _settled(asked, body, call)
        if found.status_code == 200 and asked.result is not None:
            self._service.guarded(lambda: self._service.record.fetched(asked.id))
        return found

    async def _retrieve_all(self, call: Call) -> Response:
        body = await call.parsed(RetrieveFutures)
        target = body.target
        row = self._service.sampler(target.sampling_session_id, call.owner, open=False)
        record = self._service.record
        if body.retrieved_request_ids:
            ids = body.retrieved_request_ids
            self._service.guarded(lambda: record.forget_results(row.id, ids))
        first = target.cloned_sampler_id * CLONE
        seconds = _WAIT_SECONDS if body.timeout is None else min(max(body.timeout, 0.0), _WAIT_SECONDS)
        until = time.monotonic() + seconds
        while not (found := record.settled_after(row.id, body.prev_cursor, first, first + CLONE - 1)):
            left = until - time.monotonic()
            if left <= 0:
                break
            await self._service.changes.wait(row.id, left)
        completions: list[dict[str, Any]] = [
            {"state": "failed", "request_id": id}
            if state == records.FAILED
            else {"state": "finished", "request_id": id, "response_payload_uncompressed_size": size}
            for id, state, size, _ in found
            if state != records.FORGOTTEN
        ]
        return told({"completions": completions, "cursor": max([body.prev_cursor, *(at for *_, at in found)])})


def _settled(asked: Asked, body: OfRequest, call: Call) -> Response:
    if asked.state == records.FORGOTTEN:
        raise NotServed(410, f"request_id: the result of {asked.id!r:.120} was fetched, and is not kept any more")
    result = asked.result or b""
    if asked.form == records.PROTO and PROTO not in call.request.headers.get("accept", ""):
        raise NotServed(406, f"the result of {asked.kind} is written as {PROTO} alone; ask for it")
    if body.allow_metadata_only and len(result) > _INLINE_BYTES:
        return told({"status": "complete_metadata", "response_payload_size": len(result)})
    return Response(result, media_type=PROTO if asked.form == records.PROTO else JSON)
