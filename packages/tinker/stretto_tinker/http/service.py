"""What all handlers share: the record, the worker, the sessions that are alive."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import secrets
import sqlite3
import time
from collections import Counter
from collections.abc import Callable
from typing import TypeVar

import msgspec

from stretto_tinker.compute.backend import Backend
from stretto_tinker.http.exchange import NotServed
from stretto_tinker.record.checkpoints import Place, Weights
from stretto_tinker.record.dates import now
from stretto_tinker.record.record import Asked, CheckpointRow, ModelRow, Record, SamplerRow, SessionRow
from stretto_tinker.work.worker import Worker

log = logging.getLogger(__name__)

_SILENT_SECONDS = 300.0
_SWEEP_SECONDS = 15.0
_KEPT_SECONDS = 86_400.0  # results that their clients have, and those of sessions that have ended
#: Weights without a name are removed when nobody has sampled by them for so long; the newest of a model stay.
_UNUSED_SECONDS, _NEWEST = 3_600.0, 4

Found = TypeVar("Found")


class Changes:
    """Who waits for a request to be settled."""

    def __init__(self) -> None:
        self._waiting: dict[str, list[asyncio.Future[None]]] = {}
        self._loop: asyncio.AbstractEventLoop | None = None

    def bind(self, loop: asyncio.AbstractEventLoop) -> None:
        """The loop of the server."""
        self._loop = loop

    def settled(self, id: str, lane: str) -> None:
        """Called in any thread."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._tell, (id, lane))

    def _tell(self, keys: tuple[str, ...]) -> None:
        for key in keys:
            for waiting in self._waiting.pop(key, ()):
                if not waiting.done():
                    waiting.set_result(None)

    async def wait(self, key: str, seconds: float) -> None:
        """Return when the request, or one of the lane, is settled, or after so many seconds."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(key, []).append(future)
        try:
            async with asyncio.timeout(seconds):
                await future
        except TimeoutError:
            pass
        finally:
            if key in self._waiting and future in self._waiting[key]:
                self._waiting[key].remove(future)
                if not self._waiting[key]:
                    del self._waiting[key]


class Service:
    """A server's state. Clients are told apart by their keys; what is another's is not there for them."""

    def __init__(
        self, backend: Backend, record: Record, weights: Weights, worker: Worker, changes: Changes, keys: frozenset[str]
    ) -> None:
        """`keys`: those that are let in; none: every key, each a client of its own."""
        self.backend, self.record, self.weights, self.worker, self.changes = backend, record, weights, worker, changes
        self._keys = frozenset(map(owner_of, keys))
        self._seen: dict[str, float] = {}  # sessions, by when they were last heard of
        self._silent: dict[str, float] = {}  # those whose models have left the memory
        self.secret = record.fact("secret", secrets.token_hex())

    def owner(self, key: str) -> str:
        """The client with a key.

        Raises:
            NotServed: the key is missing or wrong.
        """
        owner = owner_of(key)
        if not key or (self._keys and owner not in self._keys):
            raise NotServed(401, "X-API-Key: the key is missing or wrong")
        return owner

    def knows(self, name: str | None) -> None:
        """Check the name of a base model.

        Raises:
            NotServed: another one is wanted.
        """
        served = {self.backend.name, str(self.backend.folder)}
        if name is not None and name.partition(":")[0] not in served:
            raise NotServed(404, f"base_model: {name!r:.120} is not served here; the model is {self.backend.name!r}")

    def session(self, id: str, owner: str, *, open: bool = True) -> SessionRow:
        """A session of a client, which is alive from now on.

        Raises:
            NotServed: there is none, or it has ended although it is to be open.
        """
        row = self._own(self.record.session(id), owner, "session_id", id)
        if row.ended is not None and open:
            raise NotServed(410, f"session_id: {id!r:.80} has ended")
        if row.ended is None:
            self._seen[id] = time.monotonic()
            self._silent.pop(id, None)
        return row

    def model(self, id: str, owner: str, *, open: bool = True) -> ModelRow:
        """A model of a client.

        Raises:
            NotServed: there is none, or its session has ended although it is to be open.
        """
        row = self._own(self.record.model(id), owner, "model_id", id)
        if open:
            self.session(row.session, owner)
        return row

    def sampler(self, id: str, owner: str, *, open: bool = True) -> SamplerRow:
        """A sampling session of a client.

        Raises:
            NotServed: as for `model`.
        """
        row = self._own(self.record.sampler(id), owner, "sampling_session_id", id)
        self.session(row.session, owner, open=open)
        return row

    def asked(self, id: str, owner: str) -> Asked:
        """A request of a client, whose session is alive: it asks.

        Raises:
            NotServed: none was issued to it.
        """
        found = self._own(self.record.request(id), owner, "request_id", id)
        self.session(found.lane.partition(":")[0], owner, open=False)
        return found

    def checkpoint(self, path: str, owner: str, *, own: bool = False) -> CheckpointRow:
        """A checkpoint that a client may read; with `own`, may change.

        Raises:
            NotServed: there is none.
        """
        row = self.record.checkpoint(Place.of(path).path)
        gone = row is None or (row.expires is not None and row.expires < now())
        if row is None or gone or (row.owner != owner and (own or not row.public)):
            raise NotServed(404, f"path: there are no weights {path!r:.160} for this key")
        return row

    @staticmethod
    def _own(row: Found | None, owner: str, field: str, id: str) -> Found:
        if row is None or row.owner != owner:  # type: ignore[attr-defined]
            raise NotServed(404, f"{field}: {id!r:.120} is none of this key's")
        return row

    def accept(self, asked: Asked, said: bytes | None = None) -> Asked:
        """Put a request on record and hand it to the worker; one that comes again is found as it is. `said`: what the
        client sent, where the server has added to it.

        Raises:
            NotServed: another request has its number; or the record cannot be written now.
        """
        try:
            found, same, new = self.record.ask(asked, said)
        except sqlite3.Error as error:
            raise NotServed(429, f"not accepted, try again: the record cannot be written ({error})") from None
        if not same:
            raise NotServed(422, f"seq_id: {asked.seq} of {asked.lane} is another request already")
        if new:
            self.worker.submit(found)
        return found

    def end_session(self, row: SessionRow, how: str) -> None:
        """End a session: what was acknowledged is computed, then its models leave the memory."""
        self.record.end_session(row.id, how)
        self._seen.pop(row.id, None)
        for model in self._leave(row.id, "the session has ended", ended=True):
            for checkpoint in self.record.checkpoints(model=model):
                if self._orphaned(checkpoint):
                    self.drop(checkpoint)

    def _leave(self, session: str, why: str, *, ended: bool) -> list[str]:
        """Let the models of a session leave the memory; their ids."""
        for sampler in self.record.samplers(session):
            self.worker.end_samples(sampler.id, why)
        row = self.record.session(session)
        models = [one.id for one in ([] if row is None else self.record.models(row.owner)) if one.session == session]
        for model in models:
            self.worker.retire(model, why, ended=ended)
        return models

    async def sweep(self) -> None:
        """Look after sessions that are silent and checkpoints that have expired, until cancelled. A session of before
        the server was started anew has as long to come back as one that falls silent now."""
        self._apart(self._take_up)
        while True:
            await asyncio.sleep(_SWEEP_SECONDS)
            self.look_after(_SILENT_SECONDS)

    def _take_up(self) -> None:
        """The sessions of before this start."""
        for session, ended in self.record.unfinished_sessions():
            if ended:
                self._leave(session, "the session has ended", ended=True)
            else:
                self._seen.setdefault(session, time.monotonic())

    def look_after(self, silent_seconds: float) -> None:
        """Let the models of sessions leave that were silent for so long, and remove what has expired."""
        current = time.monotonic()
        for id in [id for id, seen in self._seen.items() if current - seen > silent_seconds]:
            self._apart(lambda id=id: self._fall_silent(id, silent_seconds))  # type: ignore[misc]
        for id in [id for id, seen in self._silent.items() if current - seen > _KEPT_SECONDS]:
            self._apart(lambda id=id: self._end_silent(id))  # type: ignore[misc]
        self._apart(self._drop_outdated)
        self._apart(lambda: self.record.forget_sessions(_KEPT_SECONDS))
        self._apart(lambda: self.record.forget_fetched(_KEPT_SECONDS))

    def _fall_silent(self, id: str, seconds: float) -> None:
        log.info("session %s is silent", id)
        self._leave(id, f"its client was silent for {seconds:g} s", ended=False)
        self._silent[id] = self._seen.pop(id)

    def _end_silent(self, id: str) -> None:
        if (row := self.record.session(id)) is not None:
            self.end_session(row, "silent")
        self._silent.pop(id, None)

    def _drop_outdated(self) -> None:
        used, unnamed = self.record.last_sampled(), Counter[str]()
        for row in self.record.checkpoints():  # the newest first
            expired = row.expires is not None and row.expires < now()
            if _is_unnamed(row):
                unnamed[row.model] += 1
                last = max(row.created, used.get(row.path, 0.0))
                expired |= unnamed[row.model] > _NEWEST and last < now() - _UNUSED_SECONDS
            if expired or self._orphaned(row):
                self.drop(row)

    @staticmethod
    def _apart(piece: Callable[[], None]) -> None:
        """A piece of the sweep; an error ends that piece alone, and the next sweep tries it again."""
        try:
            piece()
        except Exception:  # a record that cannot be read now, or a bug: the server goes on
            log.exception("a piece of the sweep failed")

    def _orphaned(self, row: CheckpointRow) -> bool:
        """Whether none but samplers of a session that has ended know a checkpoint."""
        if not _is_unnamed(row):
            return False
        session = self.record.session(row.model.partition(":")[0])
        return session is None or session.ended is not None

    def drop(self, row: CheckpointRow) -> None:
        """Remove a checkpoint."""
        self.record.drop_checkpoint(row.path)
        self.worker.forget_engine(row.path)
        self.weights.drop(self.weights.folder(Place.of(row.path)))

    def guarded(self, write: Callable[[], Found]) -> Found:
        """A write to the record.

        Raises:
            NotServed: it cannot be written now.
        """
        try:
            return write()
        except sqlite3.Error as error:
            raise NotServed(429, f"try again: the record cannot be written ({error})") from None


def _is_unnamed(row: CheckpointRow) -> bool:
    return bool(msgspec.json.decode(row.body)["unnamed"])


def owner_of(key: str) -> str:
    """Id of the client that uses a key: a digest, so that no key is on record."""
    return hashlib.sha256(key.encode()).hexdigest()[:24]
