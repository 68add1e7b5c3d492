"""The durable record of a server: who has asked for what, and what the answer is.

    asked ─► queued ─► done | failed        one row a request; a row is on disk before its request is acknowledged

Work is acknowledged once its row is committed, and a result is told once it is. So after `kill -9` a client that asks
again finds its request, or its result: what was acknowledged is computed once as far as anybody can tell, because the
state of a model is a function of the rows (`work.models`). SQLite's log survives the end of the process without a sync
to disk; a loss of power may take the last moments, and never tears a row.
"""

from __future__ import annotations

import hashlib
import sqlite3
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from stretto.core.errors import Problem, RunFolderError
from stretto_tinker.record.dates import now

QUEUED, DONE, FAILED, FORGOTTEN = "queued", "done", "failed", "forgotten"
#: Kinds of results: how the SDK decodes them.
PROTO, JSON = "proto", "json"
_FORMAT = 1
_LOG_BYTES = 64 << 20  # of SQLite's log, when it is empty again
_PAGES = 1024  # given back to the disk at a time
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


@dataclass(frozen=True)
class Asked:
    """A request on record."""

    id: str
    lane: str  # the model, or the sampler, that it is for
    seq: int
    owner: str
    kind: str
    body: bytes | None
    state: str = QUEUED
    result: bytes | None = None
    form: str | None = None  # how the SDK decodes the result
    proof: str = ""  # checksum of the weights after a step


@dataclass(frozen=True)
class SessionRow:
    """A session of a client."""

    id: str
    owner: str
    created: float
    body: bytes
    ended: str | None


@dataclass(frozen=True)
class ModelRow:
    """A model that is trained. `snapshot` is the last request whose effect is in a file, -1 for none."""

    id: str
    session: str
    owner: str
    created: float
    body: bytes
    snapshot: int


@dataclass(frozen=True)
class SamplerRow:
    """A sampling session. `path` is that of its weights, None for those of the base model; `model` is set while it
    follows a model's newest weights."""

    id: str
    session: str
    owner: str
    created: float
    path: str | None
    model: str | None


@dataclass(frozen=True)
class CheckpointRow:
    """Weights that a client saved under a name. `body` holds what it said about them."""

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


_REQUEST = "SELECT id, lane, seq, owner, kind, body, state, result, form, proof FROM requests"
_CHECKPOINT = "SELECT path, model, owner, kind, name, created, size, public, expires, request, body FROM checkpoints"


