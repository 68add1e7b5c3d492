"""Rows of the ledger's tables: their encoding, the rows of unfinished trajectories in memory, and the highest number
of groups in flight.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import msgspec

from stretto.core.admission import BoundChange, loss_tokens
from stretto.core.errors import BoundViolated, StoreError
from stretto.core.records import Batch, Record, Segment, State, StopReason, Trajectory, Update
from stretto.core.states import ALLOWED
from stretto.store.ledger.seals import SIZE, batch_seal, check, find_fact, seal
from stretto.store.totals import OnRecord

_Old = tuple[
    tuple[int, ...],
    tuple[float, ...],
    tuple[int, ...],
    int,
    StopReason | None,
    tuple[tuple[str, int], ...],
    int | None,
    str,
    float | None,
]
_FURTHER = (0, None, (), None, "", None)  # defaults of the fields that the oldest formats do not have


def segment_of(parts: Sequence[Any]) -> Segment:
    """Build a segment from `parts`, its recorded fields in order: with packed tokens, or with one list per column, as
    before format 6. A resumed run may have both.

    Raises:
        msgspec.ValidationError, ValueError: the fields do not form a segment.
    """
    if parts and isinstance(parts[0], bytes):
        return msgspec.convert(parts, Segment)
    return Segment.of(*msgspec.convert([*parts, *_FURTHER[len(parts) - 3 :]], _Old))


class Payload(Record, frozen=True, array_like=True):
    """Bulk data of a judged trajectory, as encoded in the table ``payloads``. `text`: of its completion. `rewards`: if
    there are several, the value of each, by name. `session`: name of its agent's session; "": none. Before format 5
    the record ended with `text`."""

    segments: tuple[Segment, ...]
    text: str
    rewards: Mapping[str, float] = {}  # with several rewards: the value of each, by name
    session: str = ""  # name of the agent's session; "": none


class BatchMember(Record, frozen=True, array_like=True):
    """A group of a batch, with the numbers of its members that are trained on. `oldest_trainable` (oldest version whose
    tokens are trained on) is present only if it differs from that of the step.

    As JSON: ``["0.17.0", [0, 1, 3]]`` or ``["0.18.0", [0, 1, 2, 3], 6]``.
    """

    group: str
    members: list[int]
    oldest_trainable: int | None = None


class Balance(Record, frozen=True):
    """Number of trajectories by state.

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
_MASKED = 5  # index of the column ``masked_tokens`` in the table ``steps``


def encode_payload(trajectory: Trajectory) -> bytearray:
    """Encode the payload of a judged trajectory, with a checksum in front (for `decode_payload`). The checksum also
    covers outcome, reward, stop reason and number of interruptions, which are columns of the row."""
    verdict = trajectory.verdict
    columns = (verdict.outcome, verdict.reward, trajectory.stop_reason, trajectory.interrupted)
    body = _ENCODER.encode(Payload(trajectory.segments, trajectory.text, verdict.rewards, trajectory.session))
    return bytearray().join((seal(trajectory.id, columns, body), body))


def decode_payload(id: str, columns: tuple[object, ...], sealed: bytes | bytearray) -> Payload:
    """Decode the payload of the trajectory `id`. `columns`: its outcome, reward, stop reason and interruptions, from
    its row. `sealed`: as from `encode_payload`.

    A payload of format 2 is ``[token_ids, behavior_logprobs, versions, text]``. It becomes one segment with the stop
    reason and interruptions of the columns.

    Raises:
        StoreError: the checksum does not match: payload or columns are damaged.
    """
    body = sealed[SIZE:]
    check(sealed[:SIZE], seal(id, columns, body), f"trajectory {id}")
    parts = msgspec.msgpack.decode(body, type=list[Any])
    if not isinstance(parts[1], str):  # format 2
        *columns_of_tokens, text = parts
        _, _, stop_reason, interrupted = columns
        parts = [[[*columns_of_tokens, interrupted, stop_reason]], text]
    return msgspec.convert([[segment_of(segment) for segment in parts[0]], *parts[1:]], Payload)


