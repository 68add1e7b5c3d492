"""The whole server: folder with record and weights, worker, application."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

from stretto.core.errors import Problem, RunFolderError
from stretto.processes.http.asgi import HostNames
from stretto.store import lock
from stretto_tinker.checkpoints import Place, Weights
from stretto_tinker.compute.base import LocalBackend
from stretto_tinker.http.app import TinkerApp
from stretto_tinker.http.service import Changes, Service
from stretto_tinker.record import Record
from stretto_tinker.work.worker import Worker

RECORD = "tinker.sqlite"


class TinkerServer:
    """Tinker server as the serving loop uses it (satisfies `engine.http.lifecycle.OpenWork`).

    Attributes:
        app: ASGI application.
        record: database of the server.
        worker: thread that computes.
    """

    def __init__(
        self, backend: LocalBackend, folder: Path, keys: frozenset[str] = frozenset(), names: HostNames | None = None
    ) -> None:
        """Open the server's folder, which is made if it is missing, and delete the weights in it that its record does
        not need (none if the record has no model). `keys`: API keys of clients that are accepted; empty: any. `names`:
        values of ``Host`` that are accepted; None: any.

        Raises:
            RunFolderError: another server uses the folder, it cannot be written, or it has another base model's record.
        """
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            found = f"cannot be made: {error.strerror}"
            raise RunFolderError([Problem(str(folder), found, "give another folder")]) from None
        self._lock = lock.acquire(folder)
        self.record = Record(folder / RECORD)
        if (base := self.record.fact("base", str(backend.folder))) != str(backend.folder):
            raise RunFolderError([Problem(str(folder), f"is the record of {base}", "give another folder")])
        weights, self._changes = Weights(folder), Changes()
        known = self.record.places()
        if known is not None:  # an empty record may be new, beside weights of a lost one, which must stay
            weights.keep(
                {weights.folder(Place.of(one)) if isinstance(one, str) else weights.snapshot(*one) for one in known}
            )
        self.worker = Worker(backend, self.record, weights, self._changes.settled)
        self._service = Service(backend, self.record, weights, self.worker, self._changes, keys)
        self.app = TinkerApp(self._service, names)
        self.stopping = False

    @property
    def open_requests(self) -> int:
        """Always 0: the server may stop at any time, because acknowledged requests are on record."""
        return 0

    def break_off(self) -> None:
        """Do nothing: a restarted server computes open requests again (`OpenWork`)."""

    async def run(self) -> None:
        """Start the worker, and look after sessions until cancelled. `close` must follow."""
        self._changes.bind(asyncio.get_running_loop())
        self.worker.start()
        await self._service.sweep()

    def close(self) -> None:
        """Stop the worker, close the record and unlock the folder."""
        self.worker.stop()
        self.record.close()
        os.close(self._lock)
