"""Session: makes one trajectory durably. Turns and calls are recorded; a program that is started again is answered from
the record until it deviates from it.

    turn(prompt) ─► find its position ─► recorded ─► returned, or continued after its last token
                                      └─► new      ─► sampled, and recorded meanwhile
    call(asked)  ─► recorded ─► its reply
                └─► new      ─► begin recorded, run, end recorded

So after a crash, the workflow or the agent's program is simply started again from its beginning. Records are found by
content: the tokens of a prompt, or the bytes of a call. Each record is used once: equal prompts of parallel turns take
the recorded turns in order, whichever asks first.
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

    Example: ``Turn(node=2, segment=Segment.of(token_ids=(4, 4, 2), ..., stop_reason=StopReason.STOP, parent=1))``
    """

    node: int
    segment: Segment


@dataclass(frozen=True)
class TurnRequest:
    """A turn to sample: the segment `node` after `prompt`.

    `prefix`: tokens of it that are sampled already, with parent and cause; mostly no tokens. `least`: newest version
    that sampled any token of the prompt, since versions never fall along a path.
    """

    node: int
    prompt: Tokens
    sampling: Sampling
    seed: int
    prefix: Segment
    least: int = 0


#: Samples turns, and records their tokens under their nodes, as `loop.engines.in_flight` does. Returns the whole
#: segment, including the tokens of `TurnRequest.prefix`, with its parent and cause: an interrupted turn continues after
#: its recorded tokens. Raises EngineLost, RefusedRequest or DeadlineExceeded.
Sampler = Callable[[TurnRequest], Awaitable[Segment]]


class RecordedCall(Protocol):
    """A recorded call; `reply` is None if it had not ended."""

    @property
    def number(self) -> int: ...
    @property
    def asked(self) -> bytes: ...
    @property
    def reply(self) -> bytes | None: ...


class SessionRecord(Protocol):
    """Storage of a session's turns and calls (Protocol)."""

    def journal(self, node: int, piece: Segment) -> None:
        """Append `piece` to the recorded tokens of segment `node`. The first piece also sets its parent and cause."""

    def begin_call(self, number: int, asked: bytes, durable: bool) -> None:
        """Record that call `number` begins; if `durable`, the record is on disk on return."""

    def end_call(self, number: int, reply: bytes) -> None:
        """Record the reply of a call."""


@dataclass
class CallInMemory:
    """A call in memory (satisfies `RecordedCall`)."""

    number: int
    asked: bytes
    reply: bytes | None = None


