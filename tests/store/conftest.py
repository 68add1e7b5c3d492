"""Small whole records for the tests of the store."""

import sqlite3
from contextlib import closing
from pathlib import Path

import msgspec
import pytest

from stretto.core.records import Segment
from stretto.store.ledger.reading import last_step, read_batches
from stretto.store.ledger.rows import decode_payload
from stretto.store.ledger.seals import batch_seal, seal
from tests.store.make import Make

_PAYLOADS = """
    SELECT payloads.key, id || '/' || member, verdict, reward, stop_reason, interrupted, payload
    FROM payloads JOIN trajectories USING (key) JOIN groups ON groups.key = group_key
"""


def as_format_2(ledger: Path) -> None:
    """The ledger as format 2 wrote it: payloads of one turn, batches sealed as completions; rows, prompts and the start
    of the run not sealed."""
    batches = list(read_batches(ledger, 0, last_step(ledger)))
    with closing(sqlite3.connect(ledger)) as connection:
        for key, id, *columns, sealed in connection.execute(_PAYLOADS).fetchall():
            payload = decode_payload(id, tuple(columns), sealed)
            [segment] = payload.segments
            tokens = (segment.token_ids, segment.behavior_logprobs, segment.versions)
            body = msgspec.msgpack.encode((*tokens, payload.text))
            old = seal(id, columns, body) + body
            connection.execute("UPDATE payloads SET payload = ? WHERE key = ?", (old, key))
        for batch in batches:
            connection.execute("UPDATE steps SET seal = ? WHERE step = ?", (batch_seal(batch, 2), batch.step))
        connection.commit()
        connection.create_function("seal", -1, seal)
        connection.executescript(
            "ALTER TABLE trajectories DROP COLUMN seal; ALTER TABLE steps DROP COLUMN row_seal;"
            "UPDATE groups SET seal = seal(id, prompt_id, admitted_version);"
            "DELETE FROM meta WHERE name IN ('recipe', 'start', 'canary'); DROP TABLE calls; PRAGMA user_version = 2;"
        )


def old_fields(segment: Segment) -> tuple[object, ...]:
    """The nine fields of a segment before format 6."""
    tokens = (segment.token_ids, segment.behavior_logprobs, segment.versions)
    return (*tokens, *msgspec.structs.astuple(segment)[4:])


def as_format_3(ledger: Path) -> None:
    """The ledger as format 3 wrote it: segments have five fields, and do not name their engines."""
    batches = list(read_batches(ledger, 0, last_step(ledger)))
    with closing(sqlite3.connect(ledger)) as connection:
        connection.create_function("seal", -1, seal)
        for key, id, *columns, sealed in connection.execute(_PAYLOADS).fetchall():
            payload = decode_payload(id, tuple(columns), sealed)
            body = msgspec.msgpack.encode(([old_fields(segment)[:5] for segment in payload.segments], payload.text))
            old = seal(id, columns, body) + body
            connection.execute("UPDATE payloads SET payload = ? WHERE key = ?", (old, key))
        for batch in batches:
            connection.execute("UPDATE steps SET seal = ? WHERE step = ?", (batch_seal(batch, 3), batch.step))
        connection.execute(
            "UPDATE steps SET row_seal = seal(step, version, oldest_trainable, trajectories, trained_tokens,"
            " masked_tokens, staleness, batch, committed, seal)"
        )
        connection.commit()
        connection.executescript("DROP TABLE calls; PRAGMA user_version = 3;")


@pytest.fixture
def make() -> Make:
    return Make()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Of a ledger that is not there yet."""
    return tmp_path / "ledger.sqlite"
