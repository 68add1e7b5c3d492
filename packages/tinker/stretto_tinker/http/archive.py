"""HTTP handlers for checkpoints and training runs: list, describe, change lifetime, publish, download, delete."""

from __future__ import annotations

import hashlib
import hmac
import os
import tarfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
from starlette.responses import FileResponse, RedirectResponse, Response, StreamingResponse

from stretto.core.errors import RefusedRequest
from stretto_tinker.checkpoints import EXTERNAL, SAMPLER, TRAINING, TYPES, Place, files_of
from stretto_tinker.dates import now, written
from stretto_tinker.http.exchange import Call, Handler, NotServed, told
from stretto_tinker.http.service import Service
from stretto_tinker.record import CheckpointRow, ModelRow
from stretto_tinker.wire.bodies import Lifetime, OfPath
from stretto_tinker.work.models import ModelFacts

_URL_SECONDS = 3_600
_MOST = 10_000
_PART = 1 << 20
_RUN = "/api/v1/training_runs/{run}"
_ONE = _RUN + "/checkpoints/{kind}/{name}"


class Archive:
    """Handlers that list, describe, publish, download and delete checkpoints, and list training runs."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def routes(self) -> dict[str, Handler]:
        """Handlers by "METHOD PATH", which require an API key."""
        return {
            "GET /api/v1/training_runs": self._runs,
            f"GET {_RUN}": self._run,
            f"GET {_RUN}/checkpoints": self._of_run,
            "GET /api/v1/checkpoints": self._of_user,
            "POST /api/v1/weights_info": self._info,
            f"DELETE {_ONE}": self._delete,
            f"PUT {_ONE}/ttl": self._keep,
            f"POST {_ONE}/publish": self._publish,
            f"DELETE {_ONE}/publish": self._publish,
            f"GET {_ONE}/external_weights_urls": self._urls,
            f"GET {_ONE}/archive": self._archive,
        }

    def open_routes(self) -> dict[str, Handler]:
        """Handlers by "METHOD PATH" for signed URLs, which need no API key and expire after an hour."""
        return {
            "GET /files/{until}/{seal}/{run}/{kind}/{name}/{file:path}": self._file,
            "GET /archives/{until}/{seal}/{run}/{kind}/{name}": self._tar,
        }

    async def _runs(self, call: Call) -> Response:
        limit, offset = call.number("limit", 20, _MOST), call.number("offset", 0, 10**9)
        rows = self._service.record.models(call.owner)
        cursor = {"offset": offset, "limit": limit, "total_count": len(rows)}
        found = [self._described(row) for row in rows[offset : offset + limit]]
        return told({"training_runs": found, "cursor": cursor})

    async def _run(self, call: Call) -> Response:
        return told(self._described(self._service.model(call.path("run"), call.owner, open=False)))

    def _described(self, row: ModelRow) -> dict[str, Any]:
        facts = msgspec.json.decode(row.body, type=ModelFacts)
        lora = facts.shape.lora
        shown = _shown(self._service.record.checkpoints(model=row.id))
        newest = {
            kind: next((_checkpoint(one) for one in shown if one.kind == kind), None) for kind in (TRAINING, SAMPLER)
        }
        return {
            "training_run_id": row.id,
            "base_model": facts.base_model,
            "model_owner": row.owner,
            "is_lora": lora is not None,
            "corrupted": facts.corrupted,
            "lora_rank": None if lora is None else lora.rank,
            "last_request_time": written(self._service.record.last_asked(row.id) or row.created),
            "last_checkpoint": newest[TRAINING],
            "last_sampler_checkpoint": newest[SAMPLER],
            "user_metadata": facts.user_metadata,
        }

    async def _of_run(self, call: Call) -> Response:
        row = self._service.model(call.path("run"), call.owner, open=False)
        return told(
            {"checkpoints": [_checkpoint(one) for one in _shown(self._service.record.checkpoints(model=row.id))]}
        )

    async def _of_user(self, call: Call) -> Response:
        limit, offset = call.number("limit", 100, _MOST), call.number("offset", 0, 10**9)
        rows = _shown(self._service.record.checkpoints(owner=call.owner))
        cursor = {"offset": offset, "limit": limit, "total_count": len(rows)}
        return told({"checkpoints": [_checkpoint(one) for one in rows[offset : offset + limit]], "cursor": cursor})

    async def _info(self, call: Call) -> Response:
        row = self._service.checkpoint((await call.parsed(OfPath)).tinker_path, call.owner)
        shape = self._service.worker.models.shape_at(self._service.weights.folder(Place.of(row.path)))
        about: dict[str, Any] = {"base_model": self._service.backend.name, "is_lora": shape.lora is not None}
        if (lora := shape.lora) is not None:
            about |= {"lora_rank": lora.rank, "train_unembed": lora.train_unembed}
            about |= {"train_mlp": lora.train_mlp, "train_attn": lora.train_attn}
        return told(about)

    def _place(self, call: Call) -> Place:
        return Place.of(f"tinker://{call.path('run')}/{call.path('kind')}/{call.path('name')}")

    async def _delete(self, call: Call) -> Response:
        row = self._service.checkpoint(self._place(call).path, call.owner, own=True)
        self._service.guarded(lambda: self._service.drop(row))
        return told({})

    async def _keep(self, call: Call) -> Response:
        row = self._service.checkpoint(self._place(call).path, call.owner, own=True)
        seconds = (await call.parsed(Lifetime)).ttl_seconds
        expires = None if seconds is None else now() + seconds
        self._service.guarded(lambda: self._service.record.change_checkpoint(row.path, expires=expires))
        return told({})

    async def _publish(self, call: Call) -> Response:
        row = self._service.checkpoint(self._place(call).path, call.owner, own=True)
        public = call.request.method == "POST"
        self._service.guarded(lambda: self._service.record.change_checkpoint(row.path, public=public))
        return told({})

    async def _urls(self, call: Call) -> Response:
        place = self._place(call)
        if place.kind != EXTERNAL:
            raise RefusedRequest("checkpoint_id", place.id, f"one of {EXTERNAL}/")
        self._service.checkpoint(place.path, call.owner)
        url, until = self._signed(call, "files", place)
        urls = {name: f"{url}/{name}" for name in files_of(self._service.weights.folder(place))}
        return told({"urls": urls, "expires": written(until)})

    async def _archive(self, call: Call) -> Response:
        place = self._place(call)
        self._service.checkpoint(place.path, call.owner)
        return RedirectResponse(self._signed(call, "archives", place)[0], 302)

    def _signed(self, call: Call, route: str, place: Place) -> tuple[str, int]:
        """Make a signed URL of a checkpoint; returns it, and the Unix time at which it expires. `route`: first part of
        its path, ``files`` or ``archives`` (see `open_routes`)."""
        until = int(now()) + _URL_SECONDS
        at = f"{until}/{self._seal(until, place)}/{place.model}/{place.kind}/{place.name}"
        return f"{str(call.request.base_url).rstrip('/')}/{route}/{at}", until

    def _seal(self, until: int, place: Place) -> str:
        said = f"{until} {place.path}".encode()
        return hmac.new(self._service.secret.encode(), said, hashlib.sha256).hexdigest()

    def _sealed(self, call: Call) -> Path:
        """Folder of the checkpoint that a signed URL names. Raises NotServed if the signature is wrong, the URL has
        expired, or the checkpoint is gone."""
        place, until = self._place(call), call.path("until")
        known = (
            until.isdecimal()
            and len(until) <= 12
            and hmac.compare_digest(call.path("seal").encode(), self._seal(int(until), place).encode())
        )
        row = self._service.record.checkpoint(place.path)
        if not known or int(until) < now() or row is None:
            raise NotServed(404, "there is no such file, or its address has expired")
        return self._service.weights.folder(place)

    async def _file(self, call: Call) -> Response:
        file = files_of(self._sealed(call)).get(call.path("file"))
        if file is None:
            raise NotServed(404, "there is no such file")
        return FileResponse(file)

    async def _tar(self, call: Call) -> Response:
        try:
            size, parts = tar_of(files_of(self._sealed(call)))
        except FileNotFoundError:  # the checkpoint was deleted or replaced meanwhile
            raise NotServed(404, "there is no such file, or its address has expired") from None
        return StreamingResponse(parts, media_type="application/x-tar", headers={"content-length": str(size)})


def tar_of(files: Mapping[str, Path]) -> tuple[int, Iterator[bytes]]:
    """Make a tar archive of files, by their names in it; returns its size in bytes, and an iterator over its parts,
    which reads the files as it is consumed, and closes them at its end. All files are opened now, so that the archive
    is complete even if their folder is deleted.

    Raises:
        FileNotFoundError: a file is gone.
    """
    opened = ExitStack()
    with opened:
        found = [(name, opened.enter_context(file.open("rb"))) for name, file in files.items()]
        headers = list[tuple[bytes, Any, int]]()
        for name, file in found:
            info = tarfile.TarInfo(name)
            info.size = os.fstat(file.fileno()).st_size
            headers.append((info.tobuf(), file, -info.size % tarfile.BLOCKSIZE))
        size = sum(len(header) + os.fstat(file.fileno()).st_size + padding for header, file, padding in headers)
        kept = opened.pop_all()

    def parts() -> Iterator[bytes]:
        with kept:
            for header, file, padding in headers:
                yield header
                while part := file.read(_PART):
                    yield part
                yield bytes(padding)
            yield bytes(2 * tarfile.BLOCKSIZE)

    return size + 2 * tarfile.BLOCKSIZE, parts()


def _shown(rows: list[CheckpointRow]) -> list[CheckpointRow]:
    """Checkpoints with a name that have not expired."""
    return [
        row
        for row in rows
        if not msgspec.json.decode(row.body)["unnamed"] and (row.expires is None or row.expires > now())
    ]


def _checkpoint(row: CheckpointRow) -> dict[str, Any]:
    place = Place.of(row.path)
    return {
        "checkpoint_id": place.id,
        "checkpoint_type": TYPES[row.kind],
        "time": written(row.created),
        "tinker_path": row.path,
        "size_bytes": row.size,
        "public": bool(row.public),
        "user_metadata": msgspec.json.decode(row.body)["user_metadata"],
        "expires_at": None if row.expires is None else written(row.expires),
    }