_INSERT_ROW = "INSERT INTO trajectories VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"
_INSERT_ISSUED = """
    INSERT INTO trajectories VALUES (?, ?, ?, 'in_flight', '', NULL, NULL, NULL, NULL, 0, NULL, NULL, 0, ?)
"""
_UPDATE_ROW = """
    UPDATE trajectories SET state = ?, reason = ?, trained_step = ?, verdict = ?, reward = ?, stop_reason = ?,
        tokens = ?, oldest_version = ?, newest_version = ?, interrupted = ?, seal = ? WHERE key = ?
"""
_UPDATE_UNTRAINED = _UPDATE_ROW.replace(" trained_step = ?,", "")


class LiveRow(msgspec.Struct, eq=False, gc=False):
    """Row of a trajectory that is in flight or buffered. The ledger keeps such rows in memory; a flush writes the
    changed ones to the file. `in_file`: the file has the row, in this or an earlier state. `finished`: it is judged;
    `tokens`: number of sampled ones, 0 before that. `journaled`: place of its next piece in ``partials``. `calls`:
    number of its next call; `open_calls`: calls without a recorded reply, and whether each is durable."""

    key: int  # of the row in the table ``trajectories``
    group_key: int  # of its group's row in the table ``groups``
    member: int  # number in the group, from 0
    state: State = State.IN_FLIGHT
    reason: str = ""
    trained_step: int | None = None
    finished: bool = False  # the completion has ended and is judged
    journaled: int = 0  # `begin` of the next piece in the table ``partials``
    calls: int = 0  # number of the next call
    open_calls: dict[int, bool] = {}  # calls without a recorded end: whether each is durable (each row has its own)
    tokens: int = 0  # number of sampled tokens; 0 before `finish`
    in_file: bool = False  # the file has the row, in this or an earlier state
    _outcome: tuple[object, ...] = (None, None, None, 0, None, None, 0)

    def move(self, state: State, reason: str = "") -> None:
        """Change the state to `state`. `reason`: why, for readers of the run; "": nothing to say. Raises StoreError if
        a trajectory in the present state cannot enter `state`; names both."""
        if state not in ALLOWED.get(self.state, ()):
            raise StoreError(f"trajectory {self.key} is {self.state} and cannot become {state}")
        self.state, self.reason = state, reason

    def finish(self, trajectory: Trajectory) -> None:
        """Set verdict, reward, stop reason, sampled tokens, versions and interruptions from the judged trajectory; from
        now on `finished` is True."""
        verdict, stop_reason = trajectory.verdict, trajectory.stop_reason
        tokens, oldest, newest, interrupted = _sampled(trajectory.segments)
        self.finished = True
        ended = str(stop_reason) if stop_reason is not None else None
        self.tokens = tokens
        self._outcome = (str(verdict.outcome), verdict.reward, ended, tokens, oldest, newest, interrupted)

    def columns(self) -> tuple[object, ...]:
        """Values of the row in the column order of the table ``trajectories``, checksum included."""
        head = (self.key, self.group_key, self.member, str(self.state), self.reason, self.trained_step)
        columns = head + self._outcome
        return (*columns, bytearray(seal(*columns)))

    def written(self) -> tuple[str, tuple[object, ...]]:
        """The statement that writes the row to the file, and its parameters; from now on `in_file` is True."""
        columns, before = self.columns(), self.in_file
        self.in_file = True
        # Python's module looks for an adapter of each None and each bytes, a third of the time of a row: so bytearrays,
        # and statements that pass no None.
        if before and self.trained_step is None:
            return _UPDATE_UNTRAINED, (*columns[3:5], *columns[6:], self.key)
        if before:
            return _UPDATE_ROW, (*columns[3:], self.key)
        issued = self.state is State.IN_FLIGHT and not self.finished
        return (_INSERT_ISSUED, (*columns[:3], columns[-1])) if issued else (_INSERT_ROW, columns)

    @classmethod
    def restored(cls, columns: tuple[object, ...]) -> LiveRow:
        """Restore a live row from its `columns`, in the order of the table ``trajectories``; `journaled` and the calls
        keep their defaults. Raises StoreError if the row is damaged: the checksum does not match."""
        key, group_key, member, state, reason, _, *outcome, sealed = columns
        check(sealed, seal(*columns[:-1]), f"row {key} of trajectories")
        assert isinstance(key, int)
        assert isinstance(group_key, int)
        assert isinstance(member, int)
        tokens, finished = outcome[3], outcome[0] is not None
        assert isinstance(tokens, int)
        row = cls(key, group_key, member, State(str(state)), str(reason), None, finished, tokens=tokens, in_file=True)
        row._outcome = tuple(outcome)
        return row


