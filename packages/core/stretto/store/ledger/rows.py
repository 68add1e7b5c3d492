"""Encoding of the ledger's rows, and in-memory rows of unfinished trajectories."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from stretto.core.admission import loss_tokens
from stretto.core.errors import BoundViolated, StoreError
from stretto.core.records import Batch, Record, Segment, State, Trajectory, Update
from stretto.core.states import ALLOWED
from stretto.measures.goodput import OnRecord
from stretto.store.ledger.old_tokens import segment_of
from stretto.store.ledger.seals import SIZE, batch_seal, check, seal


class Payload(Record, frozen=True, array_like=True):
    """Bulk data of a trajectory; before format 5 it ends with the text."""

    segments: tuple[Segment, ...]
    text: str
    rewards: Mapping[str, float] = {}  # the named parts of its reward
    session: str = ""


class BatchMember(Record, frozen=True, array_like=True):
    """A group of a batch, with the members that are trained on. `oldest_trainable` is given where it differs from the
    step's: ``["0.17.0", [0, 1, 3]]`` or ``["0.18.0", [0, 1, 2, 3], 6]``."""

    group: str
    members: list[int]
    oldest_trainable: int | None = None


class Balance(Record, frozen=True):
    """Trajectories by state.

    Example: ``Balance(trained=512, buffered=24, in_flight=128, filtered=16, failed=1).issued == 681``
    """

    trained: int = 0
    buffered: int = 0
    in_flight: int = 0
    filtered: int = 0
    expired: int = 0
    failed: int = 0

    @property
    def issued(self) -> int:
        return self.trained + self.buffered + self.in_flight + self.filtered + self.expired + self.failed


_ENCODER = msgspec.msgpack.Encoder()
_MASKED = 5  # the place of the masked tokens in a row of table ``steps``


def encode_payload(trajectory: Trajectory) -> bytes:
    """Encode a trajectory's payload with a seal, which also covers its verdict, stop reason and interruptions."""
    verdict = trajectory.verdict
    columns = (verdict.outcome, verdict.reward, trajectory.stop_reason, trajectory.interrupted)
    body = _ENCODER.encode(Payload(trajectory.segments, trajectory.text, verdict.rewards, trajectory.session))
    return seal(trajectory.id, columns, body) + body


def decode_payload(id: str, columns: tuple[object, ...], sealed: bytes) -> Payload:
    """Decode a payload; `columns` are the trajectory's outcome, reward, stop reason and interruptions.

    A payload of format 2 is ``[token_ids, behavior_logprobs, versions, text]``: one segment, which ends as the columns
    say.

    Raises:
        StoreError: the payload is damaged.
    """
    body = sealed[SIZE:]
    check(sealed[:SIZE], seal(id, columns, body), f"trajectory {id}")
    parts = msgspec.msgpack.decode(body, type=list[Any])
    if not isinstance(parts[1], str):  # format 2
        *columns_of_tokens, text = parts
        _, _, stop_reason, interrupted = columns
        parts = [[[*columns_of_tokens, interrupted, stop_reason]], text]
    return msgspec.convert([[segment_of(segment) for segment in parts[0]], *parts[1:]], Payload)


#: Writes the columns of a `LiveRow`.
UPSERT = """
    INSERT INTO trajectories VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)
    ON CONFLICT (key) DO UPDATE SET state = excluded.state, reason = excluded.reason,
        trained_step = excluded.trained_step, verdict = excluded.verdict, reward = excluded.reward,
        stop_reason = excluded.stop_reason, tokens = excluded.tokens, oldest_version = excluded.oldest_version,
        newest_version = excluded.newest_version, interrupted = excluded.interrupted, seal = excluded.seal
"""


