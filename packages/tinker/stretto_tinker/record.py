"""Durable record of a server in SQLite: sessions, models, samplers, checkpoints, and each request with its result.

    request ─► queued ─► done | failed ─► forgotten      one row a request

A request is acknowledged after its row is committed, and its result is sent after it is committed. So after `kill -9` a
client that repeats a request finds it or its result. The state of a model is a function of the rows (`work.models`), so
that each acknowledged request takes effect once. Commits survive the end of the process without a sync to disk; a loss
of power may lose the last ones, but leaves no partial row.
"""

from __future__ import annotations

import hashlib
import sqlite3
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from stretto.core.errors import Problem, RunFolderError
from stretto.store.files import make_private
from stretto_tinker.dates import now

QUEUED, DONE, FAILED, FORGOTTEN = "queued", "done", "failed", "forgotten"
#: Encodings of results.
PROTO, JSON = "proto", "json"
_FORMAT = 1
_LOG_BYTES = 64 << 20  # size to which SQLite's log file is truncated after a checkpoint
_PAGES = 1024  # free pages that are returned to the disk at a time
_SCHEMA = """
CREATE TABLE IF NOT EXISTS facts (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS sessions (
    id TEXT PRIMARY KEY, owner TEXT NOT NULL, asked TEXT NOT NULL, created REAL NOT NULL, body BLOB NOT NULL,
    ended TEXT, ended_at REAL, UNIQUE (owner, asked)
);
CREATE TABLE IF NOT EXISTS models (
    id TEXT PRIMARY KEY, session TEXT NOT NULL, owner TEXT NOT NULL, created REAL NOT NULL, body BLOB NOT NULL,
    snapshot INTEGER NOT NULL DEFAULT -1
);
CREATE TABLE IF NOT EXISTS samplers (
    id TEXT PRIMARY KEY, session TEXT NOT NULL, owner TEXT NOT NULL, created REAL NOT NULL, path TEXT,
    model TEXT, clones INTEGER NOT NULL DEFAULT 0
);
CREATE TABLE IF NOT EXISTS requests (
    id TEXT PRIMARY KEY, lane TEXT NOT NULL, seq INTEGER NOT NULL, owner TEXT NOT NULL, kind TEXT NOT NULL,
    digest BLOB NOT NULL, body BLOB, state TEXT NOT NULL, result BLOB, form TEXT, place INTEGER, asked REAL NOT NULL,
    proof TEXT NOT NULL DEFAULT ''
);
CREATE INDEX IF NOT EXISTS requests_of_lane ON requests (lane, seq);
CREATE INDEX IF NOT EXISTS requests_done ON requests (lane, place);
CREATE INDEX IF NOT EXISTS requests_queued ON requests (state) WHERE state = 'queued';
CREATE TABLE IF NOT EXISTS checkpoints (
    path TEXT PRIMARY KEY, model TEXT NOT NULL, owner TEXT NOT NULL, kind TEXT NOT NULL, name TEXT NOT NULL,
    created REAL NOT NULL, size INTEGER NOT NULL, public INTEGER NOT NULL DEFAULT 0, expires REAL,
    request TEXT NOT NULL, body BLOB NOT NULL
);
CREATE TABLE IF NOT EXISTS fetched (id TEXT PRIMARY KEY, at REAL NOT NULL) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS fetched_when ON fetched (at);
CREATE TABLE IF NOT EXISTS begun (id TEXT PRIMARY KEY, times INTEGER NOT NULL) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS checkpoints_of_model ON checkpoints (model);
"""
#: Query: sessions of which a model or a sampler has a queued request.
_WAITING = " UNION ".join(
    f"SELECT session FROM {lanes} JOIN requests ON lane = {lanes}.id WHERE state = 'queued'"
    for lanes in ("models", "samplers")
)


@dataclass(frozen=True)
class Asked:
    """A recorded request. Its *lane* is the model or the sampler that it is for (an id); `seq` is its number in the
    lane. `owner`: id of the client. `kind`: what is requested. `body`: None where it is not kept, or not read. `state`:
    `QUEUED`, `DONE`, `FAILED` or `FORGOTTEN`, which has no result any more. `form`: encoding of the result, `PROTO` or
    `JSON`. `proof`: checksum of the weights after a step."""

    id: str
    lane: str
    seq: int
    owner: str
    kind: str
    body: bytes | None
    state: str = QUEUED
    result: bytes | None = None
    form: str | None = None
    proof: str = ""


@dataclass(frozen=True)
class SessionRow:
    """A client's session. `body`: the request that opened it. `ended`: how it ended; None while it is open."""

    id: str
    owner: str
    created: float
    body: bytes
    ended: str | None


