"""A session makes one trajectory, durably: its turns and calls are on record, and a program that begins again is
answered from the record until it does something else.

    turn(prompt) ─► where do these tokens stand? ─► recorded ─► returned, or continued from its last token
                                                └─► new      ─► sampled, and on record while it is
    call(asked)  ─► recorded ─► its reply
                └─► new      ─► on record that it begins, run, on record that it has ended

So a crash needs no other remedy than to start the workflow, or the agent's program, from its beginning. What was
recorded is found by its content, the tokens of a prompt or the bytes of a call, and each entry answers once: equal
prompts of parallel turns take the recorded ones in their order, whichever asks first.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Protocol

import msgspec

from stretto.conversation.forest import Forest, Tokens, parent_of, way_to
from stretto.core.engine import Generate
from stretto.core.errors import CallInterrupted, EngineLost, StoreError
from stretto.core.records import PROMPT, GenerateRequest, Sampling, Segment, derive_seed

_ONCE = b"once "  # before what is asked of a call on record that is not repeatable


@dataclass(frozen=True)
class Turn:
    """A completion in a session, at its place in the forest.

    Example: ``Turn(node=2, segment=Segment(token_ids=(4, 4, 2), ..., stop_reason=StopReason.STOP, parent=1))``
    """

    node: int
    segment: Segment


@dataclass(frozen=True)
class TurnRequest:
    """What is to be sampled: the segment `node`, behind `prompt`.

    `prefix` is what is sampled of it already, with its parent and its cause; most often no token. `least` is the newest
    version that sampled any token of the prompt: along a path versions never fall.
    """

    node: int
    prompt: Tokens
    sampling: Sampling
    seed: int
    prefix: Segment
    least: int = 0


class Sampler(Protocol):
    """Samples turns, and puts their tokens on record under their nodes, as `loop.engines.in_flight` does. Asked again
    for a turn that it has broken off, it goes on behind the tokens that it put on record."""

    async def __call__(self, request: TurnRequest, /) -> Segment:
        """The whole segment, the tokens of `request.prefix` included, with its parent and cause.

        Raises:
            EngineLost, RefusedRequest, DeadlineExceeded: there is none.
        """
        ...


class RecordedCall(Protocol):
    """A call on record; without a `reply` it had not ended."""

    @property
    def number(self) -> int: ...
    @property
    def asked(self) -> bytes: ...
    @property
    def reply(self) -> bytes | None: ...


class SessionRecord(Protocol):
    """Where a session is on record."""

    def journal(self, node: int, piece: Segment) -> None:
        """A piece of a segment; the first has its parent and cause."""

    def begin_call(self, number: int, asked: bytes, durable: bool) -> None:
        """A call begins; if `durable`, this survives a crash from now on."""

    def end_call(self, number: int, reply: bytes) -> None:
        """A call has ended."""


@dataclass
class CallInMemory:
    """See `RecordedCall`."""

    number: int
    asked: bytes
    reply: bytes | None = None


class Session:
    """One trajectory in the making.

    Example::

        session = Session("0.17.0/3", prompt.token_ids, seed, sampler, record)
        first = await session.turn(prompt.token_ids, sampling)
        reply = await session.call(b"calculator 3+8", calculate, repeatable=True)
        history = prompt.token_ids + first.segment.token_ids + tokenize(reply)
        second = await session.turn(history, sampling)
        segments = session.segments()

    Attributes:
        id: that of its trajectory, or a name of its own.
        forest: what was given and sampled, abandoned turns included.
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
    ) -> None:
        """`segments` by their nodes, and `calls`, are on record from an earlier process. A segment without tokens is a
        turn of which none has come."""
        own = [msgspec.structs.replace(one, parent=parent_of(segments, at)) for at, one in enumerate(segments)]
        self.id, self.forest = id, Forest(prompt, own)
        self._seed, self._sampler, self._record = seed, sampler, record
        self._calls = [CallInMemory(call.number, call.asked, call.reply) for call in calls]
        self._claimed = set[int]()
        self._seeds: dict[int, int] = {}  # of turns, by node
        self._asked: Counter[Tokens] = Counter()
        self._broken: dict[int, Sampling] = {}  # how turns were asked for that broke off in this process, by node
        self._turns: dict[Tokens, deque[int]] = {}  # recorded ones that have answered nobody, by their prompts
        for node, segment in enumerate(own):
            if segment.sampled or not segment.token_ids:
                prompt = self._before(node)
                self._seed_of(node, prompt)
                self._turns.setdefault(prompt, deque()).append(node)
        self._replies: dict[bytes, deque[CallInMemory]] = {}  # as `_turns`, of calls
        for call in self._calls:
            self._replies.setdefault(call.asked, deque()).append(call)

    def again(self) -> Session:
        """The session for a program that begins again; this one must have no turn and no call under way."""
        forest = self.forest
        found = Session(self.id, forest.prompt, self._seed, self._sampler, self._record, forest.segments, self._calls)
        found._broken.update(self._broken)
        return found

    async def turn(self, prompt: Tokens, sampling: Sampling, cause: str = "") -> Turn:
        """What the model says behind `prompt`, all of the tokens before it. `cause` says why a branch begins here, if
        the prompt makes one.

        A turn that breaks off stays on record, and the next one behind an equal prompt goes on with it, unless that may
        have fewer tokens, ends at other stop texts, or has another grammar.

        Raises:
            EngineLost, RefusedRequest, DeadlineExceeded: as its sampler.
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
        """All of them, in the order in which they began."""
        return self._calls

    def claim(self, node: int) -> Turn:
        """The recorded turn `node`, which a call on record has returned already.

        Raises:
            StoreError: it is not on record, or has no end.
        """
        segments = self.forest.segments
        if node >= len(segments) or segments[node].stop_reason is None:
            raise StoreError(f"{self.id}: a reply is on record, and the turn {node} that it tells is not")
        self.pass_over(node)
        self._claimed.add(node)
        return Turn(node, segments[node])

    def pass_over(self, node: int) -> None:
        """Let no `turn` answer with the recorded turn `node`: a call on record tells it, and may yet be asked for."""
        waiting = self._turns.get(self._before(node))
        if waiting and node in waiting:
            waiting.remove(node)

    def prefer(self, asked: bytes, own: Callable[[bytes], bool]) -> None:
        """Let the next `call` that asks this get the first recorded reply that is its `own`, if there is one."""
        waiting = self._replies.get(asked, deque())
        if call := next((call for call in waiting if call.reply is not None and own(call.reply)), None):
            waiting.remove(call)
            waiting.appendleft(call)

    async def call(
        self, asked: bytes, run: Callable[[], Awaitable[bytes]], *, repeatable: bool, durable: bool = False
    ) -> bytes:
        """The reply to `asked`: on record, or of `run`. `repeatable` says that `run` may be called again when a crash
        has cut it short; what is not, and what is `durable`, is on record before it begins and before this returns.

        What `run` raises is raised; failures that the program goes on from belong into the reply.

        Raises:
            CallInterrupted: it had begun in an earlier process, may have had its effect, and is not repeatable; or
                `check_calls` says so.
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
            call = CallInMemory(len(self._calls), kept)
            self._calls.append(call)
            self._record.begin_call(call.number, kept, durable=durable or not repeatable)
        if call.reply is None:
            call.reply = await run()
            self._record.end_call(call.number, call.reply)
        return call.reply

    def check_calls(self) -> None:
        """
        Raises:
            CallInterrupted: an earlier process had begun a call that is not repeatable, it has no reply, and nobody has
                asked for it again: what the program does in its place may be the same once more.
        """
        for waiting in self._replies.values():
            for call in waiting:
                if call.reply is None and call.asked.startswith(_ONCE):
                    raise CallInterrupted(self.id, _shown(call.asked.removeprefix(_ONCE)))

    @property
    def returned(self) -> list[int]:
        """The nodes of the turns that were returned, in their order."""
        return sorted(node for node in self._claimed if self.forest.segments[node].stop_reason is not None)

    def segments(self, rewards: Mapping[int, float] | None = None) -> tuple[Segment, ...]:
        """The forest of the trajectory: the turns that were returned, and what they stand behind; `rewards` are those
        of turns, by node. Turns that broke off, or that only an earlier process asked for, are left out."""
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

    @property
    def sampled_tokens(self) -> int:
        """Of turns that have ended, whether or not they are part of the trajectory."""
        return sum(len(one.token_ids) for one in self.forest.segments if one.stop_reason is not None)

    def _recorded(self, prompt: Tokens, sampling: Sampling) -> int | None:
        """The first recorded turn behind `prompt` that may answer; it answers nobody else."""
        waiting = self._turns.get(prompt, deque())
        for node in waiting:
            segment, before = self.forest.segments[node], self._broken.get(node)
            # The sampler alone knows the tokens of a turn that broke off in this process: fewer than it might have had.
            least = before.max_tokens if before else len(segment.token_ids) + 1
            alike = before is None or (before.stop, before.grammar) == (sampling.stop, sampling.grammar)
            if segment.stop_reason is not None or (least <= sampling.max_tokens and alike):
                waiting.remove(node)
                return node
        return None

    def _before(self, node: int) -> Tokens:
        parent = parent_of(self.forest.segments, node)
        return self.forest.tokens(parent) if parent >= 0 else self.forest.prompt if parent == PROMPT else ()

    def _newest_before(self, node: int) -> int:
        _, places = way_to(self.forest.segments, node)
        return max((max(self.forest.segments[at].versions, default=0) for at in places), default=0)

    def _seed_of(self, node: int, prompt: Tokens) -> None:
        """It follows from the prompt and how often that was asked before, so that parallel turns may begin in any
        order."""
        self._seeds[node] = derive_seed(self._seed, self._asked[prompt], *prompt)
        self._asked[prompt] += 1

    def _begin(self, prompt: Tokens, cause: str) -> int:
        """A new node behind the prompt; what is new of it becomes a given segment."""
        place = self.forest.find(prompt)
        parent = place.parent
        if place.tail:
            parent = self._append(Segment(place.tail, parent=parent, cause=cause))
            cause = ""
        node = self._append(Segment(parent=parent, cause=cause))
        self._seed_of(node, prompt)
        return node

    def _append(self, segment: Segment) -> int:
        node = self.forest.append(segment)
        self._record.journal(node, segment)
        return node