def _sampled(segments: Sequence[Segment]) -> tuple[int, int | None, int | None, int]:
    """Return (number of sampled tokens, oldest version that sampled one, newest such version, number of
    interruptions). Both versions are None if no token was sampled."""
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


#: Name of the fact with the counts of a `Tally`. It is written in one transaction with each change that it counts, so
#: that a resume need not read a long run again. A name of one word could be that of a fact of a user's loop.
COUNTED = "counts of trajectories"
_OPEN = (State.IN_FLIGHT, State.BUFFERED)


class _Counted(Record, frozen=True):
    next_key: int  # of the next group
    oldest: int  # no trajectory with a smaller key is in flight or buffered
    states: Mapping[str, int]
    tokens: OnRecord
    settled: int
    keep_payloads: str  # as which `settled` holds


def oldest_unfinished(facts: Iterable[tuple[str, str, object]], path: Path) -> int:
    """Return a key below which no trajectory is in flight or buffered; 0 if none is on record. `facts`: rows of the
    table ``meta`` of the ledger at `path`. Raises StoreError if one is damaged."""
    found = find_fact(facts, path, COUNTED, _Counted)
    return 0 if found is None else found.oldest


class Tally:
    """Running counts of a ledger's trajectories by state (`states`), and of their sampled tokens (`on_record`). Masked
    tokens of trained trajectories count as masked, not as trained. `settled`: groups with smaller keys have nothing
    left to delete (`Ledger.forget`)."""

    def __init__(self, states: Mapping[str, int], tokens: OnRecord, settled: int = 0) -> None:
        """Begin with the counts of the file, when it was opened."""
        self.states = Counter({State(state): count for state, count in states.items()})
        self._counts: Counter[str] = Counter(msgspec.structs.asdict(tokens))
        self.settled = settled

    @classmethod
    def restored(
        cls,
        facts: Iterable[tuple[str, str, object]],
        path: Path,
        next_key: int,
        live: Iterable[LiveRow],
        keep_payloads: str,
    ) -> Self | None:
        """Continue the counts in `facts`, rows of the table ``meta`` of the ledger at `path`. None if there are none,
        or if the ledger has changed since: an earlier version of stretto, which does not count, has gone on with it.
        The other arguments are those of `fact`, as they are now. Raises StoreError if a fact is damaged.

        Without a new group no trajectory comes to be in flight, and none to be buffered that was not in flight. So each
        change shows in the next key and in the numbers of these."""
        found, now = find_fact(facts, path, COUNTED, _Counted), Counter(row.state for row in live)
        if found is None or found.next_key != next_key:
            return None
        if any(found.states.get(state.value, 0) != now[state] for state in _OPEN):
            return None
        return cls(found.states, found.tokens, found.settled if found.keep_payloads == keep_payloads else 0)

    def fact(self, next_key: int, live: Iterable[LiveRow], keep_payloads: str) -> object:
        """Return the value of the fact `COUNTED`. `next_key`: of the next group; `live`: the trajectories that are in
        flight or buffered, in the order of their keys; `keep_payloads`: the recipe's."""
        oldest = next((row.key for row in live), next_key)
        states = {state.value: count for state, count in self.states.items()}
        return _Counted(next_key, oldest, states, self.on_record, self.settled, keep_payloads)

    def moved(self, row: LiveRow, before: State, tokens_before: int) -> None:
        """Count the trajectory of `row`, and its tokens, under its new state; call this after each change of a state.

        `before`: the previous state; `tokens_before`: `row.tokens` at that time, which are no longer counted there. A
        trajectory without a verdict is also counted as one more in ``expired_unjudged`` or ``failed_unjudged``.
        """
        self.states[before] -= 1
        self.states[row.state] += 1
        counts = self._counts
        counts[before] -= tokens_before
        counts[row.state] += row.tokens
        if not row.finished:
            counts[f"{row.state}_unjudged"] += 1

    def trained(self, step: tuple[object, ...]) -> None:
        """Count the masked tokens of a trained step as masked, not as trained. `step`: columns from `step_columns`."""
        masked = step[_MASKED]
        assert isinstance(masked, int)
        self._counts["trained"] -= masked
        self._counts["masked"] += masked

    @property
    def on_record(self) -> OnRecord:
        return OnRecord(**{name: self._counts[name] for name in OnRecord.__struct_fields__})