@dataclass(frozen=True)
class ModelRow:
    """A client's model. `body`: its `ModelFacts` as JSON. `snapshot`: number of the last request whose effect is in the
    snapshot on disk; -1 without a snapshot."""

    id: str
    session: str
    owner: str
    created: float
    body: bytes
    snapshot: int


@dataclass(frozen=True)
class SamplerRow:
    """A sampling session. `path`: its weights, None for the base model. `model`: the model whose newest weights it
    follows; None if its weights are fixed."""

    id: str
    session: str
    owner: str
    created: float
    path: str | None
    model: str | None


@dataclass(frozen=True)
class CheckpointRow:
    """A checkpoint. `created`, `expires`: Unix time; None: never. `public`: all clients may read it. `request`: id of
    the request that saved it. `body`: JSON with the client's metadata, and whether it has no name (`unnamed`)."""

    path: str
    model: str
    owner: str
    kind: str
    name: str
    created: float
    size: int
    public: bool
    expires: float | None
    request: str
    body: bytes


Row = TypeVar("Row", Asked, SessionRow, ModelRow, SamplerRow, CheckpointRow)
_TABLES: dict[type, str] = {
    Asked: "requests",
    SessionRow: "sessions",
    ModelRow: "models",
    SamplerRow: "samplers",
    CheckpointRow: "checkpoints",
}