class MemoryRecord:
    """A session's record that ends with the process."""

    def __init__(self) -> None:
        self.pieces: list[tuple[int, Segment]] = []
        self.calls: list[CallInMemory] = []

    def journal(self, node: int, piece: Segment) -> None:
        """See `SessionRecord`."""
        self.pieces.append((node, piece))

    def begin_call(self, number: int, asked: bytes, durable: bool) -> None:
        """See `SessionRecord`."""
        self.calls.append(CallInMemory(number, asked))

    def end_call(self, number: int, reply: bytes) -> None:
        """See `SessionRecord`."""
        self.calls[number].reply = reply

    @property
    def segments(self) -> list[Segment]:
        """By their nodes."""
        return joined_pieces(self.pieces)


def joined_pieces(pieces: Iterable[tuple[int, Segment]]) -> list[Segment]:
    """The segments whose pieces these are, by their nodes; a node begins after those before it."""
    found: list[Segment] = []
    for node, piece in pieces:
        if node == len(found):
            found.append(piece)
        else:
            found[node] = found[node] + piece
    return found


@dataclass(frozen=True)
class WholeTurns:
    """A sampler that keeps a turn on record when it has ended: of an engine without a run.

    Attributes:
        name: of its requests, before the node and a number: a turn may be asked for again before the engine has given
            its first request up.
    """

    generate: Generate
    record: SessionRecord
    name: str
    _number: Iterator[int] = field(default_factory=count)

    async def __call__(self, request: TurnRequest) -> Segment:
        """See `Sampler`."""
        id = f"{self.name}#{request.node}.{next(self._number)}"
        asked = GenerateRequest(id, request.prompt, (request.seed,), request.sampling)
        async for completion in self.generate(asked):
            self.record.journal(request.node, completion.segment)
            return completion.segment
        raise EngineLost("the engine", f"ended {asked.id} without its completion")


def _shown(asked: bytes) -> str:
    return repr(asked[:80].decode(errors="replace")) + ("…" if len(asked) > 80 else "")
