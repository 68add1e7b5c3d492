"""Session of one agent: each request becomes a turn, and a repeated request gets the same reply.

a retry of a request ─► the recorded reply, or the one in progress
a request that an earlier process recorded ─► its reply, byte for byte
a new request ─► bridge ─► prompt ─► Session.turn ─► message
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, Literal

import msgspec

from stretto.core.deadlines import deadline
from stretto.core.errors import DataError, RefusedRequest, several
from stretto.core.events import RecordedCall
from stretto.core.forest import parent_of, paths
from stretto.core.records import Record, Segment
from stretto.core.states import LARGEST_REWARD, why_no_reward
from stretto_gateway.model import ServedModel, characters_of
from stretto_gateway.requests import NotServed
from stretto_workflows.chat.bridge import Bridge, CompletedTurn, NextPrompt, Renderer
from stretto_workflows.chat.messages import ChatRequest, Match, Message, SampledTurn, Tool
from stretto_workflows.session import Session

State = Literal["open", "ended"]
_SHOWN = 300  # characters of a reason


def session_ended(session: str) -> NotServed:
    """Make the error (409) for a request whose session, with this id, has ended."""
    return NotServed(409, f"session: {session} has ended; open another one", code="session_ended")


class _TurnRecord(Record, frozen=True):
    """A recorded turn.

    Attributes:
        turn: the reply to the agent's request.
        node: index of its segment in the session's forest of tokens.
        behind: id of the turn whose history it continues; "" for none.
        new: messages between that history and this turn; all messages if there is none.
        tools: tools that the request offered.
        key: idempotency key of the request; "" for none.
    """

    turn: SampledTurn = msgspec.field(name="said")
    node: int
    behind: str
    new: tuple[Message, ...]
    tools: tuple[Tool, ...]
    key: str = ""


class GivenRewards(Record, frozen=True):
    """Rewards given over HTTP: of the trajectory (None: not given), and of turns by node. `nodes`: turns that the agent
    had received when the last reward was given."""

    reward: float | None = None
    by_turn: Mapping[int, float] = {}
    nodes: tuple[int, ...] = ()


class Attempt(Record, frozen=True):
    """Retry headers of a request: `key`, the idempotency key ("" for none), and `attempt`, the number of earlier
    attempts (None if unknown)."""

    key: str = ""
    attempt: int | None = None


@dataclass
class _PendingTurn:
    """Turn of one request, in progress or complete. `digest`: that of the request; `waiting`: number of clients that
    wait for the turn."""

    digest: bytes
    task: asyncio.Task[SampledTurn]
    waiting: int = 0

    @property
    def usable(self) -> bool:
        """Whether the turn has a reply, or is in progress and not cancelled."""
        if self.task.done():
            return not self.task.cancelled() and self.task.exception() is None
        return not self.task.cancelling()


@dataclass
class AgentSession:
    """Session of one agent as clients use it over HTTP: conversations, rewards, and the record of turns.

    Attributes:
        key: API key of the session; any client with it may request turns, reward and end the session.
        created: Unix time of the opening, in seconds.
        about: the session's task.
        session: samples turns and records them.
        given: rewards given over HTTP.
        stragglers: number of requests after the end.
        retries: number of requests that got the reply of an earlier request.
        as_json: number of turns whose history the client sent back with call arguments in another JSON spelling.
        unapplied: number of turns per sampling option that was ignored.
        asked_at: time of the opening, of the last request for a turn or a count, or of its reply, or of the last
            reward, in seconds of `time.monotonic`.
        unanswered: errors of the run, by digest of the request that failed with them. With any, the trajectory is
            undecided, whatever its rewards. Refused requests are the agent's mistakes and are not included.
        ended: set when the session has ended.
        last_text: text of the last turn that a client got.
        template_arguments: arguments of the chat template, in every prompt.
    """

    id: str
    key: str
    created: int
    about: Mapping[str, Any]
    session: Session
    model: ServedModel
    state: State = "open"
    given: GivenRewards = field(default_factory=GivenRewards)
    stragglers: int = 0
    retries: int = 0
    as_json: int = 0
    unapplied: Counter[str] = field(default_factory=Counter)
    asked_at: float = field(default_factory=time.monotonic)
    unanswered: dict[bytes, str] = field(default_factory=dict)
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    last_text: str = ""
    template_arguments: Mapping[str, Any] = field(default_factory=dict)
    _pending: dict[bytes | str, _PendingTurn] = field(default_factory=dict)  # by idempotency key, or by digest

    def __post_init__(self) -> None:
        given = self.template_arguments
        self._bridge = Bridge(Renderer(self.model.template, given) if given else self.model.renderer)
        self._keyed: dict[str, tuple[bytes, SampledTurn]] = {}  # by idempotency key: digest of the request, and reply
        turns = self._turn_calls()
        self._on_record = Counter(call.asked for call in turns)  # turns not yet requested in this process, by digest
        for call in turns:
            if call.reply is not None:
                record = msgspec.json.decode(call.reply, type=_TurnRecord)
                self.session.pass_over(record.node)
                self._add(call.asked, record, live=False)
        self._unclaimed = {*self._keyed}  # recorded keys that no client of this process has sent yet

    async def answer(self, request: ChatRequest, attempt: Attempt) -> SampledTurn:
        """Sample the turn for a request, or return the recorded one if the request is a retry (with an idempotency key
        also after the end of the session). Sampling is cancelled when all clients that wait for the turn have
        disconnected.

        Raises:
            NotServed: the session has ended, or ends meanwhile.
            RefusedRequest: a field is wrong, the idempotency key belongs to another request, the prompt leaves no room
                in the context, or the session has too many turns.
            EngineLost, DeadlineExceeded: the turn failed or took too long (`gateway.turn_seconds`); the client may try
                again.
        """
        if self.state == "ended" and (known := self._keyed.get(attempt.key)) and known[0] == digest_of(request):
            self.retries += 1
            return known[1]
        self._check_open()
        pending = self._pending_turn(request, attempt)
        pending.waiting += 1
        try:
            return await asyncio.shield(pending.task)
        except asyncio.CancelledError:
            if pending.task.cancelled():  # by the end of the session, not by the client
                raise session_ended(self.id) from None
            raise
        finally:
            self.asked_at = time.monotonic()
            pending.waiting -= 1
            if not pending.waiting and not pending.task.done():
                pending.task.cancel()

    async def count(self, request: ChatRequest) -> int:
        """Count the tokens in the prompt of a request. Nothing is sampled or recorded.

        Raises:
            NotServed: the session has ended.
            RefusedRequest: a field is wrong.
        """
        self._check_open()
        return len((await self._prompt(self._history(request), request.tools)).tokens)

    def give(self, reward: float, node: int | None) -> None:
        """Set the reward of the trajectory (`node` None), or of the turn `node`, in place of an earlier one. It is not
        recorded here: call `Host.rewarded`. After a crash, rewards are dropped unless the agent repeats all turns that
        it had when it gave them.

        Raises:
            RefusedRequest: there is no such turn, or the reward is out of bounds.
        """
        if why_no_reward(reward):
            raise RefusedRequest("reward", f"{reward:g}", f"a number between ±{LARGEST_REWARD:g} is needed")
        self.asked_at = time.monotonic()
        turns = [at for at, one in enumerate(self.session.forest.segments) if one.sampled and one.stop_reason]
        if node is not None and node not in turns:
            allowed = f"the id of a sampled node that has ended: {', '.join(map(str, turns))[:400] or 'there is none'}"
            raise RefusedRequest("node", str(node), allowed)
        by_turn = self.given.by_turn if node is None else {**self.given.by_turn, node: reward}
        whole = reward if node is None else self.given.reward
        self.given = GivenRewards(whole, by_turn, tuple(self.session.returned))

    @property
    def rewards(self) -> GivenRewards:
        """Valid rewards: the given ones; none if, after a crash, the agent has not repeated every turn that it had when
        it gave them."""
        return self.given if set(self.given.nodes) <= set(self.session.returned) else GivenRewards()

    @property
    def broken(self) -> str:
        """Reason why the trajectory is undecided: the first error of `unanswered`; "" for none."""
        return next(iter(self.unanswered.values()), "")

    def fail(self, why: str) -> None:
        """Note a failure that the agent reports, with its reason `why`: the trajectory becomes undecided. Does nothing
        for ""."""
        if why:
            self.unanswered[b"failed"] = f"the agent failed: {why[:_SHOWN]}"

    @property
    def busy(self) -> bool:
        """Whether a turn is being sampled."""
        return any(not pending.task.done() for pending in self._pending.values())

    def end(self) -> None:
        """End the session and cancel turns in progress. The end is not recorded here: call `Host.ended`."""
        self.state = "ended"
        self.ended.set()
        for pending in self._pending.values():
            pending.task.cancel()

    def _check_open(self) -> None:
        if self.state == "ended":
            self.stragglers += 1
            raise session_ended(self.id)
        self.asked_at = time.monotonic()

    def _turn_calls(self) -> list[RecordedCall]:
        return [call for call in self.session.calls if len(call.asked) == blake2b.MAX_DIGEST_SIZE]

    def _turns_counted(self) -> int:
        """Number of recorded turns; a request that failed counts once, however often it was tried."""
        calls = self._turn_calls()
        replied = sum(call.reply is not None for call in calls)
        return replied + len({call.asked for call in calls if call.reply is None})

    def _pending_turn(self, request: ChatRequest, attempt: Attempt) -> _PendingTurn:
        """Find the turn of a request, or start a new one. A request without idempotency key that is marked as a first
        attempt gets a new turn, even if it equals an earlier request. Raises RefusedRequest if its key belongs to a
        different request, or the session has too many turns."""
        digest = digest_of(request)
        name = attempt.key or digest
        known, keyed = self._pending.get(name), self._keyed.get(attempt.key)
        if (known is not None and known.digest != digest) or (keyed is not None and keyed[0] != digest):
            raise RefusedRequest("Idempotency-Key", "was the key of another request", "one key for each request")
        if known is not None and known.usable and (attempt.key or attempt.attempt != 0):
            self.retries += 1
            return known
        recorded, most = self._on_record[digest] > 0, self.model.config.turns
        if not (recorded or keyed) and max(len(self._pending), self._turns_counted()) >= most:
            raise RefusedRequest("messages", "another turn", f"at most {several(most, 'turn')} of one session")
        self._on_record[digest] -= recorded
        task = asyncio.create_task(self._watched(request, digest, attempt.key), name=f"a turn of {self.id}")
        task.add_done_callback(lambda done: done.cancelled() or done.exception())  # marks an error as retrieved
        if known is not None and known.usable and not known.task.done():
            name = f"{attempt.attempt} {len(self._pending)}"  # of two equal turns in progress, retries get the first
        self._pending[name] = _PendingTurn(digest, task)
        return self._pending[name]

    async def _watched(self, request: ChatRequest, digest: bytes, key: str) -> SampledTurn:
        try:
            turn = await self._turn(request, digest, key)
        except RefusedRequest:
            raise
        except Exception as error:  # an engine, the record or a bug; noted, since the agent may ignore the error reply
            self.unanswered[digest] = f"a turn gave no reply: {type(error).__name__}: {error}"
            raise
        self.unanswered.pop(digest, None)
        return turn

    async def _turn(self, request: ChatRequest, digest: bytes, key: str) -> SampledTurn:
        async def run() -> bytes:
            return msgspec.json.encode(await self._sample(request, key))

        if key in self._keyed and key not in self._unclaimed:  # a client has already got the reply for this key
            return self._keyed[key][1]
        async with deadline(f"session {self.id}", "a turn", self.model.config.turn_seconds):
            self.session.prefer(digest, lambda reply: msgspec.json.decode(reply, type=_TurnRecord).key == key)
            # The reply is recorded before the agent gets it.
            reply = await self.session.call(digest, run, repeatable=True, durable=True)
        record = msgspec.json.decode(reply, type=_TurnRecord)
        self.session.claim(record.node)
        self._add(digest, record, live=True)
        self._unclaimed.discard(record.key)
        self.last_text = record.turn.message.text
        return record.turn

    async def _sample(self, request: ChatRequest, key: str) -> _TurnRecord:
        rule, history = self.model.rule, self._history(request)
        prompt = await self._prompt(history, request.tools)
        if self.session.earlier and self.session.waiting(prompt.tokens) is None:
            # An earlier version has begun turns without the question's arguments of the chat template.
            with suppress(DataError):  # it may need them
                before = await self._prompt(history, request.tools, self.model.renderer)
                node = self.session.waiting(before.tokens)
                prompt = before if node is not None and node < self.session.earlier else prompt
        sampling = rule.sampling(request, len(prompt.tokens))
        self._bridge.begin(history, prompt)
        sampled = await self.session.turn(prompt.tokens, sampling, prompt.cause)
        turn = self.model.turn(
            request,
            sampled.segment,
            id=self._named(sampled.node),
            created=self.created,
            prompt=prompt.tokens,
            call_id=lambda call: self._named(sampled.node, call),
        )
        self.as_json += prompt.match is Match.EQUAL_AS_JSON
        self.unapplied.update(rule.unapplied(request))
        behind = prompt.behind
        new = prompt.history[len(behind.history) :] if behind else prompt.history
        return _TurnRecord(turn, sampled.node, behind.id if behind else "", new, prompt.tools, key)

    def _named(self, node: int, call: int | None = None) -> str:
        return blake2b(f"{self.id}\0{node}\0{call}".encode(), digest_size=12).hexdigest()

    def _history(self, request: ChatRequest) -> tuple[Message, ...]:
        """Whole history of a request. If it refers to an earlier reply by id, that reply's history is put in front,
        with the request's system message if it has one. RefusedRequest for an unknown id."""
        history = request.messages
        if request.previous:
            before = self._bridge.turn(request.previous)
            if before is None:
                raise RefusedRequest("previous_response_id", "unknown in this session", "the id of an earlier reply")
            known, system = before.history, history[:1] if history[0].role == "system" else ()
            if system and known[0].role == "system":  # clients repeat instructions with each request
                known = known[1:]
            history = (*system, *known, *history[len(system) :])
        return history

    async def _prompt(
        self, history: tuple[Message, ...], tools: tuple[Tool, ...], renderer: Renderer | None = None
    ) -> NextPrompt:
        size, context = characters_of(history, tools), self.model.rule.context
        most = context * self.model.longest_token
        if size > most:  # in any encoding, more tokens than the context has
            allowed = f"at most {most:,}, which no context of {context:,} tokens goes beyond"
            raise RefusedRequest("messages", f"{size:,} characters", allowed)
        return await self.model.encoded(size, lambda: self._bridge.next(history, tools, renderer))

    def _add(self, digest: bytes, record: _TurnRecord, *, live: bool) -> None:
        """Add the turn of the request with this digest to the bridge, so that later prompts can continue it, and note
        its idempotency key. `live`: sampled or requested in this process, not only recorded."""
        if record.key:
            self._keyed[record.key] = digest, record.turn
        behind = self._bridge.turn(record.behind) if record.behind else None
        before = behind.history if behind else ()
        tokens = self.session.forest.tokens(record.node)
        history = (*before, *record.new, record.turn.message)
        self._bridge.add(CompletedTurn(record.turn.id, history, record.tools, tokens, live))