class Record:
    """Reads and writes ``tinker.sqlite``. It must be the only writer; its methods may be called in any thread. They
    raise sqlite3.Error if the file cannot be read or written."""

    def __init__(self, path: Path) -> None:
        """Open the database, and create it if it is missing.

        Raises:
            RunFolderError: the file has another format, or cannot be opened.
        """
        self._lock = threading.RLock()
        try:
            make_private(path, path.with_name(f"{path.name}-wal"), path.with_name(f"{path.name}-shm"))
            self._connection = sqlite3.connect(path, check_same_thread=False, isolation_level=None)
            self._connection.execute("PRAGMA auto_vacuum = INCREMENTAL")  # has an effect only before tables exist
            self._connection.execute("PRAGMA journal_mode = WAL")
            self._connection.execute(f"PRAGMA journal_size_limit = {_LOG_BYTES}")
            self._connection.execute("PRAGMA synchronous = NORMAL")
            self._connection.executescript(_SCHEMA)
            found = self.fact("format", str(_FORMAT))
        except (OSError, sqlite3.Error) as error:
            raise RunFolderError([Problem(str(path), f"is no record: {error}", "give another folder")]) from None
        if found != str(_FORMAT):
            told = f"is of format {found}, this version writes {_FORMAT}"
            raise RunFolderError([Problem(str(path), told, "give another folder")])
        [(self._place,)] = self._connection.execute("SELECT COALESCE(MAX(place), 0) FROM requests")

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            self._connection.close()

    @contextmanager
    def together(self) -> Iterator[None]:
        """Context manager: one transaction for all writes in the block, rolled back on an error. A block inside another
        one is part of the outer transaction."""
        with self._lock:
            if self._connection.in_transaction:
                yield
                return
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                yield
                self._connection.execute("COMMIT")
            except BaseException:
                if self._connection.in_transaction:  # on a full disk, SQLite has rolled it back already
                    self._connection.execute("ROLLBACK")
                raise

    @contextmanager
    def _synced(self) -> Iterator[None]:
        """Context manager: the transaction in the block, and all before it, are on disk when it has ended."""
        with self._lock:
            self._connection.execute("PRAGMA synchronous = FULL")
            try:
                yield
            finally:
                self._connection.execute("PRAGMA synchronous = NORMAL")

    def _all(self, sql: str, *values: Any) -> list[tuple[Any, ...]]:
        with self._lock:
            return self._connection.execute(sql, values).fetchall()

    def _rows(self, kind: type[Row], where: str, *values: Any) -> list[Row]:
        columns = ", ".join(field.name for field in fields(kind))
        return [kind(*found) for found in self._all(f"SELECT {columns} FROM {_TABLES[kind]} {where}", *values)]

    def _row(self, kind: type[Row], where: str, *values: Any) -> Row | None:
        return next(iter(self._rows(kind, where, *values)), None)

    def fact(self, name: str, value: str) -> str:
        """Return the value that is recorded under a name; if there is none, record `value` and return it."""
        self._all("INSERT OR IGNORE INTO facts VALUES (?, ?)", name, value)
        [(found,)] = self._all("SELECT value FROM facts WHERE name = ?", name)
        return str(found)

    # Sessions

    def open_session(self, id: str, owner: str, asked: str, body: bytes) -> str:
        """Add a session of a client (`owner`) and return `id`; for a repeated idempotency key `asked` add nothing, and
        return the first session's id."""
        with self.together():
            self._all(
                "INSERT OR IGNORE INTO sessions VALUES (?, ?, ?, ?, ?, NULL, NULL)", id, owner, asked, now(), body
            )
            [(found,)] = self._all("SELECT id FROM sessions WHERE owner = ? AND asked = ?", owner, asked)
        return str(found)

    def session(self, id: str) -> SessionRow | None:
        """Session with this id, or None."""
        return self._row(SessionRow, "WHERE id = ?", id)

    def sessions(self, owner: str) -> list[SessionRow]:
        """Sessions of an owner, the newest first."""
        return self._rows(SessionRow, "WHERE owner = ? ORDER BY created DESC, id", owner)

    def unfinished_sessions(self) -> list[tuple[str, bool]]:
        """Ids of sessions that have not ended or still have queued requests, each with whether it has ended."""
        sql = f"SELECT id, ended IS NOT NULL FROM sessions WHERE ended IS NULL OR id IN ({_WAITING})"
        return [(id, bool(ended)) for id, ended in self._all(sql)]

    def end_session(self, id: str, how: str) -> None:
        """Record how a session ended; nothing changes if it has ended already."""
        self._all("UPDATE sessions SET ended = ?, ended_at = ? WHERE id = ? AND ended IS NULL", how, now(), id)

    def forget_sessions(self, seconds: float) -> None:
        """Delete the requests and the samplers of sessions that ended more than `seconds` ago; their checkpoints stay.
        A session with queued requests stays whole: its models may be restored from the settled ones."""
        ended = f"SELECT id FROM sessions WHERE ended_at < ? AND ended_at > 0 AND id NOT IN ({_WAITING})"
        lanes = (
            f"SELECT id FROM models WHERE session IN ({ended}) UNION SELECT id FROM samplers WHERE session IN ({ended})"
        )
        until = now() - seconds
        with self.together():
            self._all(f"DELETE FROM requests WHERE lane IN ({lanes})", until, until)
            self._all(f"DELETE FROM samplers WHERE session IN ({ended})", until)
            self._all(f"UPDATE sessions SET ended_at = 0 WHERE id IN ({ended})", until)  # 0: cleaned up

    def forget_fetched(self, seconds: float) -> None:
        """Drop results that were fetched more than `seconds` ago, except of requests that a model may be restored from.
        Also returns free pages to the disk."""
        old = "SELECT id FROM fetched WHERE at < ?"
        sql = "UPDATE requests SET state = 'forgotten', result = NULL"  # a body is kept only if a model needs it
        until = now() - seconds
        with self.together():
            self._all(f"{sql} WHERE id IN ({old}) AND state IN ('done', 'failed') AND body IS NULL", until)
            gone = "SELECT id FROM requests WHERE state IN ('done', 'failed')"
            self._all(f"DELETE FROM fetched WHERE at < ? AND id NOT IN ({gone} AND id IN ({old}))", until, until)
        self._all(f"PRAGMA incremental_vacuum({_PAGES})")

    # Models and samplers

    def add_model(self, row: ModelRow) -> None:
        """Add a model, unless its id is recorded already."""
        self._all("INSERT OR IGNORE INTO models VALUES (?, ?, ?, ?, ?, ?)", *astuple(row))

    def model(self, id: str) -> ModelRow | None:
        """Model with this id, or None."""
        return self._row(ModelRow, "WHERE id = ?", id)

    def models(self, owner: str) -> list[ModelRow]:
        """Models of an owner, the newest first."""
        return self._rows(ModelRow, "WHERE owner = ? ORDER BY created DESC, id", owner)

    def describe_model(self, id: str, body: bytes) -> None:
        """Replace the body (`ModelFacts`) of a model."""
        self._all("UPDATE models SET body = ? WHERE id = ?", body, id)

    def snapshotted(self, id: str, seq: int) -> None:
        """Record that the model's snapshot holds the effect of its requests up to `seq`, and drop their bodies. On
        return this is synced to disk: the earlier snapshot is deleted next."""
        with self._synced(), self.together():
            self._all("UPDATE models SET snapshot = ? WHERE id = ?", seq, id)
            self._all("UPDATE requests SET body = NULL WHERE lane = ? AND seq <= ? AND state != 'queued'", id, seq)

    def places(self) -> list[str | tuple[str, int]] | None:
        """Folders on disk that are needed: paths of checkpoints, and (id, snapshot) of models whose session is open or
        which have queued requests. None if no model was ever recorded, so that nothing is known of folders."""
        if not self._all("SELECT 1 FROM models LIMIT 1"):
            return None
        paths = [path for (path,) in self._all("SELECT path FROM checkpoints")]
        open_ = "SELECT id FROM sessions WHERE ended IS NULL"
        waiting = "SELECT lane FROM requests WHERE state = 'queued'"
        sql = f"SELECT id, snapshot FROM models WHERE session IN ({open_}) OR id IN ({waiting})"
        return [*paths, *((id, seq) for id, seq in self._all(sql))]

    def last_sampled(self) -> dict[str, float]:
        """Unix time of the last request for samples by path of weights; 9e99 if a request is still queued."""
        sql = (
            "SELECT path, MAX(CASE state WHEN 'queued' THEN 9e99 ELSE asked END) FROM samplers"
            " JOIN requests ON lane = samplers.id WHERE path IS NOT NULL GROUP BY path"
        )
        return dict(self._all(sql))

    def add_sampler(self, row: SamplerRow) -> None:
        """Add a sampling session, unless its id is recorded already."""
        self._all("INSERT OR IGNORE INTO samplers VALUES (?, ?, ?, ?, ?, ?, 0)", *astuple(row))

    def sampler(self, id: str) -> SamplerRow | None:
        """Sampling session with this id, or None."""
        return self._row(SamplerRow, "WHERE id = ?", id)

    def samplers(self, session: str) -> list[SamplerRow]:
        """Sampling sessions of a session, the oldest first."""
        return self._rows(SamplerRow, "WHERE session = ? ORDER BY created, id", session)

    def followers_wait(self, model: str) -> bool:
        """Whether a sampler that follows this model has a queued request."""
        lanes = "SELECT id FROM samplers WHERE model = ?"
        return bool(self._all(f"SELECT 1 FROM requests WHERE state = 'queued' AND lane IN ({lanes}) LIMIT 1", model))

    def follow(self, model: str, path: str) -> None:
        """Set new weights, at `path`, for all samplers that follow a model."""
        self._all("UPDATE samplers SET path = ? WHERE model = ?", path, model)

    def join_sampler(self, id: str) -> int:
        """Count a further client of a sampling session; returns its number, 1 for the first."""
        with self.together():
            self._all("UPDATE samplers SET clones = clones + 1 WHERE id = ?", id)
            [(clones,)] = self._all("SELECT clones FROM samplers WHERE id = ?", id)
        return int(clones)

    # Requests

    def ask(self, asked: Asked, said: bytes | None = None) -> tuple[Asked, bool, bool]:
        """Record a request, unless its id is recorded already. Returns the recorded request, whether it is the same
        request, and whether it is new. `said`: content that must be equal in a retry; None for the body."""
        digest = hashlib.blake2b(said or asked.body or b"", digest_size=16, person=asked.kind.encode()[:16]).digest()
        with self.together():
            found = self.request(asked.id)
            if found is None:
                self._all(
                    "INSERT INTO requests (id, lane, seq, owner, kind, digest, body, state, asked)"
                    " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
                    *(asked.id, asked.lane, asked.seq, asked.owner, asked.kind, digest, asked.body, QUEUED, now()),
                )
                return asked, True, True
            [(held,)] = self._all("SELECT digest FROM requests WHERE id = ?", asked.id)
        return found, held == digest, False

    def request(self, id: str) -> Asked | None:
        """Request with this id, or None."""
        return self._row(Asked, "WHERE id = ?", id)

    def queued(self) -> Iterator[Asked]:
        """Iterate over queued requests in the order of their arrival; only one is in memory at a time."""
        for (id,) in self._all("SELECT id FROM requests WHERE state = 'queued' ORDER BY asked, seq"):
            if (found := self.request(id)) is not None:
                yield found

    def settled(self, lane: str, after: int, kinds: Iterable[str]) -> list[Asked]:
        """Requests of a lane with numbers above `after` that are not queued any more and of one of these kinds, in
        order."""
        rows = self._rows(Asked, "WHERE lane = ? AND seq > ? AND state != 'queued' ORDER BY seq", lane, after)
        return [asked for asked in rows if asked.kind in kinds]

    def next_seq(self, lane: str) -> int | None:
        """Number after the last settled request of a lane; None if none is settled."""
        [(last,)] = self._all("SELECT MAX(seq) FROM requests WHERE lane = ? AND state != 'queued'", lane)
        return None if last is None else int(last) + 1

    def last_asked(self, lane: str) -> float | None:
        """Unix time at which the newest request of a lane was recorded; None without requests."""
        [(found,)] = self._all("SELECT MAX(asked) FROM requests WHERE lane = ?", lane)
        return None if found is None else float(found)

    def begin(self, id: str) -> int:
        """Record that the computation of a request begins. Returns how often it has begun without a `pause` or an end,
        this time included; more than once means that the server was killed meanwhile."""
        with self.together():
            self._all("INSERT INTO begun VALUES (?, 1) ON CONFLICT (id) DO UPDATE SET times = times + 1", id)
            [(times,)] = self._all("SELECT times FROM begun WHERE id = ?", id)
        return int(times)

    def pause(self, *ids: str, by: int = -1) -> None:
        """Record that the computation of requests is paused, so that a kill is not attributed to them; with `by` 1,
        that it goes on."""
        if ids:
            sql = "UPDATE begun SET times = times + ? WHERE id IN (SELECT value FROM json_each(?))"
            self._all(sql, by, msgspec.json.encode(ids).decode())

    def none_computed(self) -> None:
        """Record that no request is being computed, when the server ends regularly."""
        self._all("DELETE FROM begun")

    def settle(
        self, id: str, state: str, result: bytes, form: str, *, proof: str = "", keep_body: bool = False
    ) -> None:
        """Record the outcome (`state`, `result` in its encoding `form`) of a request; ignored if it is not queued.
        `proof`: checksum of the weights after it. `keep_body`: keep the body, which restoring the model needs."""
        with self.together():
            self._place += 1
            body = "" if keep_body else ", body = NULL"
            sql = f"UPDATE requests SET state = ?, result = ?, form = ?, place = ?, proof = ?{body}"
            self._all(f"{sql} WHERE id = ? AND state = 'queued'", state, result, form, self._place, proof, id)
            self._all("DELETE FROM begun WHERE id = ?", id)

    def settled_after(self, lane: str, place: int, first: int, last: int) -> list[tuple[str, str, int, int]]:
        """Requests of a sampler with numbers from `first` to `last` that were settled after `place`: id, state, size of
        the result in bytes, and place. Places number all settled requests in the order of settling."""
        sql = (
            "SELECT id, state, LENGTH(result), place FROM requests"
            " WHERE lane = ? AND place > ? AND seq BETWEEN ? AND ? ORDER BY place"
        )
        return [(id, state, size or 0, at) for id, state, size, at in self._all(sql, lane, place, first, last)]

    def fetched(self, id: str) -> None:
        """Record now as the time at which its client fetched the result of request `id`; only the first call counts."""
        self._all("INSERT OR IGNORE INTO fetched VALUES (?, ?)", id, now())

    def forget_results(self, lane: str, ids: Iterable[str]) -> None:
        """Drop those results of a sampler (`lane`) that its client has received; `ids` of other requests are
        ignored."""
        sql = "UPDATE requests SET state = 'forgotten', result = NULL, body = NULL WHERE lane = ?"
        known = "AND state IN ('done', 'failed') AND id IN (SELECT value FROM json_each(?))"
        self._all(f"{sql} {known}", lane, msgspec.json.encode([*ids]).decode())

    # Checkpoints

    def add_checkpoint(self, row: CheckpointRow) -> None:
        """Add a checkpoint, or replace the checkpoint with the same path."""
        self._all("INSERT OR REPLACE INTO checkpoints VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)", *astuple(row))

    def checkpoint(self, path: str) -> CheckpointRow | None:
        """Checkpoint with this path, also if it has expired; None if there is none."""
        return self._row(CheckpointRow, "WHERE path = ?", path)

    def checkpoints(self, *, owner: str | None = None, model: str | None = None) -> list[CheckpointRow]:
        """Checkpoints of an owner, else of a model, or all if both are None; the newest first."""
        by = {"owner": owner} if owner is not None else {"model": model} if model is not None else {}
        where = "".join(f"WHERE {name} = ? " for name in by)
        return self._rows(CheckpointRow, f"{where}ORDER BY created DESC", *by.values())

    def change_checkpoint(self, path: str, *, public: bool | None = None, expires: float | None = None) -> None:
        """Set whether all clients may read a checkpoint (`public`, then `expires` is ignored); if `public` is None, set
        when the checkpoint expires (`expires`: Unix time; None: never)."""
        if public is None:
            self._all("UPDATE checkpoints SET expires = ? WHERE path = ?", expires, path)
        else:
            self._all("UPDATE checkpoints SET public = ? WHERE path = ?", public, path)

    def drop_checkpoint(self, path: str) -> None:
        """Delete a checkpoint from the record; its files stay."""
        self._all("DELETE FROM checkpoints WHERE path = ?", path)
