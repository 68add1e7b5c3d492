"""What the ledger writes, row by row; and what it keeps in memory of a trajectory that is not final."""

from __future__ import annotations

from collections import Counter

import msgspec

from stretto.core.errors import BoundViolated, StoreError
from stretto.core.records import Batch, Record, Segment, State, StopReason, Trajectory, Update
from stretto.core.states import ALLOWED
from stretto.store.ledger.schema import FORMAT
from stretto.store.ledger.seals import SIZE, batch_seal, check, seal


class Payload(Record, frozen=True, array_like=True):
    """The bulk of a trajectory."""

    segments: tuple[Segment, ...]
    text: str


class SingleTurnPayload(Record, frozen=True, array_like=True):
    """A payload of format 2: one segment, whose end is in the row of its trajectory."""

    token_ids: tuple[int, ...]
    behavior_logprobs: tuple[float, ...]
    versions: tuple[int, ...]
    text: str


_ENCODER = msgspec.msgpack.Encoder()
_FIELDS = msgspec.msgpack.Decoder(list[msgspec.Raw])
_PAYLOAD_DECODER = msgspec.msgpack.Decoder(Payload)
_SINGLE_TURN_DECODER = msgspec.msgpack.Decoder(SingleTurnPayload)
_SEGMENT_DECODER = msgspec.msgpack.Decoder(Segment)


def encode_payload(trajectory: Trajectory) -> bytes:
    """A seal and what it seals: the payload, and the columns of the answer's row that a run goes on from."""
    body = _ENCODER.encode(Payload(segments=trajectory.segments, text=trajectory.text))
    return seal(trajectory.id, _sealed_columns(trajectory), body) + body


def _sealed_columns(trajectory: Trajectory) -> tuple[object, ...]:
    verdict = trajectory.verdict
    return verdict.outcome.value, verdict.reward, trajectory.stop_reason, trajectory.interrupted


def decode_payload(id: str, columns: tuple[object, ...], sealed: bytes) -> Payload:
    """The payload of an answer; `columns` are its outcome, reward, stop reason and interruptions.

    Raises:
        StoreError: it is not what was written.
    """
    body = sealed[SIZE:]
    check(sealed[:SIZE], seal(id, columns, body), f"trajectory {id}")
    if len(_FIELDS.decode(body)) == len(Payload.__struct_fields__):
        return _PAYLOAD_DECODER.decode(body)
    old = _SINGLE_TURN_DECODER.decode(body)
    _, _, stop_reason, interrupted = columns
    end = msgspec.convert({"interrupted": interrupted, "stop_reason": stop_reason}, _End)
    segment = Segment(old.token_ids, old.behavior_logprobs, old.versions, end.interrupted, end.stop_reason)
    return Payload(segments=(segment,), text=old.text)


class _End(Record, frozen=True):
    interrupted: int
    stop_reason: StopReason


def encode_piece(id: str, piece: Segment) -> bytes:
    """A seal and what it seals."""
    body = _ENCODER.encode(piece)
    return seal(id, body) + body


def decode_piece(id: str, sealed: bytes) -> Segment:
    """What was sampled of a trajectory in flight, in one piece of several; the last one has a stop reason.

    Raises:
        StoreError: it is not what was written.
    """
    body = sealed[SIZE:]
    check(sealed[:SIZE], seal(id, body), f"a piece of trajectory {id}")
    return _SEGMENT_DECODER.decode(body)


class LiveRow:
    """One trajectory that is in flight or buffered: its row as it is, or will be at the next flush."""

    __slots__ = (
        "_answer",
        "finished",
        "group_key",
        "key",
        "member",
        "reason",
        "state",
        "trained_step",
        "written",
    )

    def __init__(self, key: int, group_key: int, member: int) -> None:
        self.key, self.group_key, self.member = key, group_key, member
        self.state, self.reason = State.IN_FLIGHT, ""
        self.trained_step: int | None = None
        self.finished = False  # it has an answer
        self.written = 0  # tokens of it that are on record as partials
        self._answer: tuple[object, ...] = (None, None, None, 0, None, None, 0)

    def move(self, state: State, reason: str = "") -> None:
        """Change the state.

        Raises:
            StoreError: that state cannot follow; names both.
        """
        if state not in ALLOWED.get(self.state, ()):
            raise StoreError(f"trajectory {self.key} is {self.state} and cannot become {state}")
        self.state, self.reason = state, reason

    def finish(self, trajectory: Trajectory) -> None:
        """Note the answer and its verdict."""
        verdict, versions = trajectory.verdict, trajectory.versions
        self.finished = True
        self._answer = (
            verdict.outcome.value,
            verdict.reward,
            trajectory.stop_reason,
            len(versions),
            versions[0] if versions else None,
            versions[-1] if versions else None,
            trajectory.interrupted,
        )

    def columns(self) -> tuple[object, ...]:
        """In the order of the table ``trajectories``."""
        head = (self.key, self.group_key, self.member, self.state.value, self.reason, self.trained_step)
        columns = head + self._answer
        return (*columns, seal(*columns))

    @classmethod
    def restored(cls, columns: tuple[object, ...]) -> LiveRow:
        """The row that `columns` came from.

        Raises:
            StoreError: they are not what was written.
        """
        key, group_key, member, state, reason, _, *answer, sealed = columns
        check(sealed, seal(*columns[:-1]), f"row {key} of trajectories")
        assert isinstance(key, int)
        assert isinstance(group_key, int)
        assert isinstance(member, int)
        row = cls(key, group_key, member)
        row.state, row.reason = State(str(state)), str(reason)
        row._answer, row.finished = tuple(answer), answer[0] is not None
        return row


def step_columns(batch: Batch, committed: float) -> tuple[object, ...]:
    """The row of table ``steps`` for a batch; the staleness histogram is counted here, once, while it is at hand.

    Raises:
        BoundViolated: a token is newer than the policy that would be trained on it.
    """
    oldest = batch.oldest_trainable
    by_version: Counter[int] = Counter()
    for group in batch.groups:
        for trajectory in group.trajectories:
            by_version.update(trajectory.versions)
    staleness = {batch.version - version: count for version, count in sorted(by_version.items()) if version >= oldest}
    if any(age < 0 for age in staleness):
        raise BoundViolated(f"batch {batch.step} holds tokens newer than its version {batch.version}")
    membership = [(group.id, [t.member for t in group.trajectories]) for group in batch.groups]
    trained = sum(staleness.values())
    columns = (
        batch.step,
        batch.version,
        oldest,
        sum(len(group.trajectories) for group in batch.groups),
        trained,
        by_version.total() - trained,
        msgspec.json.encode(staleness).decode(),
        msgspec.json.encode(membership).decode(),
        committed,
    )
    sealed = batch_seal(batch, FORMAT)
    return (*columns, None, None, sealed, seal(*columns, sealed))


def update_columns(update: Update) -> tuple[object, ...]:
    """The part of a row of ``steps`` that is known after the update; the step comes last."""
    return (update.version, msgspec.json.encode(update.metrics).decode(), update.step)