def digest_of(request: ChatRequest) -> bytes:
    """Digest of a request, by which its recorded reply is found; it must not change between versions of stretto."""
    recorded = msgspec.structs.replace(request, limit=msgspec.UNSET)  # only the client's name of a field
    return blake2b(msgspec.json.encode(recorded, order="deterministic")).digest()


def shown(session: AgentSession) -> dict[str, Any]:
    """State of a session as JSON, for ``GET /sessions/ID``: its nodes with tokens, its samples, rewards and counts."""
    segments = session.session.forest.segments
    nodes = [
        {
            "id": place,
            "parent": parent if (parent := parent_of(segments, place)) >= 0 else None,
            "sampled": segment.sampled,
            "token_ids": segment.token_ids,
            "logprobs": segment.behavior_logprobs,
            "versions": segment.versions,
            "branch_cause": segment.cause or None,
            "finish_reason": segment.stop_reason,
            "reward": session.given.by_turn.get(place),
        }
        for place, segment in enumerate(segments)
    ]
    return {
        "id": session.id,
        "state": session.state,
        "reward": session.given.reward,
        "failed": session.broken or None,
        "nodes": nodes,
        "samples": [path.segments for path in paths(list(map(_whole, segments)))],
        "branches": Counter(segment.cause for segment in segments if segment.cause),
        "equal_as_json": session.as_json,
        "unapplied": session.unapplied,
        "retries": session.retries,
        "stragglers": session.stragglers,
    }


def _whole(segment: Segment) -> Segment:
    """Return the segment; for an unfinished turn, an empty segment with the same parent and cause."""
    unfinished = segment.sampled and segment.stop_reason is None
    return Segment(parent=segment.parent, cause=segment.cause) if unfinished else segment
