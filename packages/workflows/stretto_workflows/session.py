"""The session: makes one trajectory, and records its turns and calls so that they survive a crash.

    turn(prompt) ─► find its position ─► recorded ─► returned, or continued after its last token
                                      └─► new      ─► sampled, and recorded meanwhile
    call(asked)  ─► recorded ─► its reply
                └─► new      ─► begin recorded, run, end recorded

Every change is written to the record first and made in memory after it: if the write fails, nothing has happened, and
the next attempt leaves no gap in the record.

After a crash, the workflow or the agent's program is started again from its beginning. Its turns and calls are answered
from the record until it makes one that is not recorded. Records are found by content: the tokens of a prompt, or the
bytes of a call. Each record is used once. If parallel turns have equal prompts, each takes the next recorded turn.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Protocol

import msgspec

from stretto.core.engine import Generate
from stretto.core.errors import CallInterrupted, EngineLost, StoreError
from stretto.core.events import RecordedCall
from stretto.core.forest import Tokens, TurnRequest, parent_of, way_to
from stretto.core.records import NOTHING, PROMPT, GenerateRequest, Sampling, Segment, derive_seed

_ONCE = b"once "  # prefix of the recorded request of a call that is not repeatable


@dataclass(frozen=True)
class Attachment:
    """Position of a turn's prompt in a trajectory's forest of segments. `parent`: index of the segment that ends the
    known part, or PROMPT or NOTHING; `tail`: tokens of the prompt after that part."""

    parent: int
    tail: Tokens


class Forest:
    """The segments of one trajectory, in order of their beginning; segments are only appended. `prompt`: token ids of
    the trajectory's prompt."""

    def __init__(self, prompt: Tokens, segments: Iterable[Segment] = ()) -> None:
        self.prompt = prompt
        self.segments = list(segments)
        self._children: dict[int, list[int]] = {}
        for place in range(len(self.segments)):
            self._children.setdefault(parent_of(self.segments, place), []).append(place)

    def append(self, segment: Segment) -> int:
        """Append a segment, whose `parent` must be set; returns its index."""
        assert segment.parent is not None
        self.segments.append(segment)
        place = len(self.segments) - 1
        self._children.setdefault(segment.parent, []).append(place)
        return place

    def tokens(self, place: int) -> Tokens:
        """Return all tokens on the path to segment `place`: the prompt, if the path begins with it, then those of each
        segment, the last one's own included."""
        behind_prompt, places = way_to(self.segments, place)
        start = self.prompt if behind_prompt else ()
        return sum((self.segments[at].token_ids for at in places), start=start)

    def find(self, tokens: Tokens) -> Attachment:
        """Find the longest known path with which a turn's prompt `tokens` begin: one that ends with a given or finished
        segment, or the trajectory's prompt (PROMPT); NOTHING without any. It may begin with the prompt or without.
        Returns the end of the path and the tokens behind it."""
        starts = [(NOTHING, 0)]
        if self.prompt and tokens[: len(self.prompt)] == self.prompt:
            starts.append((PROMPT, len(self.prompt)))
        parent, at = max((self._deepest(tokens, *start) for start in starts), key=lambda found: found[1])
        return Attachment(parent, tokens[at:])

    def _deepest(self, tokens: Tokens, parent: int, at: int) -> tuple[int, int]:
        best, waiting = (parent, at), [(parent, at)]
        while waiting:
            parent, at = waiting.pop()
            for child in self._children.get(parent, ()):
                segment = self.segments[child]
                end = at + segment.length
                whole = segment.stop_reason is not None or not segment.sampled
                if whole and segment.length and tokens[at:end] == segment.token_ids:
                    waiting.append((child, end))
                    best = (child, end) if end > best[1] else best
        return best


@dataclass(frozen=True)
class Turn:
    """A sampled completion in a session. `node`: index of its segment in the forest.

    Example: ``Turn(node=2, segment=Segment.of(token_ids=(4, 4, 2), ..., stop_reason=StopReason.STOP, parent=1))``
    """

    node: int
    segment: Segment


#: Samples one turn and records its tokens, as `loop.engines.in_flight` does. Returns the whole segment: the tokens of
#: `TurnRequest.prefix`, then the new ones, with parent and cause. Raises EngineLost, RefusedRequest or
#: DeadlineExceeded.
Sampler = Callable[[TurnRequest], Awaitable[Segment]]


class SessionRecord(Protocol):
    """Storage of one session's turns and calls (Protocol). A method that raises has stored nothing."""

    def journal(self, node: int, piece: Segment) -> None:
        """Append the tokens of `piece` to segment `node`. The first piece also sets the segment's parent and cause."""

    def begin_call(self, number: int, asked: bytes, durable: bool) -> None:
        """Record that call `number` begins, with its encoded request. If `durable`, the record is in the file on
        return, and so will be the record of its end."""

    def end_call(self, number: int, reply: bytes) -> None:
        """Record the encoded reply of call `number`."""