class Session:
    """One trajectory in the making, with its turns and calls.

    Example::

        session = Session("0.17.0/3", prompt.token_ids, seed, sampler, record)
        first = await session.turn(prompt.token_ids, sampling)
        reply = await session.call(b"calculator 3+8", calculate, repeatable=True)
        history = prompt.token_ids + first.segment.token_ids + tokenize(reply)
        second = await session.turn(history, sampling)
        segments = session.segments()

    Attributes:
        id: that of its trajectory, or another name.
        forest: all given and sampled segments, abandoned turns included.
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
        """`segments`, by node, and `calls` were recorded by an earlier process. A segment without tokens is a turn that
        had none yet."""
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
            if segment.sampled or not segment.length:
                prompt = self._before(node)
                self._seed_of(node, prompt)
                self._turns.setdefault(prompt, deque()).append(node)
        self._replies: dict[bytes, deque[CallInMemory]] = {}  # as `_turns`, of calls
        for call in self._calls:
            self._replies.setdefault(call.asked, deque()).append(call)

    def again(self) -> Session:
        """A session for a program that starts again; this one must have no turn or call in progress."""
        forest = self.forest
        found = Session(self.id, forest.prompt, self._seed, self._sampler, self._record, forest.segments, self._calls)
        found._broken.update(self._broken)
        return found

    async def turn(self, prompt: Tokens, sampling: Sampling, cause: str = "") -> Turn:
        """Sample one turn after `prompt` (token ids of the whole history), or return the recorded one. `cause`: why a
        branch begins here, if the prompt makes one.

        An interrupted turn stays recorded, and the next turn after an equal prompt continues it, unless that one has a
        smaller limit, other stop texts, or another grammar.

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
        """All calls in the order of their begin."""
        return self._calls

    def claim(self, node: int) -> Turn:
        """The recorded turn `node`, which a recorded call has returned already.

        Raises:
            StoreError: it is not recorded, or has not ended.
        """
        segments = self.forest.segments
        if node >= len(segments) or segments[node].stop_reason is None:
            raise StoreError(f"{self.id}: a reply is on record, and the turn {node} that it tells is not")
        self.pass_over(node)
        self._claimed.add(node)
        return Turn(node, segments[node])

    def pass_over(self, node: int) -> None:
        """Exclude the recorded turn `node` from answers of `turn`: a recorded call holds it, and may still be
        requested."""
        waiting = self._turns.get(self._before(node))
        if waiting and node in waiting:
            waiting.remove(node)

    def prefer(self, asked: bytes, own: Callable[[bytes], bool]) -> None:
        """Let the next `call` with the request `asked` take the first recorded reply for which `own` is true, if there
        is one."""
        waiting = self._replies.get(asked, deque())
        if call := next((call for call in waiting if call.reply is not None and own(call.reply)), None):
            waiting.remove(call)
            waiting.appendleft(call)

    async def call(
        self, asked: bytes, run: Callable[[], Awaitable[bytes]], *, repeatable: bool, durable: bool = False
    ) -> bytes:
        """Reply to the request `asked`: recorded, or the result of `run`.

        Exceptions of `run` are raised and not recorded; failures that the program handles belong into the reply.

        Args:
            repeatable: `run` may be called again if a crash interrupts it; otherwise begin and end are on disk before
                `run` starts and before this returns.
            durable: the same guarantee for a repeatable call.

        Raises:
            CallInterrupted: it began in an earlier process, may have had its effect, and is not repeatable; or
                `check_calls` raises.
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
        """Check for interrupted calls that the program has not requested again.

        Raises:
            CallInterrupted: an earlier process began a call that is not repeatable and has no reply, and it was not
                requested again: the program might repeat its effect in another form.
        """
        for waiting in self._replies.values():
            for call in waiting:
                if call.reply is None and call.asked.startswith(_ONCE):
                    raise CallInterrupted(self.id, _shown(call.asked.removeprefix(_ONCE)))

    @property
    def returned(self) -> list[int]:
        """Nodes of the returned turns, in order."""
        return sorted(node for node in self._claimed if self.forest.segments[node].stop_reason is not None)

    def segments(self, rewards: Mapping[int, float] | None = None) -> tuple[Segment, ...]:
        """Forest of the trajectory: the returned turns and their histories. `rewards` are those of turns, by node.
        Interrupted turns, and turns that only an earlier process requested, are left out."""
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
        """Number of tokens of all finished turns, also of those outside of the trajectory."""
        return sum(one.length for one in self.forest.segments if one.stop_reason is not None)

    def _recorded(self, prompt: Tokens, sampling: Sampling) -> int | None:
        """First unused recorded turn after `prompt` that fits; it is then marked as used."""
        waiting = self._turns.get(prompt, deque())
        for node in waiting:
            segment, before = self.forest.segments[node], self._broken.get(node)
            # The sampler alone knows the tokens of a turn that broke off in this process: fewer than it might have had.
            least = before.max_tokens if before else segment.length + 1
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
        return max((stamps[-1][0] for at in places if (stamps := self.forest.segments[at].stamps)), default=0)

    def _seed_of(self, node: int, prompt: Tokens) -> None:
        """Derive the seed of a turn from its prompt and the number of earlier requests with it, so that parallel turns
        may begin in any order."""
        self._seeds[node] = derive_seed(self._seed, self._asked[prompt], *prompt)
        self._asked[prompt] += 1

    def _begin(self, prompt: Tokens, cause: str) -> int:
        """Create a node after the prompt; new tokens of the prompt become a given segment."""
        place = self.forest.find(prompt)
        parent = place.parent
        if place.tail:
            parent = self._append(Segment.of(place.tail, parent=parent, cause=cause))
            cause = ""
        node = self._append(Segment(parent=parent, cause=cause))
        self._seed_of(node, prompt)
        return node

    def _append(self, segment: Segment) -> int:
        node = self.forest.append(segment)
        self._record.journal(node, segment)
        return node


class MemoryRecord:
    """Record of a session in memory only."""

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
        """Recorded segments, by node."""
        return joined_pieces(self.pieces)


def joined_pieces(pieces: Iterable[tuple[int, Segment]]) -> list[Segment]:
    """Join pieces to segments, ordered by node."""
    found: list[Segment] = []
    for node, piece in pieces:
        if node == len(found):
            found.append(piece)
        else:
            found[node] = found[node] + piece
    return found


@dataclass(frozen=True)
class WholeTurns:
    """Sampler for an engine without a run; records a turn only when it has ended.

    Attributes:
        name: prefix of its request ids, followed by the node and a number: a turn may be requested again before the
            engine has abandoned its first request.
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
