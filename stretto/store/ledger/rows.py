"""What the ledger writes, row by row; and what it keeps in memory of a trajectory that is not final."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import msgspec

from stretto.core.errors import BoundViolated, StoreError
from stretto.core.records import Batch, Record, State, Trajectory, Update
from stretto.store.ledger.seals import SIZE, batch_seal, check, seal

#: Which state may follow which; the four that are not keys are final.
ALLOWED: Mapping[State, frozenset[State]] = {
    State.IN_FLIGHT: frozenset({State.BUFFERED, State.FILTERED, State.EXPIRED, State.FAILED}),
    State.BUFFERED: frozenset({State.TRAINED, State.FILTERED, State.EXPIRED, State.FAILED}),
}


class Payload(Record, frozen=True, array_like=True):
    """What the model wrote: the bulk of a trajectory."""

    token_ids: tuple[int, ...]
    behavior_logprobs: tuple[float, ...]
    versions: tuple[int, ...]
    text: str


class PartialRow(Record, frozen=True, array_like=True):
    """A piece of an answer in flight; `stop_reason` where it is the last one and the answer waits for its siblings."""

    token_ids: tuple[int, ...]
    behavior_logprobs: tuple[float, ...]
    versions: tuple[int, ...]
    interrupted: int = 0
    stop_reason: str | None = None


_PAYLOAD_ENCODER = msgspec.msgpack.Encoder()
_PAYLOAD_DECODER = msgspec.msgpack.Decoder(Payload)
_PARTIAL_DECODER = msgspec.msgpack.Decoder(PartialRow)


def encode_payload(trajectory: Trajectory) -> bytes:
    """A seal and what it seals: the payload, and the columns of the answer's row that a run goes on from."""
    completion, verdict = trajectory.completion, trajectory.verdict
    body = _PAYLOAD_ENCODER.encode(
        Payload(
            token_ids=completion.token_ids,
            behavior_logprobs=completion.behavior_logprobs,
            versions=completion.versions,
            text=trajectory.text,
        )
    )
    columns = (verdict.outcome.value, verdict.reward, completion.stop_reason.value, completion.interrupted)
    return seal(trajectory.id, columns, body) + body


def decode_payload(id: str, columns: tuple[object, ...], sealed: bytes) -> Payload:
    """The payload of an answer; `columns` are its outcome, reward, stop reason and interruptions.

    Raises:
        StoreError: it is not what was written.
    """
    body = sealed[SIZE:]
    check(sealed[:SIZE], seal(id, columns, body), f"the answer {id}")
    return _PAYLOAD_DECODER.decode(body)


def encode_partial(id: str, partial: PartialRow) -> bytes:
    """A seal and what it seals."""
    body = _PAYLOAD_ENCODER.encode(partial)
    return seal(id, body) + body


def decode_partial(id: str, sealed: bytes) -> PartialRow:
    """A piece of an answer in flight.

    Raises:
        StoreError: it is not what was written.
    """
    body = sealed[SIZE:]
    check(sealed[:SIZE], seal(id, body), f"a piece of the answer {id}")
    return _PARTIAL_DECODER.decode(body)


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
        completion, verdict = trajectory.completion, trajectory.verdict
        versions = completion.versions
        self.finished = True
        self._answer = (
            verdict.outcome.value,
            verdict.reward,
            completion.stop_reason.value,
            len(completion.token_ids),
            versions[0] if versions else None,
            versions[-1] if versions else None,
            completion.interrupted,
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
            by_version.update(trajectory.completion.versions)
    staleness = {batch.version - version: count for version, count in sorted(by_version.items()) if version >= oldest}
    if any(age < 0 for age in staleness):
        raise BoundViolated(f"batch {batch.step} holds tokens newer than its version {batch.version}")
    membership = [(group.id, [t.completion.member for t in group.trajectories]) for group in batch.groups]
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
    sealed = batch_seal(batch)
    return (*columns, None, None, sealed, seal(*columns, sealed))


def update_columns(update: Update) -> tuple[object, ...]:
    """The part of a row of ``steps`` that is known after the update; the step comes last."""
    return (update.version, msgspec.json.encode(update.metrics).decode(), update.step)
