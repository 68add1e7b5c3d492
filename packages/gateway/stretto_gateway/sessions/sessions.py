"""Sessions of a gateway, by key and by id. A gateway without a run records them in a folder.

    FOLDER/ID.jsonl    one record a line: the opening, pieces of segments, calls and their replies, rewards, the end

A record is written before the session changes, and the client gets its reply after both. After a kill, a new process
reads the files, drops an incomplete last line, and restores every session. One that cannot be restored is set aside:
its file stays as it is, its key is that of an ended session, and the others go on.
"""

from __future__ import annotations

import os
import secrets
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol

import msgspec

from stretto.core.errors import UNREADABLE, Problem, RunFolderError, StoreError
from stretto.core.events import RecordedCall
from stretto.core.forest import parent_of
from stretto.core.records import NOTHING, Record, Segment, derive_seed
from stretto.store.ledger.rows import segment_of
from stretto_gateway.model import ServedModel
from stretto_gateway.requests import NotServed
from stretto_gateway.sessions.agent_session import AgentSession, GivenRewards
from stretto_workflows.session import Sampler, Session, SessionRecord, joined_pieces

_SECRET_BYTES = 18
_SHOWN = 64  # ended sessions that are kept in memory
_RETIRED = 16_384  # dropped sessions whose keys are remembered, to reply "has ended" in place of "wrong key"
_TAIL = 1 << 16  # bytes at the end of a file in which an end is looked for; one of them is shorter
_IDLE_SECONDS = 3600.0  # without a request, after which a session is ended if a new one needs room


class Host(Protocol):
    """Opens sessions for the gateway, and records their rewards and ends (Protocol)."""

    async def open(self, about: Mapping[str, Any]) -> AgentSession:
        """Open a session for the task `about`.

        Raises:
            NotServed: no session can be opened now.
        """

    async def rewarded(self, session: AgentSession) -> None:
        """Record the rewards of the session (`AgentSession.given`), after one of them was set. Any error means that
        they are not on record."""

    async def ended(self, session: AgentSession) -> None:
        """Record the end of the session. The caller ends it afterwards (`AgentSession.end`). Any error means that it is
        not on record."""


class SessionTable:
    """Sessions of a gateway, by key and id."""

    def __init__(self) -> None:
        self._by_id: dict[str, AgentSession] = {}
        self._by_key: dict[str, AgentSession] = {}
        self._ended: deque[AgentSession] = deque()
        self._dropped: dict[str, str] = {}  # names of dropped sessions by key

    def add(self, session: AgentSession) -> None:
        """Add a session, replacing one with the same id."""
        self._by_id[session.id] = self._by_key[session.key] = session
        self._dropped.pop(session.key, None)

    def retire(self, session: AgentSession) -> None:
        """Note that a session of the table has ended. The last 64 ended sessions stay in the table. Of older ones only
        the keys are remembered, for `dropped`, and only the newest 16,384."""
        self._ended.append(session)
        while len(self._ended) > _SHOWN:
            old = self._ended.popleft()
            if self._by_id.get(old.id) is old:
                del self._by_id[old.id], self._by_key[old.key]
                self.drop(old.key, old.id)

    def drop(self, key: str, id: str) -> None:
        """Remember the key and id of an ended session, for `dropped`; the newest 16,384 are kept."""
        self._dropped[key] = id
        while len(self._dropped) > _RETIRED:
            del self._dropped[next(iter(self._dropped))]

    def of_key(self, key: str) -> AgentSession | None:
        """Session of the table with this API key, open or ended; None if there is none."""
        return self._by_key.get(key)

    def dropped(self, key: str) -> str | None:
        """Id of the ended session with this key that was removed from the table; None if there is none, or it was too
        long ago."""
        return self._dropped.get(key)

    def named(self, id: str) -> AgentSession | None:
        """Session of the table with this id, open or ended; None if there is none."""
        return self._by_id.get(id)

    def open_ones(self) -> list[AgentSession]:
        """List the sessions of the table that have not ended."""
        return [session for session in self._by_id.values() if session.state == "open"]


class _Opened(Record, frozen=True, tag="Opened"):
    """First line of a session's file. `created`: Unix time in seconds; `about`: the task."""

    id: str
    key: str
    created: int
    about: dict[str, Any]


class _Written(Record, frozen=True, tag="Written"):
    node: int
    segment: Segment


class _Began(Record, frozen=True, tag="Began"):
    number: int
    asked: bytes