def step_columns(batch: Batch, committed: float) -> tuple[object, ...]:
    """Return the columns of the table ``steps``, in order, for a batch that is about to be trained on; those of the
    update are None. The columns include the staleness histogram of the batch's tokens. `committed`: time of the commit
    (`time.time`).

    Raises:
        BoundViolated: a token was sampled by a version newer than the one that is trained (`batch.version`).
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
    """Return the columns of the table ``steps`` that are known after the update: (published version, metrics as JSON,
    step number)."""
    return (update.version, msgspec.json.encode(update.metrics).decode(), update.step)


#: Name of the fact: a list with ``[key, most]`` for each stretch between two changes of a bound. `key`: of the first
#: group in it. `most`: highest number of groups in flight when one of its groups was issued.
IN_FLIGHT = "in_flight"


class MostInFlight:
    """Counts groups in flight; keeps the highest number for each stretch between two changes of a bound (the fact
    `IN_FLIGHT`)."""

    def __init__(
        self,
        facts: Iterable[tuple[str, str, object]],
        path: Path,
        rows: Iterable[LiveRow],
        changes: Sequence[BoundChange] = (),
    ) -> None:
        """Continue the count of an existing ledger. `facts`: rows of its table ``meta``; `path`: of the ledger, for
        messages; `rows`: its trajectories that are in flight or buffered; `changes`: of its bounds. Raises StoreError
        if a fact is damaged."""
        self._stretches = find_fact(facts, path, IN_FLIGHT, list[tuple[int, int]]) or []
        self._members = Counter(row.group_key for row in rows if row.state is State.IN_FLIGHT)
        self._begins = not self._stretches or any(self._stretches[-1][0] < change.key for change in changes[-1:])

    def changed(self) -> None:
        """Begin a new stretch with the next group: a bound has changed."""
        self._begins = True

    def issued(self, key: int, members: int) -> dict[str, str]:
        """Count one more group in flight. Returns ``{IN_FLIGHT: JSON of the fact}`` for the table ``meta`` if this is
        the highest number since a bound last changed, else an empty dict. `key`: of the group; `members`: number of its
        trajectories."""
        self._members[key] = members
        if self._begins:
            self._stretches.append((key, 0))
            self._begins = False
        first, most = self._stretches[-1]
        if len(self._members) <= most:
            return {}
        self._stretches[-1] = first, len(self._members)
        return {IN_FLIGHT: msgspec.json.encode(self._stretches).decode()}

    def moved(self, row: LiveRow, before: State) -> None:
        """Update the count after the trajectory of `row` has left the state `before`. A group is no longer in flight
        once all its members have left that state."""
        if before is State.IN_FLIGHT:
            self._members[row.group_key] -= 1
            if not self._members[row.group_key]:
                del self._members[row.group_key]
