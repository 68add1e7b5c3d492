"""State that all handlers share: the record, the worker, the live sessions."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import secrets
import sqlite3
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from functools import partial
from typing import TypeVar

import msgspec

from stretto_tinker.checkpoints import Place, Weights
from stretto_tinker.compute.base import LocalBackend
from stretto_tinker.dates import now
from stretto_tinker.http.exchange import NotServed
from stretto_tinker.record import Asked, CheckpointRow, ModelRow, Record, SamplerRow, SessionRow
from stretto_tinker.work.worker import Worker

log = logging.getLogger(__name__)

_SILENT_SECONDS = 300.0
_SWEEP_SECONDS = 15.0
_KEPT_SECONDS = 86_400.0  # for which fetched results, and data of ended sessions, are kept
#: Weights without a name are removed after this time without a request to sample from them; the newest 4 of a model
#: stay.
_UNUSED_SECONDS, _NEWEST = 3_600.0, 4

Found = TypeVar("Found")


class Changes:
    """Wakes handlers that wait for a request to be settled (done or failed)."""

    def __init__(self) -> None:
        self._waiting = defaultdict[str, list[asyncio.Future[None]]](list)
        self._loop: asyncio.AbstractEventLoop | None = None

    def bind(self, loop: asyncio.AbstractEventLoop) -> None:
        """Set the server's event loop; before, `settled` has no effect."""
        self._loop = loop

    def settled(self, id: str, lane: str) -> None:
        """Wake the handlers that wait for the request `id`, or for any request of `lane` (a model or sampler). For any
        thread. Does nothing before the server runs, and after its end."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._tell, (id, lane))

    def _tell(self, keys: tuple[str, ...]) -> None:
        for key in keys:
            for waiting in self._waiting.pop(key, ()):
                if not waiting.done():
                    waiting.set_result(None)

    async def wait(self, key: str, seconds: float) -> None:
        """Wait until a request is settled from now on, at most `seconds`; returns in either case. `key`: id of the
        request, or of a lane (a model or sampler) for any of its requests."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting[key].append(future)
        try:
            await asyncio.wait([future], timeout=seconds)
        finally:
            if left := [one for one in self._waiting.pop(key, ()) if one is not future]:
                self._waiting[key] = left