class _Replied(Record, frozen=True, tag="Replied"):
    number: int
    reply: bytes


class _Rewarded(GivenRewards, frozen=True, tag="Rewarded"):
    pass


class _Ended(Record, frozen=True, tag="Ended"):
    broken: str = ""


#: A line of a session's file: the opening, a piece of a node's segment, a call, the reply to it, all
#: rewards so far, the end.
Line = _Opened | _Written | _Began | _Replied | _Rewarded | _Ended
#: Makes the sampler of a session from its id and its record.
MakeSampler = Callable[[str, SessionRecord], Sampler]


class FolderRecord:
    """Writer of one session's file (satisfies `SessionRecord`)."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def write(self, line: Line) -> None:
        """Append a line to the file, completely or not at all. It survives a kill of the process, but is not synced to
        disk.

        Raises:
            OSError: the line cannot be written, and the file is as before.
        """
        left = memoryview(msgspec.json.encode(line) + b"\n")
        with self._path.open("ab", buffering=0) as file:
            before = os.fstat(file.fileno()).st_size
            try:
                while left:  # on a nearly full disk, `write` may write a part
                    left = left[file.write(left) :]
            except OSError:
                file.truncate(before)
                raise

    def journal(self, node: int, piece: Segment) -> None:
        self.write(_Written(node, piece))

    def begin_call(self, number: int, asked: bytes, durable: bool) -> None:
        self.write(_Began(number, asked))

    def end_call(self, number: int, reply: bytes) -> None:
        self.write(_Replied(number, reply))


class RecordedSessions:
    """Opens and records sessions in a folder, for a gateway without a run (satisfies `Host`)."""

    def __init__(self, folder: Path, model: ServedModel, sampler: MakeSampler, most: int = 4096) -> None:
        """Keep the sessions in `folder`; `load` restores those of earlier processes. `sampler`: makes the sampler of a
        session from its id and record. `most`: limit of open sessions."""
        self._folder, self._model, self._sampler, self._most = folder, model, sampler, most
        self._table = SessionTable()
        self.set_aside: dict[str, str] = {}  # files that are no record of a session, by name, with the reason

    def load(self) -> SessionTable:
        """Restore the sessions of earlier processes from the folder; returns the table, to which the caller adds new
        ones. An incomplete last line is removed from its file. Of ended sessions, the newest 64 are restored; of the
        others, only the keys are read. Files that cannot be restored are named in `set_aside`, with the reason."""
        ended = list[tuple[int, Path]]()
        for path in sorted(self._folder.glob("*.jsonl")):
            with self._setting_aside(path):
                if _has_ended(path):
                    ended.append((path.stat().st_mtime_ns, path))
                elif session := self._restored(path):
                    self._add(session)
        ended.sort()
        for at, (_, path) in enumerate(ended, start=1):
            with self._setting_aside(path):
                if len(ended) - at >= _SHOWN:
                    opened = _opening(path)
                    self._table.drop(opened.key, opened.id)
                elif session := self._restored(path):
                    self._add(session)
        return self._table

    async def open(self, about: Mapping[str, Any]) -> AgentSession:
        """Open a session and create its file. `about`: the task that the client sent, which is recorded. If the limit
        is reached, the session that has been idle for longest, an hour at least, is ended.

        Raises:
            NotServed: the limit is reached, and no session has been idle for an hour.
            OSError: the file cannot be written.
        """
        await self._make_room()
        opened = _Opened(new_key(), new_key(), int(time.time()), {**about})
        path = self._folder / f"{opened.id}.jsonl"
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))  # private, because it holds the key
        FolderRecord(path).write(opened)
        return self._of_lines(path, [opened])

    async def rewarded(self, session: AgentSession) -> None:
        FolderRecord(self._folder / f"{session.id}.jsonl").write(_Rewarded(**msgspec.structs.asdict(session.given)))

    async def ended(self, session: AgentSession) -> None:
        FolderRecord(self._folder / f"{session.id}.jsonl").write(_Ended(session.broken))
        self._table.retire(session)

    async def _make_room(self) -> None:
        found, since = self._table.open_ones(), time.monotonic() - _IDLE_SECONDS
        if len(found) < self._most:
            return
        idle = [session for session in found if session.asked_at <= since and not session.busy]
        if not idle:
            raise NotServed(429, f"sessions: another one; at most {self._most:,} are open at once", "sessions")
        oldest = min(idle, key=lambda session: session.asked_at)
        await self.ended(oldest)
        oldest.end()

    def _add(self, session: AgentSession) -> None:
        self._table.add(session)
        if session.state == "ended":
            self._table.retire(session)

    @contextmanager
    def _setting_aside(self, path: Path) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # whatever one file holds, the other sessions go on
            self.set_aside[path.name] = str(error) or type(error).__name__
            with suppress(Exception):  # without an opening, nobody can know its key
                opened = _opening(path)
                self._table.drop(opened.key, opened.id)

    def _restored(self, path: Path) -> AgentSession | None:
        """Restore the session of a file, and cut off an incomplete last line; None if the file has no whole line."""
        lines, size = _read(path)
        if not lines:
            return None
        found = self._of_lines(path, lines)
        if size < path.stat().st_size:
            os.truncate(path, size)
        return found

    def _of_lines(self, path: Path, lines: list[Line]) -> AgentSession:
        opened = lines[0]
        if not isinstance(opened, _Opened):
            raise RunFolderError([Problem(f"{path}:1", "is not the beginning of a session", "give another folder")])
        record, calls = FolderRecord(path), _calls(path, lines)
        segments = _segments(line for line in lines if isinstance(line, _Written))
        sampler, seed = self._sampler(opened.id, record), derive_seed(opened.key)
        session = Session(opened.id, (), seed, sampler, record, segments, calls)
        found = AgentSession(opened.id, opened.key, opened.created, opened.about, session, self._model)
        for line in lines:
            if isinstance(line, _Rewarded):
                found.given = line
        for line in lines:
            if isinstance(line, _Ended):
                found.unanswered.update({b"": line.broken} if line.broken else {})
                found.end()
        return found


def _calls(path: Path, lines: Sequence[Line]) -> list[RecordedCall]:
    """Collect the calls and their replies, by number. A number may be missing: a call that was never recorded began
    nothing. Raises RunFolderError for the reply to a call that is missing."""
    found = dict[int, RecordedCall]()
    for at, line in enumerate(lines, start=1):
        if isinstance(line, _Began):
            found[line.number] = RecordedCall(line.number, line.asked)
        elif isinstance(line, _Replied):
            if line.number not in found:
                raise RunFolderError([Problem(f"{path}:{at}", f"replies to call {line.number}, which is missing")])
            found[line.number].reply = line.reply
    return [found[number] for number in sorted(found)]


def _segments(lines: Iterable[_Written]) -> list[Segment]:
    """Join the recorded pieces to segments, in order. Raises StoreError unless each segment's parent is before it."""
    found = joined_pieces((line.node, line.segment) for line in lines)
    for place in range(len(found)):
        if not NOTHING <= parent_of(found, place) < place:
            raise StoreError(f"segment {place} follows segment {found[place].parent}, which is not before it")
    return found