class LiveRow:
    """Row of a trajectory in flight or buffered, as the next flush writes it."""

    __slots__ = (
        "_outcome",
        "calls",
        "finished",
        "group_key",
        "journaled",
        "key",
        "member",
        "open_calls",
        "reason",
        "state",
        "trained_step",
    )

    def __init__(self, key: int, group_key: int, member: int) -> None:
        self.key, self.group_key, self.member = key, group_key, member
        self.state, self.reason = State.IN_FLIGHT, ""
        self.trained_step: int | None = None
        self.finished = False  # its completion has ended and is judged
        self.journaled = 0  # where its next piece begins in the table of partials
        self.calls = 0  # the number of its next call
        self.open_calls: dict[int, bool] = {}  # calls without an end, and whether they are flushed
        self._outcome: tuple[object, ...] = (None, None, None, 0, None, None, 0)

    def move(self, state: State, reason: str = "") -> None:
        """Change the state.

        Raises:
            StoreError: the change to `state` is not allowed; names both.
        """
        if state not in ALLOWED.get(self.state, ()):
            raise StoreError(f"trajectory {self.key} is {self.state} and cannot become {state}")
        self.state, self.reason = state, reason

    def finish(self, trajectory: Trajectory) -> None:
        """Note the finished completion and its verdict."""
        verdict, stop_reason = trajectory.verdict, trajectory.stop_reason
        tokens, oldest, newest, interrupted = _sampled(trajectory.segments)
        self.finished = True
        ended = str(stop_reason) if stop_reason is not None else None
        self._outcome = (str(verdict.outcome), verdict.reward, ended, tokens, oldest, newest, interrupted)

    @property
    def tokens(self) -> int:
        """Sampled tokens on record; 0 while in flight."""
        count = self._outcome[3]
        assert isinstance(count, int)
        return count

    def columns(self) -> tuple[object, ...]:
        """Values in the column order of the table ``trajectories``."""
        head = (self.key, self.group_key, self.member, str(self.state), self.reason, self.trained_step)
        columns = head + self._outcome
        return (*columns, seal(*columns))

    @classmethod
    def restored(cls, columns: tuple[object, ...]) -> LiveRow:
        """The row with these `columns`.

        Raises:
            StoreError: the row is damaged.
        """
        key, group_key, member, state, reason, _, *outcome, sealed = columns
        check(sealed, seal(*columns[:-1]), f"row {key} of trajectories")
        assert isinstance(key, int)
        assert isinstance(group_key, int)
        assert isinstance(member, int)
        row = cls(key, group_key, member)
        row.state, row.reason = State(str(state)), str(reason)
        row._outcome, row.finished = tuple(outcome), outcome[0] is not None
        return row


def _sampled(segments: Sequence[Segment]) -> tuple[int, int | None, int | None, int]:
    """Sampled tokens, the oldest and the newest version among them, interruptions."""
    tokens = interrupted = 0
    oldest = newest = None
    for segment in segments:
        interrupted += segment.interrupted
        if stamps := segment.stamps:
            tokens += segment.length
            first, last = stamps[0][0], stamps[-1][0]
            oldest = first if oldest is None else min(oldest, first)
            newest = last if newest is None else max(newest, last)
    return tokens, oldest, newest, interrupted


class TokenTally:
    """Running token counts of a ledger by their fate."""

    def __init__(self, start: OnRecord) -> None:
        self._counts: Counter[str] = Counter(msgspec.structs.asdict(start))

    def moved(self, row: LiveRow, before: State, had: int) -> None:
        """Account for `row`, which was in state `before` with `had` tokens."""
        counts = self._counts
        counts[before] -= had
        counts[row.state] += row.tokens
        if not row.finished:
            counts[f"{row.state}_unjudged"] += 1

    def trained(self, step: tuple[object, ...]) -> None:
        """Account for the masked tokens of a trained step, given the columns of its row."""
        masked = step[_MASKED]
        assert isinstance(masked, int)
        self._counts["trained"] -= masked
        self._counts["masked"] += masked

    @property
    def on_record(self) -> OnRecord:
        return OnRecord(**{name: self._counts[name] for name in OnRecord.__struct_fields__})


def step_columns(batch: Batch, committed: float) -> tuple[object, ...]:
    """The row of table ``steps`` for a batch, with the staleness histogram of its tokens.

    Raises:
        BoundViolated: a token is newer than the policy that would be trained on it.
    """
    staleness = dict(sorted(loss_tokens(batch).items(), reverse=True))  # as they were sampled
    if any(age < 0 for age in staleness):
        raise BoundViolated(f"batch {batch.step} holds tokens newer than its version {batch.version}")
    every = sum(trajectory.sampled_length for group in batch.groups for trajectory in group.trajectories)
    own = batch.oldest_by_group
    membership = [
        (group.id, [t.member for t in group.trajectories], *([own[group.id]] if group.id in own else []))
        for group in batch.groups
    ]
    trained = sum(staleness.values())
    columns = (
        batch.step,
        batch.version,
        batch.oldest_trainable,
        sum(len(group.trajectories) for group in batch.groups),
        trained,
        every - trained,
        msgspec.json.encode(staleness).decode(),
        msgspec.json.encode(membership).decode(),
        committed,
    )
    sealed = batch_seal(batch)
    return (*columns, None, None, sealed, seal(*columns, sealed))


def update_columns(update: Update) -> tuple[object, ...]:
    """Columns of ``steps`` that are known after the update; the step number comes last."""
    return (update.version, msgspec.json.encode(update.metrics).decode(), update.step)