class Service:
    """State of the server, and checks of access. The API key identifies the client (*owner*: its id, `owner_of` the
    key); objects of other clients are treated as missing."""

    def __init__(
        self,
        backend: LocalBackend,
        record: Record,
        weights: Weights,
        worker: Worker,
        changes: Changes,
        keys: frozenset[str],
    ) -> None:
        """Create the state of a server. `keys`: accepted API keys; empty to accept every key, each as a client of its
        own."""
        self.backend, self.record, self.weights, self.worker, self.changes = backend, record, weights, worker, changes
        self._keys = frozenset(map(owner_of, keys))
        self._seen: dict[str, float] = {}  # live sessions: time of the last request
        self._silent: dict[str, float] = {}  # silent sessions, whose models are not in memory: time of the last request
        self.secret = record.fact("secret", secrets.token_hex())

    def owner(self, key: str) -> str:
        """Id of the client with this API key, made from the key; a server without keys of its own accepts any.

        Raises:
            NotServed: 401 if the key is missing or wrong.
        """
        owner = owner_of(key)
        if not key or (self._keys and owner not in self._keys):
            raise NotServed(401, "X-API-Key: the key is missing or wrong")
        return owner

    def knows(self, name: str | None) -> None:
        """Check that a request names the served base model, by its name or folder (what follows a ":" is ignored), or
        none (None).

        Raises:
            NotServed: 404 if it names another one.
        """
        served = {self.backend.name, str(self.backend.folder)}
        if name is not None and name.partition(":")[0] not in served:
            raise NotServed(404, f"base_model: {name!r:.120} is not served here; the model is {self.backend.name!r}")

    def session(self, id: str, owner: str, *, open: bool = True) -> SessionRow:
        """Find a client's session, and note that the client is alive. `open`: refuse a session that has ended.

        Raises:
            NotServed: 404 for an unknown session, 410 for one that has ended.
        """
        row = self._own(self.record.session(id), owner, "session_id", id)
        if row.ended is not None and open:
            raise NotServed(410, f"session_id: {id!r:.80} has ended")
        if row.ended is None:
            self._seen[id] = time.monotonic()
            self._silent.pop(id, None)
        return row

    def model(self, id: str, owner: str, *, open: bool = True) -> ModelRow:
        """Find a client's model. `open`: its session must not have ended, and counts as alive.

        Raises:
            NotServed: 404 for an unknown model, 410 if `open` and its session has ended.
        """
        row = self._own(self.record.model(id), owner, "model_id", id)
        if open:
            self.session(row.session, owner)
        return row

    def sampler(self, id: str, owner: str, *, open: bool = True) -> SamplerRow:
        """Find a client's sampling session, and note that the client is alive. `open`: the session that it belongs to
        must not have ended.

        Raises:
            NotServed: 404 for an unknown sampling session, 410 if `open` and its session has ended.
        """
        row = self._own(self.record.sampler(id), owner, "sampling_session_id", id)
        self.session(row.session, owner, open=open)
        return row

    def asked(self, id: str, owner: str) -> Asked:
        """Find a client's recorded request, and note that the client is alive.

        Raises:
            NotServed: 404 if the client has no such request.
        """
        found = self._own(self.record.request(id), owner, "request_id", id)
        self.session(found.lane.partition(":")[0], owner, open=False)
        return found

    def checkpoint(self, path: str, owner: str, *, own: bool = False) -> CheckpointRow:
        """Find a checkpoint that a client may read (its own, or a public one), or with `own` may change (its own).

        Raises:
            NotServed: 404 if there is no such checkpoint for this client, or it has expired.
            RefusedRequest: the path is malformed.
        """
        row = self.record.checkpoint(Place.of(path).path)
        gone = row is None or (row.expires is not None and row.expires < now())
        if row is None or gone or (row.owner != owner and (own or not row.public)):
            raise NotServed(404, f"path: there are no weights {path!r:.160} for this key")
        return row

    @staticmethod
    def _own(row: Found | None, owner: str, field: str, id: str) -> Found:
        if row is None or row.owner != owner:  # type: ignore[attr-defined]
            raise NotServed(404, f"{field}: {id!r:.120} does not belong to this key")
        return row

    def accept(self, asked: Asked, said: bytes | None = None) -> Asked:
        """Record a request and pass it to the worker; returns the recorded request. A retry of a recorded request has
        no effect. `said`: the body that the client sent, by which a retry is recognized; None if `asked.body` is that.

        Raises:
            NotServed: 422 if a different request has its number, 429 if the record cannot be written now.
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
        """End a session; its thread does the rest later. Accepted training requests are computed (those behind a
        missing one fail), requests for samples fail, then its models are removed from memory. Checkpoints without a
        name are deleted. `how`: reason for the record."""
        self.record.end_session(row.id, how)
        self._seen.pop(row.id, None)
        for model in self._leave(row.id, "the session has ended", ended=True):
            for checkpoint in self.record.checkpoints(model=model):
                if self._orphaned(checkpoint):
                    self.drop(checkpoint)

    def _leave(self, session: str, why: str, *, ended: bool) -> list[str]:
        """Fail the requests for samples of a session (its id) with the reason `why`, and remove its models from memory
        once their requests are computed; returns the models' ids. `ended`: the session will send no further requests.
        """
        self.worker.end_samples([sampler.id for sampler in self.record.samplers(session)], why)
        row = self.record.session(session)
        models = [one.id for one in ([] if row is None else self.record.models(row.owner)) if one.session == session]
        for model in models:
            self.worker.retire(model, why, ended=ended)
        return models

    async def sweep(self) -> None:
        """Call `look_after` every 15 s until cancelled. Sessions from before a restart of the server count as alive at
        its start."""
        self._apart(self._take_up)
        while True:
            await asyncio.sleep(_SWEEP_SECONDS)
            self.look_after(_SILENT_SECONDS)

    def _take_up(self) -> None:
        """Count recorded sessions that have not ended as seen now. For ended ones with queued requests, fail those for
        samples, and remove the models from memory once the others are computed."""
        for session, ended in self.record.unfinished_sessions():
            if ended:
                self._leave(session, "the session has ended", ended=True)
            else:
                self._seen.setdefault(session, time.monotonic())

    def look_after(self, silent_seconds: float) -> None:
        """Remove the models of sessions that were silent for `silent_seconds` from memory and fail their requests for
        samples, end sessions that were silent for a day, and delete checkpoints that are expired or cannot be used any
        more, and old results."""
        current = time.monotonic()
        for id in [id for id, seen in self._seen.items() if current - seen > silent_seconds]:
            self._apart(partial(self._fall_silent, id, silent_seconds))
        for id in [id for id, seen in self._silent.items() if current - seen > _KEPT_SECONDS]:
            self._apart(partial(self._end_silent, id))
        self._apart(self._drop_outdated)
        self._apart(partial(self.record.forget_sessions, _KEPT_SECONDS))
        self._apart(partial(self.record.forget_fetched, _KEPT_SECONDS))

    def _fall_silent(self, id: str, seconds: float) -> None:
        log.info("session %s is silent", id)
        self._leave(id, f"its client was silent for {seconds:g} s", ended=False)
        self._silent[id] = self._seen.pop(id)

    def _end_silent(self, id: str) -> None:
        if (row := self.record.session(id)) is not None:
            self.end_session(row, "silent")
        self._silent.pop(id, None)

    def _drop_outdated(self) -> None:
        """Delete checkpoints that are expired; without a name also those of ended sessions, and, except for the newest
        four of a model, those that were not sampled from for an hour."""
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
        """Run one piece of the sweep. An error ends only this piece; the next sweep tries it again."""
        try:
            piece()
        except Exception:  # an unreadable record, or a bug: the server goes on
            log.exception("a piece of the sweep failed")

    def _orphaned(self, row: CheckpointRow) -> bool:
        """Whether a checkpoint has no name and its session has ended, so that nobody can use it any more."""
        if not _is_unnamed(row):
            return False
        session = self.record.session(row.model.partition(":")[0])
        return session is None or session.ended is not None

    def drop(self, row: CheckpointRow) -> None:
        """Delete a checkpoint from record and disk, and give its engine no further requests."""
        self.record.drop_checkpoint(row.path)
        self.worker.forget_engine(row.path)
        self.weights.drop(self.weights.folder(Place.of(row.path)))

    def guarded(self, write: Callable[[], Found]) -> Found:
        """Call `write`, which writes to the record; returns what it returns.

        Raises:
            NotServed: 429, for a retry by the client, if the record cannot be written now.
        """
        try:
            return write()
        except sqlite3.Error as error:
            raise NotServed(429, f"try again: the record cannot be written ({error})") from None


def _is_unnamed(row: CheckpointRow) -> bool:
    return bool(msgspec.json.decode(row.body)["unnamed"])


def owner_of(key: str) -> str:
    """Id of the client with an API key: a digest of the key, so that keys are not recorded."""
    return hashlib.sha256(key.encode()).hexdigest()[:24]