class Session:
    """Makes one trajectory: samples its turns, runs its calls, and records both, to replay them after a crash.

    Example::

        session = Session("0.17.0/3", prompt.token_ids, seed, sampler, record)
        first = await session.turn(prompt.token_ids, sampling)
        reply = await session.call(b"calculator 3+8", calculate, repeatable=True)
        history = prompt.token_ids + first.segment.token_ids + tokenize(reply)
        second = await session.turn(history, sampling)
        segments = session.segments()

    Attributes:
        id: trajectory id, or another name.
        forest: all given and sampled segments, including turns that broke off.
        earlier: number of its first segments whose prompts an earlier version of stretto has rendered.
    """

    def __init__(
        self,
        id: str,
        prompt: Tokens,
        seed: int,
        sampler: Sampler,
        record: SessionRecord,
        segments: Sequence[Segment] = (),
        calls: Iterable[RecordedCall] = (),
        earlier: int = 0,
    ) -> None:
        """Open a session.

        Args:
            id: trajectory id, or another name.
            prompt: token ids of the trajectory's prompt.
            seed: seed of the trajectory, from which the seed of each turn is derived.
            sampler: samples a turn and records its tokens.
            record: stores given segments, and calls.
            segments: recorded by an earlier process, by index. A segment without tokens is a turn that had none yet.
            calls: recorded by an earlier process, in order of their numbers; they are copied.
            earlier: see above.
        """
        own = [msgspec.structs.replace(one, parent=parent_of(segments, at)) for at, one in enumerate(segments)]
        self.id, self.forest, self.earlier = id, Forest(prompt, own), earlier
        self._seed, self._sampler, self._record = seed, sampler, record
        self._calls = [RecordedCall(call.number, call.asked, call.reply) for call in calls]
        self._claimed = set[int]()
        self._seeds: dict[int, int] = {}  # node: seed of the turn
        self._asked: Counter[Tokens] = Counter()  # number of turns that began with each prompt
        self._broken: dict[int, Sampling] = {}  # node of a turn that broke off in this process: its sampling settings
        self._turns: dict[Tokens, deque[int]] = {}  # prompt: nodes of recorded turns that were not returned yet
        for node, segment in enumerate(own):
            if segment.sampled or not segment.length:
                prompt = self._before(node)
                self._seed_of(node, prompt)
                self._turns.setdefault(prompt, deque()).append(node)
        self._replies: dict[bytes, deque[RecordedCall]] = {}  # request: recorded calls that were not returned yet
        for call in self._calls:
            self._replies.setdefault(call.asked, deque()).append(call)

    def again(self) -> Session:
        """Return a new session of the same trajectory, for a program that starts again: it returns all turns and calls
        of this one as recorded. No turn or call may be in progress in this session, and it is not used any more."""
        forest = self.forest
        found = Session(
            self.id, forest.prompt, self._seed, self._sampler, self._record, forest.segments, self._calls, self.earlier
        )
        found._broken.update(self._broken)
        return found

    async def turn(self, prompt: Tokens, sampling: Sampling, cause: str = "") -> Turn:
        """Sample one turn after `prompt`, or return a recorded one with this prompt that was not returned yet.

        A turn that breaks off stays recorded. The next call with an equal prompt continues it, unless that call has a
        smaller `max_tokens`, other stop texts, or another grammar. A recorded turn that has ended is returned whatever
        `sampling` is.

        Args:
            prompt: token ids of the whole history.
            cause: why a branch begins with this prompt, for the record; "": none begins.

        Raises:
            EngineLost, DeadlineExceeded: the sampler could not finish the turn.
            RefusedRequest: the sampler refused the turn.
        """
        node = self._recorded(prompt, sampling)
        if node is None:
            node = self._begin(prompt, cause)
        self._claimed.add(node)
        prefix = self.forest.segments[node]
        if prefix.stop_reason is None:
            try:
                least = self._newest_before(node)
                whole = await self._sampler(TurnRequest(node, prompt, sampling, self._seeds[node], prefix, least))
            except BaseException:
                self._claimed.discard(node)
                self._broken[node] = sampling
                self._turns.setdefault(prompt, deque()).appendleft(node)
                raise
            self.forest.segments[node] = msgspec.structs.replace(whole, parent=prefix.parent, cause=prefix.cause)
        return Turn(node, self.forest.segments[node])

    @property
    def calls(self) -> Sequence[RecordedCall]:
        """All calls of the session, an earlier process's too, in the order in which they began; a call without `reply`
        has not ended."""
        return self._calls

    def claim(self, node: int) -> Turn:
        """Return the recorded turn `node`, which a recorded call refers to, and count it as returned.

        Raises:
            StoreError: the turn is not recorded, or has not ended.
        """
        segments = self.forest.segments
        if node >= len(segments) or segments[node].stop_reason is None:
            raise StoreError(f"{self.id}: a reply is on record, and the turn {node} that it tells is not")
        self.pass_over(node)
        self._claimed.add(node)
        return Turn(node, segments[node])

    def waiting(self, prompt: Tokens) -> int | None:
        """Node of the first recorded turn after `prompt` that was not returned yet; None if there is none."""
        return next(iter(self._turns.get(prompt, ())), None)

    def pass_over(self, node: int) -> None:
        """Keep `turn` from returning the recorded turn `node`, because a recorded call refers to it. `claim` still
        returns it."""
        waiting = self._turns.get(self._before(node))
        if waiting and node in waiting:
            waiting.remove(node)

    def take_back(self, node: int) -> None:
        """Count a returned turn as not returned, because it did not reach the program. The next `turn` with its prompt
        returns it."""
        self._claimed.discard(node)
        self._turns.setdefault(self._before(node), deque()).appendleft(node)

    def prefer(self, asked: bytes, own: Callable[[bytes], bool]) -> None:
        """Let the next `call` with the request `asked` return the first recorded reply for which `own` returns True; if
        there is none, the first of all, before calls that have none. `own`: called with an encoded reply."""
        waiting = self._replies.get(asked, deque())
        replied = [(call, call.reply) for call in waiting if call.reply is not None]
        if replied:
            call = next((call for call, reply in replied if own(reply)), replied[0][0])
            waiting.remove(call)
            waiting.appendleft(call)

    async def call(
        self, asked: bytes, run: Callable[[], Awaitable[bytes]], *, repeatable: bool, durable: bool = False
    ) -> bytes:
        """Return the reply to the request `asked`: the recorded one, or else the result of `run`, which is recorded.

        Exceptions of `run` are raised and not recorded. Failures that the program handles belong into the reply.

        Args:
            asked: encoded request, by which a recorded reply is found. Each recorded reply is returned once.
            run: makes the call; returns the encoded reply.
            repeatable: `run` may be called again after a crash. If False, the begin of the call is flushed to the
                ledger before `run` starts, and its end before this returns.
            durable: flush begin and end of a repeatable call too.

        Raises:
            CallInterrupted: the call is not repeatable, and an earlier process began it without recording a reply: it
                may have had its effect. Or `check_calls` finds another interrupted call.
        """
        kept = asked if repeatable else _ONCE + asked
        known = self._replies.get(kept) or self._replies.get(asked)
        if known:
            if known[0].reply is None and not repeatable:
                raise CallInterrupted(self.id, _shown(asked))
            call = known.popleft()
        else:
            if not repeatable:
                self.check_calls()
            call = RecordedCall(self._calls[-1].number + 1 if self._calls else 0, kept)
            self._record.begin_call(call.number, kept, durable=durable or not repeatable)
            self._calls.append(call)
        if call.reply is None:
            reply = await run()
            self._record.end_call(call.number, reply)
            call.reply = reply
        return call.reply

    def check_calls(self) -> None:
        """Check that no interrupted call is left which the program has not requested again.

        Raises:
            CallInterrupted: an earlier process began a call that is not repeatable, without recording a reply. The
                program might now repeat its effect by another call.
        """
        for waiting in self._replies.values():
            for call in waiting:
                if call.reply is None and call.asked.startswith(_ONCE):
                    raise CallInterrupted(self.id, _shown(call.asked.removeprefix(_ONCE)))

    @property
    def returned(self) -> list[int]:
        """Nodes of the ended turns that were returned to the program, in the order in which they began."""
        return sorted(node for node in self._claimed if self.forest.segments[node].stop_reason is not None)

    def segments(self, rewards: Mapping[int, float] | None = None) -> tuple[Segment, ...]:
        """Return the segments of the trajectory: the turns that were returned to the program, and all segments on the
        paths to them. Turns that broke off, or that only an earlier process requested, are left out; `parent` counts
        the segments that are returned.

        `rewards`: rewards of single turns, by node; they replace recorded ones, which stay for turns not in it (None:
        for all).
        """
        kept = set[int]()
        for node in self.returned:
            kept.update(way_to(self.forest.segments, node)[1])
        places = {node: place for place, node in enumerate(sorted(kept))}
        found = []
        for node, place in places.items():
            segment, parent = self.forest.segments[node], parent_of(self.forest.segments, node)
            parent = places.get(parent, parent)
            reward = (rewards or {}).get(node, segment.reward)
            behind = None if parent == place - 1 else parent
            found.append(msgspec.structs.replace(segment, parent=behind, reward=reward))
        return tuple(found)

    def _recorded(self, prompt: Tokens, sampling: Sampling) -> int | None:
        """Take the first recorded turn after `prompt` that was not returned yet and fits `sampling`; returns its node,
        or None."""
        waiting = self._turns.get(prompt, deque())
        for node in waiting:
            segment, before = self.forest.segments[node], self._broken.get(node)
            # Only the sampler knows how many tokens a turn has that broke off in this process: at most its max_tokens.
            least = before.max_tokens if before else segment.length + 1
            alike = before is None or (before.stop, before.grammar) == (sampling.stop, sampling.grammar)
            if segment.stop_reason is not None or (least <= sampling.max_tokens and alike):
                waiting.remove(node)
                return node
        return None

    def _before(self, node: int) -> Tokens:
        """The tokens before segment `node`: for a turn, its prompt."""
        parent = parent_of(self.forest.segments, node)
        return self.forest.tokens(parent) if parent >= 0 else self.forest.prompt if parent == PROMPT else ()

    def _newest_before(self, node: int) -> int:
        """Newest version of the tokens on the path to segment `node`, its own included; 0 if none is sampled."""
        _, places = way_to(self.forest.segments, node)
        return max((stamps[-1][0] for at in places if (stamps := self.forest.segments[at].stamps)), default=0)

    def _seed_of(self, node: int, prompt: Tokens) -> None:
        """Set the seed of turn `node`, derived from its prompt and the number of earlier turns with this prompt. So it
        does not depend on the order in which parallel turns begin."""
        self._seeds[node] = derive_seed(self._seed, self._asked[prompt], *prompt)
        self._asked[prompt] += 1

    def _begin(self, prompt: Tokens, cause: str) -> int:
        """Append an empty segment for a turn after `prompt`; returns its node. Tokens of the prompt that are not in the
        forest become a given segment before it, with `cause` if a branch begins."""
        place = self.forest.find(prompt)
        parent = place.parent
        if place.tail:
            parent = self._append(Segment.of(place.tail, parent=parent, cause=cause))
            cause = ""
        node = self._append(Segment(parent=parent, cause=cause))
        self._seed_of(node, prompt)
        return node

    def _append(self, segment: Segment) -> int:
        self._record.journal(len(self.forest.segments), segment)
        return self.forest.append(segment)