class Record:
    """The one writer of ``tinker.sqlite``; for any thread."""

    def __init__(self, path: Path) -> None:
        """
        Raises:
            RunFolderError: the file is none of this version, or cannot be opened.
        """
        self._lock = threading.RLock()
        try:
            self._connection = sqlite3.connect(path, check_same_thread=False, isolation_level=None)
            self._connection.execute("PRAGMA auto_vacuum = INCREMENTAL")  # of a new file; before it has tables
            self._connection.execute("PRAGMA journal_mode = WAL")
            self._connection.execute(f"PRAGMA journal_size_limit = {_LOG_BYTES}")
            self._connection.execute("PRAGMA synchronous = NORMAL")
            self._connection.executescript(_SCHEMA)
            found = self.fact("format", str(_FORMAT))
        except sqlite3.Error as error:
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
        """One transaction: all of it is written, or nothing."""
        with self._lock:
            if self._connection.in_transaction:
                yield
                return
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                yield
            except BaseException:
                self._connection.execute("ROLLBACK")
                raise
            self._connection.execute("COMMIT")

    def _all(self, sql: str, *values: Any) -> list[tuple[Any, ...]]:
        with self._lock:
            return self._connection.execute(sql, values).fetchall()

    def _one(self, sql: str, *values: Any) -> tuple[Any, ...] | None:
        found = self._all(sql, *values)
        return found[0] if found else None

    def fact(self, name: str, value: str) -> str:
        """A fact about the whole record; `value` if none is on record, which it is from then on."""
        self._all("INSERT OR IGNORE INTO facts VALUES (?, ?)", name, value)
        [(found,)] = self._all("SELECT value FROM facts WHERE name = ?", name)
        return str(found)

    # Sessions

    def open_session(self, id: str, owner: str, asked: str, body: bytes) -> str:
        """Open a session; `asked` names the request, which may come again: then its session is found."""
        with self.together():
            self._all(
                "INSERT OR IGNORE INTO sessions VALUES (?, ?, ?, ?, ?, NULL, NULL)", id, owner, asked, now(), body
            )
            [(found,)] = self._all("SELECT id FROM sessions WHERE owner = ? AND asked = ?", owner, asked)
        return str(found)

    def session(self, id: str) -> SessionRow | None:
        """The session with this id."""
        found = self._one("SELECT id, owner, created, body, ended FROM sessions WHERE id = ?", id)
        return None if found is None else SessionRow(*found)

    def sessions(self, owner: str) -> list[SessionRow]:
        """All sessions of an owner, the newest first."""
        sql = "SELECT id, owner, created, body, ended FROM sessions WHERE owner = ? ORDER BY created DESC, id"
        return [SessionRow(*found) for found in self._all(sql, owner)]

    def unfinished_sessions(self) -> list[tuple[str, bool]]:
        """The sessions that have not ended, and those that have while a request of theirs waits; each with whether it
        has."""
        of_models = "SELECT session FROM models JOIN requests ON lane = models.id WHERE state = 'queued'"
        of_samplers = of_models.replace("models", "samplers")
        waiting = f"id IN ({of_models} UNION {of_samplers})"
        sql = f"SELECT id, ended IS NOT NULL FROM sessions WHERE ended IS NULL OR {waiting}"
        return [(id, bool(ended)) for id, ended in self._all(sql)]

    def end_session(self, id: str, how: str) -> None:
        """Say how a session ended; the first word counts."""
        self._all("UPDATE sessions SET ended = ?, ended_at = ? WHERE id = ? AND ended IS NULL", how, now(), id)

    def forget_sessions(self, seconds: float) -> None:
        """Drop the requests, results and samplers of sessions that ended so long ago; their checkpoints stay."""
        ended = "SELECT id FROM sessions WHERE ended_at < ? AND ended_at > 0"
        lanes = (
            f"SELECT id FROM models WHERE session IN ({ended}) UNION SELECT id FROM samplers WHERE session IN ({ended})"
        )
        until = now() - seconds
        with self.together():
            self._all(f"DELETE FROM requests WHERE state != 'queued' AND lane IN ({lanes})", until, until)
            self._all(f"DELETE FROM samplers WHERE session IN ({ended})", until)
            self._all("UPDATE sessions SET ended_at = 0 WHERE ended_at < ? AND ended_at > 0", until)  # once is enough

    def forget_fetched(self, seconds: float) -> None:
        """Drop results that their clients have had for so long, but for those that a model is restored from; and give
        pages that are free back to the disk."""
        old = "SELECT id FROM fetched WHERE at < ?"
        sql = "UPDATE requests SET state = 'forgotten', result = NULL"  # a body is there if a model needs it
        until = now() - seconds
        with self.together():
            self._all(f"{sql} WHERE id IN ({old}) AND state IN ('done', 'failed') AND body IS NULL", until)
            gone = "SELECT id FROM requests WHERE state IN ('done', 'failed')"
            self._all(f"DELETE FROM fetched WHERE at < ? AND id NOT IN ({gone} AND id IN ({old}))", until, until)
        self._all(f"PRAGMA incremental_vacuum({_PAGES})")

    # Models and samplers

    def add_model(self, row: ModelRow) -> None:
        """Add a model; one that is there already stays."""
        values = (row.id, row.session, row.owner, row.created, row.body, row.snapshot)
        self._all("INSERT OR IGNORE INTO models VALUES (?, ?, ?, ?, ?, ?)", *values)

    def model(self, id: str) -> ModelRow | None:
        """The model with this id."""
        found = self._one("SELECT id, session, owner, created, body, snapshot FROM models WHERE id = ?", id)
        return None if found is None else ModelRow(*found)

    def models(self, owner: str) -> list[ModelRow]:
        """All models of an owner, the newest first."""
        sql = "SELECT id, session, owner, created, body, snapshot FROM models WHERE owner = ? ORDER BY created DESC, id"
        return [ModelRow(*found) for found in self._all(sql, owner)]

    def describe_model(self, id: str, body: bytes) -> None:
        """Replace what is known of a model."""
        self._all("UPDATE models SET body = ? WHERE id = ?", body, id)

    def snapshotted(self, id: str, seq: int) -> None:
        """The effect of all requests of a model up to `seq` is in a file: their bodies are not needed any more."""
        with self.together():
            self._all("UPDATE models SET snapshot = ? WHERE id = ?", seq, id)
            self._all("UPDATE requests SET body = NULL WHERE lane = ? AND seq <= ? AND state != 'queued'", id, seq)

    def places(self) -> list[str | tuple[str, int]]:
        """What is in folders: the paths of checkpoints, and models that may be asked for again with the numbers of
        their snapshots."""
        paths = [path for (path,) in self._all("SELECT path FROM checkpoints")]
        open_ = "SELECT id FROM sessions WHERE ended IS NULL"
        waiting = "SELECT lane FROM requests WHERE state = 'queued'"
        sql = f"SELECT id, snapshot FROM models WHERE session IN ({open_}) OR id IN ({waiting})"
        return [*paths, *((id, seq) for id, seq in self._all(sql))]

    def knows_places(self) -> bool:
        """Whether anything was ever in a folder."""
        return bool(self._all("SELECT 1 FROM models LIMIT 1"))

    def last_sampled(self) -> dict[str, float]:
        """When samples by each path of weights were last asked for; endless where one still waits."""
        sql = (
            "SELECT path, MAX(CASE state WHEN 'queued' THEN 9e99 ELSE asked END) FROM samplers"
            " JOIN requests ON lane = samplers.id WHERE path IS NOT NULL GROUP BY path"
        )
        return dict(self._all(sql))

    def add_sampler(self, row: SamplerRow) -> None:
        """Add a sampling session; one that is there already stays."""
        values = (row.id, row.session, row.owner, row.created, row.path, row.model)
        self._all("INSERT OR IGNORE INTO samplers VALUES (?, ?, ?, ?, ?, ?, 0)", *values)

    def sampler(self, id: str) -> SamplerRow | None:
        """The sampling session with this id."""
        found = self._one("SELECT id, session, owner, created, path, model FROM samplers WHERE id = ?", id)
        return None if found is None else SamplerRow(*found)

    def samplers(self, session: str) -> list[SamplerRow]:
        """All sampling sessions of a session."""
        sql = "SELECT id, session, owner, created, path, model FROM samplers WHERE session = ? ORDER BY created, id"
        return [SamplerRow(*found) for found in self._all(sql, session)]

    def followers_wait(self, model: str) -> bool:
        """Whether a request of a sampler that follows a model waits."""
        lanes = "SELECT id FROM samplers WHERE model = ?"
        return bool(self._all(f"SELECT 1 FROM requests WHERE state = 'queued' AND lane IN ({lanes}) LIMIT 1", model))

    def follow(self, model: str, path: str) -> None:
        """All samplers that follow a model have new weights."""
        self._all("UPDATE samplers SET path = ? WHERE model = ?", path, model)

    def join_sampler(self, id: str) -> int:
        """A number for a further client of a sampling session, 1 for the first."""
        with self.together():
            self._all("UPDATE samplers SET clones = clones + 1 WHERE id = ?", id)
            [(clones,)] = self._all("SELECT clones FROM samplers WHERE id = ?", id)
        return int(clones)

    # Requests

    def ask(self, asked: Asked, said: bytes | None = None) -> tuple[Asked, bool, bool]:
        """Put a request on record, unless it is. Returns the one on record, whether it is the same, and whether it is
        new. `said`: by which one that comes again is known; None: its body."""
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
        """The request with this id."""
        found = self._one(f"{_REQUEST} WHERE id = ?", id)
        return None if found is None else Asked(*found)

    def queued(self) -> Iterator[Asked]:
        """All requests that wait, in the order in which they came; one is in memory at a time."""
        for (id,) in self._all("SELECT id FROM requests WHERE state = 'queued' ORDER BY asked, seq"):
            if (found := self.request(id)) is not None:
                yield found

    def settled(self, lane: str, after: int, kinds: Iterable[str]) -> list[Asked]:
        """The requests of a model, of some kinds, that were settled and come after one of them, in order."""
        rows = self._all(f"{_REQUEST} WHERE lane = ? AND seq > ? AND state != 'queued' ORDER BY seq", lane, after)
        return [asked for asked in (Asked(*found) for found in rows) if asked.kind in kinds]

    def next_seq(self, lane: str) -> int | None:
        """The first number of a model that is not settled, counted from the last settled one; None if none is."""
        [(last,)] = self._all("SELECT MAX(seq) FROM requests WHERE lane = ? AND state != 'queued'", lane)
        return None if last is None else int(last) + 1

    def last_asked(self, lane: str) -> float | None:
        """When the newest request of a model came."""
        [(found,)] = self._all("SELECT MAX(asked) FROM requests WHERE lane = ?", lane)
        return None if found is None else float(found)

    def begin(self, id: str) -> int:
        """Say that a request is computed now; how often it was begun and not ended, this time included."""
        with self.together():
            self._all("INSERT INTO begun VALUES (?, 1) ON CONFLICT (id) DO UPDATE SET times = times + 1", id)
            [(times,)] = self._all("SELECT times FROM begun WHERE id = ?", id)
        return int(times)

    def pause(self, id: str) -> None:
        """Say that a request that was begun is not computed now: others have their turn."""
        self._all("UPDATE begun SET times = times - 1 WHERE id = ?", id)

    def none_computed(self) -> None:
        """Say that no request is computed now: the server ends as it should."""
        self._all("DELETE FROM begun")

    def settle(
        self, id: str, state: str, result: bytes, form: str, *, proof: str = "", keep_body: bool = False
    ) -> None:
        """Say what became of a request. The first word counts."""
        with self.together():
            self._place += 1
            body = "" if keep_body else ", body = NULL"
            sql = f"UPDATE requests SET state = ?, result = ?, form = ?, place = ?, proof = ?{body}"
            self._all(f"{sql} WHERE id = ? AND state = 'queued'", state, result, form, self._place, proof, id)
            self._all("DELETE FROM begun WHERE id = ?", id)

    def settled_after(self, lane: str, place: int, first: int, last: int) -> list[tuple[str, str, int, int]]:
        """Id, state, bytes of the result and place of the requests of a sampler with numbers from `first` to `last`
        that were settled after `place`."""
        sql = (
            "SELECT id, state, LENGTH(result), place FROM requests"
            " WHERE lane = ? AND place > ? AND seq BETWEEN ? AND ? ORDER BY place"
        )
        return [(id, state, size or 0, at) for id, state, size, at in self._all(sql, lane, place, first, last)]

    def fetched(self, id: str) -> None:
        """Say that a client has a result."""
        self._all("INSERT OR IGNORE INTO fetched VALUES (?, ?)", id, now())

    def forget_results(self, lane: str, ids: Iterable[str]) -> None:
        """Drop results that their client has."""
        with self.together():
            for id in ids:
                self._all(
                    "UPDATE requests SET state = 'forgotten', result = NULL, body = NULL"
                    " WHERE id = ? AND lane = ? AND state IN ('done', 'failed')",
                    id,
                    lane,
                )

    # Checkpoints

    def add_checkpoint(self, row: CheckpointRow) -> None:
        """Add a checkpoint, or replace the one of its path."""
        values = (row.path, row.model, row.owner, row.kind, row.name, row.created, row.size, row.public)
        self._all(
            "INSERT OR REPLACE INTO checkpoints VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            *values,
            row.expires,
            row.request,
            row.body,
        )

    def checkpoint(self, path: str) -> CheckpointRow | None:
        """The checkpoint of this path, expired ones too."""
        found = self._one(f"{_CHECKPOINT} WHERE path = ?", path)
        return None if found is None else CheckpointRow(*found)

    def checkpoints(self, *, owner: str | None = None, model: str | None = None) -> list[CheckpointRow]:
        """The checkpoints of an owner, or of a model, or all of them; the newest first."""
        where, values = ("owner = ?", owner) if owner is not None else ("model = ?", model)
        if values is None:
            return [CheckpointRow(*found) for found in self._all(f"{_CHECKPOINT} ORDER BY created DESC")]
        return [
            CheckpointRow(*found) for found in self._all(f"{_CHECKPOINT} WHERE {where} ORDER BY created DESC", values)
        ]

    def change_checkpoint(self, path: str, *, public: bool | None = None, expires: float | None = None) -> None:
        """Change who may read a checkpoint, or with `public` None until when it is kept."""
        if public is None:
            self._all("UPDATE checkpoints SET expires = ? WHERE path = ?", expires, path)
        else:
            self._all("UPDATE checkpoints SET public = ? WHERE path = ?", public, path)

    def drop_checkpoint(self, path: str) -> None:
        """Forget a checkpoint."""
        self._all("DELETE FROM checkpoints WHERE path = ?", path)


def encode(value: object) -> bytes:
    """A value as JSON."""
    return msgspec.json.encode(value)
