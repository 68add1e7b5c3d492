"""Small whole records for the tests of the store."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import msgspec
import pytest

from stretto.core.records import (
    Batch,
    Completion,
    Group,
    Outcome,
    Prompt,
    StopReason,
    Trajectory,
    Update,
    Verdict,
    trajectory_id,
)
from stretto.store.ledger.reading import last_step, read_batches
from stretto.store.ledger.rows import decode_payload
from stretto.store.ledger.seals import batch_seal, seal

_PAYLOADS = """
    SELECT payloads.key, id || '/' || member, verdict, reward, stop_reason, interrupted, payload
    FROM payloads JOIN trajectories USING (key) JOIN groups ON groups.key = group_key
"""
PROMPT = Prompt(id="17", token_ids=(5, 12, 8, 13), text="3+8=", answer="11")


class Make:
    """Builds records whose unimportant parts are always the same."""

    prompt = PROMPT

    @staticmethod
    def trajectory(group: str, member: int = 0, versions: Sequence[int] = (0, 0), right: bool = True) -> Trajectory:
        completion = Completion(
            request=group,
            member=member,
            token_ids=tuple(range(4, 4 + len(versions))),
            behavior_logprobs=tuple(-0.25 * (t + 1) for t in range(len(versions))),
            versions=tuple(versions),
            stop_reason=StopReason.STOP,
            interrupted=len(set(versions)) - 1 if versions else 0,
        )
        outcome = Outcome.RIGHT if right else Outcome.WRONG
        verdict = Verdict(outcome=outcome, reward=1.0 if right else 0.0)
        return Trajectory(id=trajectory_id(group, member), segments=(completion.segment,), verdict=verdict, text="11")

    @staticmethod
    def group(name: str, *trajectories: Trajectory, admitted_version: int = 0) -> Group:
        return Group(id=name, prompt=PROMPT, admitted_version=admitted_version, trajectories=trajectories)

    @staticmethod
    def batch(step: int, *groups: Group, version: int | None = None, oldest_trainable: int = 0) -> Batch:
        at = step - 1 if version is None else version
        return Batch(step=step, version=at, groups=groups, oldest_trainable=oldest_trainable)

    @staticmethod
    def update(step: int) -> Update:
        return Update(step=step, version=step, trained_tokens=4, masked_tokens=0, metrics={"loss": 0.5})


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
            "DELETE FROM meta WHERE name IN ('recipe', 'start'); PRAGMA user_version = 2;"
        )


@pytest.fixture
def make() -> Make:
    return Make()