#: Called with trajectory id, token ids of the prompt, and seed of the trajectory; returns its session.
OpenSession = Callable[[str, Tokens, int], Session]


class MemoryRecord:
    """Keeps the record of a session in memory only (satisfies `SessionRecord`)."""

    def __init__(self) -> None:
        self.pieces: list[tuple[int, Segment]] = []
        self.calls: list[RecordedCall] = []

    def journal(self, node: int, piece: Segment) -> None:
        self.pieces.append((node, piece))

    def begin_call(self, number: int, asked: bytes, durable: bool) -> None:
        self.calls.append(RecordedCall(number, asked))

    def end_call(self, number: int, reply: bytes) -> None:
        self.calls[number].reply = reply

    @property
    def segments(self) -> list[Segment]:
        """The recorded segments, by index, each joined from its pieces."""
        return joined_pieces(self.pieces)


def joined_pieces(pieces: Iterable[tuple[int, Segment]]) -> list[Segment]:
    """Join the pieces of segments; returns the whole segments, by index. `pieces`: (segment index, piece), as they were
    recorded; the first piece of a segment comes after that of the segment before.

    Raises:
        StoreError: an index is skipped, because the first piece of a segment is missing.
    """
    found: list[Segment] = []
    for node, piece in pieces:
        if node > len(found):
            raise StoreError(f"segment {len(found)} is missing, and segment {node} is there")
        if node == len(found):
            found.append(piece)
        else:
            found[node] = found[node] + piece
    return found


@dataclass(frozen=True)
class WholeTurns:
    """Samples turns on an engine without a run (satisfies `Sampler`). A turn is recorded only when it has ended, and is
    sampled from its beginning.

    Attributes:
        generate: sends a request to the engine.
        record: stores the turns.
        name: prefix of the request ids. Node and a running number follow: a turn may be requested again before the
            engine has aborted the first request.
    """

    generate: Generate
    record: SessionRecord
    name: str
    _number: Iterator[int] = field(default_factory=count)

    async def __call__(self, request: TurnRequest) -> Segment:
        """Sample one turn and record it; returns its segment.

        Raises:
            EngineLost: the engine ended the request without a completion.
        """
        id = f"{self.name}#{request.node}.{next(self._number)}"
        asked = GenerateRequest(id, request.prompt, (request.seed,), request.sampling)
        async for completion in self.generate(asked):
            self.record.journal(request.node, completion.segment)
            return completion.segment
        raise EngineLost("the engine", f"ended {asked.id} without its completion")


def _shown(asked: bytes) -> str:
    return repr(asked[:80].decode(errors="replace")) + ("…" if len(asked) > 80 else "")