def _opening(path: Path) -> _Opened:
    """Read the first line of a session's file; msgspec.MsgspecError if it is not an opening."""
    with path.open("rb") as file:
        return msgspec.json.decode(file.readline(), type=_Opened)


def _has_ended(path: Path) -> bool:
    """Whether the last line of a session's file records its end. Only the end of the file is read: False if the last
    line is incomplete or longer than 64 KiB."""
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        file.seek(max(0, size - _TAIL))
        lines = file.read(_TAIL).split(b"\n")
    try:
        return len(lines) > 2 and not lines[-1] and isinstance(msgspec.json.decode(lines[-2], type=Line), _Ended)
    except UNREADABLE:  # a longer line: the whole file is read
        return False


def _read(path: Path) -> tuple[list[Line], int]:
    """Read the whole lines of a session's file; returns them and their bytes. RunFolderError for a malformed line."""
    content = path.read_bytes()
    whole = content[: content.rfind(b"\n") + 1]
    found: list[Line] = []
    for number, line in enumerate(whole.splitlines(), start=1):
        try:
            found.append(_line(line))
        except (KeyError, ValueError, *UNREADABLE) as error:
            raise RunFolderError([Problem(f"{path}:{number}", f"is no record of a session: {error}")]) from None
    return found, len(whole)


def _line(text: bytes) -> Line:
    try:
        line: Line = msgspec.json.decode(text, type=Line)
    except msgspec.ValidationError:
        fields = msgspec.json.decode(text)
        if not isinstance(fields, dict) or fields.get("type") != "Written":
            raise
        line = _Written(msgspec.convert(fields["node"], int), segment_of(fields["segment"]))  # an older format
    return line


def new_key() -> str:
    """Make a random secret, used as a key or an id."""
    return secrets.token_hex(_SECRET_BYTES)
