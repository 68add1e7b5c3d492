"""One agent's session: requests in no dialect become turns, and replies that are told again.

the same request again (a retry) ─► the reply that is on record, or the one under way
a request on record from an earlier process ─► its reply, byte for byte
a new request ─► bridge ─► prompt ─► Session.turn ─► message
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, Literal

import msgspec

from stretto.conversation.bridge import Bridge, HeldTurn, NextPrompt, Renderer
from stretto.conversation.forest import parent_of, paths
from stretto.conversation.messages import AskedTurn, Likeness, Message, SaidTurn, Tool
from stretto.conversation.session import RecordedCall, Session
from stretto.core.deadlines import deadline
from stretto.core.errors import DataError, RefusedRequest
from stretto.core.records import Record, Segment
from stretto.core.states import LARGEST_REWARD, why_no_reward
from stretto.gateway.config import GatewayConfig
from stretto.gateway.sampling import SamplingRule
from stretto.gateway.telling import Teller

State = Literal["open", "ended"]
_SHOWN = 300  # characters of a reason
_LONG_TEXT = 20_000  # characters; encoding them takes milliseconds, and releases the GIL


class SessionEnded(RefusedRequest):
    """A request to a session that has ended."""

    def __init__(self, session: str) -> None:
        super().__init__("session", f"{session} has ended", "open another one")


class TurnRecord(Record, frozen=True):
    """A turn as a session keeps it: `new` are the messages behind those of the turn `behind`; `key` is the idempotency
    key of the request."""

    said: SaidTurn
    node: int
    behind: str
    new: tuple[Message, ...]
    tools: tuple[Tool, ...]
    key: str = ""


class GivenRewards(Record, frozen=True):
    """Rewards that came by HTTP: of the trajectory, and of turns by node; `nodes` are those of all turns that had been
    told when the last reward came."""

    reward: float | None = None
    by_turn: Mapping[int, float] = {}
    nodes: tuple[int, ...] = ()


class Attempt(Record, frozen=True):
    """How a client asks: its idempotency key ("" without), and which try this is (None if it does not say)."""

    key: str = ""
    attempt: int | None = None


@dataclass(frozen=True)
class Speaker:
    """What the sessions of a gateway share: the model's words, and how it is sampled."""

    renderer: Renderer
    teller: Teller
    rule: SamplingRule
    config: GatewayConfig

    @property
    def model(self) -> str:
        return self.teller.model


@dataclass
class _Answering:
    """The reply to one request, under way or there, and how many clients wait for it."""

    digest: bytes
    task: asyncio.Task[SaidTurn]
    waiting: int = 0

    @property
    def usable(self) -> bool:
        """Whether it is a reply, or becomes one."""
        if self.task.done():
            return not self.task.cancelled() and self.task.exception() is None
        return not self.task.cancelling()


@dataclass
class AgentSession:
    """A session as HTTP shows it.

    Attributes:
        key: the capability: whatever has it may ask for turns.
        created: seconds since 1970.
        given: the rewards that came by HTTP.
        ended: set when it has ended.
        asked_at: when it was last asked for a turn, or made, by the monotonic clock.
        unanswered: requests that an error of the run left without a reply, and have none since, with the error. It is
            no doing of the agent, so that a reward that follows it decides nothing; a refusal is its own mistake.
    """

    id: str
    key: str
    created: int
    about: Mapping[str, Any]  # its task, as it was given
    session: Session
    speaker: Speaker
    state: State = "open"
    given: GivenRewards = field(default_factory=GivenRewards)
    stragglers: int = 0  # requests after the end
    retries: int = 0  # requests that were answered by the reply to an earlier one
    as_json: int = 0  # turns whose history came back with arguments written otherwise
    unapplied: Counter[str] = field(default_factory=Counter)  # turns by the wishes that changed nothing
    asked_at: float = field(default_factory=time.monotonic)
    unanswered: dict[bytes, str] = field(default_factory=dict)
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    _answers: dict[bytes | str, _Answering] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._bridge = Bridge(self.speaker.renderer)
        self._told: dict[str, tuple[bytes, SaidTurn]] = {}  # by idempotency key: the request and its reply
        self.last_text = ""  # of the last turn that was answered
        turns = self._turn_calls()
        self._on_record = Counter(call.asked for call in turns)  # which no request has come for in this process
        for call in turns:
            if call.reply is not None:
                record = msgspec.json.decode(call.reply, type=TurnRecord)
                self.session.pass_over(record.node)
                self._hold(record, live=False)
                self._note(call.asked, record)
        self._waiting = {*self._told}  # keys of an earlier process, whose replies nobody has asked for again

    async def answer(self, asked: AskedTurn, how: Attempt) -> SaidTurn:
        """The reply to a request. The turn is broken off when every client that waits for it has gone.

        Raises:
            SessionEnded: the session has ended, or ends meanwhile.
            RefusedRequest: names the wrong field.
            EngineLost, DeadlineExceeded: it may be tried again.
        """
        if self.state == "ended" and (told := self._told.get(how.key)) and told[0] == _digest(asked):
            self.retries += 1
            return told[1]
        self._look_at()
        answering = self._answering(asked, how)
        answering.waiting += 1
        try:
            return await asyncio.shield(answering.task)
        except asyncio.CancelledError:
            if answering.task.cancelled():  # the session has ended meanwhile, and not the client
                raise SessionEnded(self.id) from None
            raise
        finally:
            answering.waiting -= 1
            if not answering.waiting and not answering.task.done():
                answering.task.cancel()

    async def count(self, asked: AskedTurn) -> int:
        """Tokens of the prompt that this request would have as a turn. None is made, and nothing is on record.

        Raises:
            SessionEnded: the session has ended.
            RefusedRequest: names the wrong field.
        """
        self._look_at()
        return len((await self._prompt(self._history(asked), asked.tools)).tokens)

    def give(self, reward: float, node: int | None) -> None:
        """Take a reward: of the turn `node`, with which it falls away where a crash makes the agent say something
        else; or of the trajectory.

        Raises:
            RefusedRequest: there is no such turn, or the number is beyond the bound of rewards.
        """
        if why_no_reward(reward):
            raise RefusedRequest("reward", f"{reward:g}", f"a number between ±{LARGEST_REWARD:g} is needed")
        turns = [at for at, one in enumerate(self.session.forest.segments) if one.sampled and one.stop_reason]
        if node is not None and node not in turns:
            allowed = f"the id of a sampled node that has ended: {', '.join(map(str, turns))[:400] or 'there is none'}"
            raise RefusedRequest("node", str(node), allowed)
        by_turn = self.given.by_turn if node is None else {**self.given.by_turn, node: reward}
        whole = reward if node is None else self.given.reward
        self.given = GivenRewards(whole, by_turn, tuple(self.session.returned))

    @property
    def rewards(self) -> GivenRewards:
        """Those that hold: after a crash, if the agent has come again to every turn for which they were given."""
        return self.given if set(self.given.nodes) <= set(self.session.returned) else GivenRewards()

    @property
    def broken(self) -> str:
        """Why the session decides nothing: the first of the errors that `unanswered` has; "" if there is none."""
        return next(iter(self.unanswered.values()), "")

    def fail(self, why: str) -> None:
        """Its program says that it came to nothing; with "" it does not."""
        if why:
            self.unanswered[b"failed"] = f"the agent failed: {why[:_SHOWN]}"

    @property
    def busy(self) -> bool:
        """Whether a turn is under way."""
        return any(not answering.task.done() for answering in self._answers.values())

    def end(self) -> None:
        """Seal it; turns under way are broken off."""
        self.state = "ended"
        self.ended.set()
        for answering in self._answers.values():
            answering.task.cancel()

    def _look_at(self) -> None:
        if self.state == "ended":
            self.stragglers += 1
            raise SessionEnded(self.id)
        self.asked_at = time.monotonic()

    def _turn_calls(self) -> list[RecordedCall]:
        return [call for call in self.session.calls if len(call.asked) == blake2b.MAX_DIGEST_SIZE]

    def _turns_counted(self) -> int:
        """One that gave no reply counts once, however often it was tried."""
        calls = self._turn_calls()
        replied = sum(call.reply is not None for call in calls)
        return replied + len({call.asked for call in calls if call.reply is None})

    def _answering(self, asked: AskedTurn, how: Attempt) -> _Answering:
        """The reply to this request, begun if it is a new one. A client that says that it is its first try means a new
        turn, though it may ask the same as before."""
        digest = _digest(asked)
        name = how.key or digest
        known, told = self._answers.get(name), self._told.get(how.key)
        if (known is not None and known.digest != digest) or (told is not None and told[0] != digest):
            raise RefusedRequest("Idempotency-Key", "was the key of another request", "one key for each request")
        if known is not None and known.usable and (how.key or how.attempt != 0):
            self.retries += 1
            return known
        recorded = self._on_record[digest] > 0
        if not (recorded or told) and max(len(self._answers), self._turns_counted()) >= self.speaker.config.turns:
            allowed = f"at most {self.speaker.config.turns:,} turns of one session"
            raise RefusedRequest("messages", "another turn", allowed)
        self._on_record[digest] -= recorded
        task = asyncio.create_task(self._watched(asked, digest, how.key), name=f"a turn of {self.id}")
        task.add_done_callback(lambda done: done.cancelled() or done.exception())  # told to those who wait, if any
        if known is not None and not known.task.done():
            name = f"{how.attempt} {len(self._answers)}"  # of two equal turns under way, retries get the first
        self._answers[name] = _Answering(digest, task)
        return self._answers[name]

    async def _watched(self, asked: AskedTurn, digest: bytes, key: str) -> SaidTurn:
        try:
            said = await self._turn(asked, digest, key)
        except RefusedRequest:
            raise
        except Exception as error:  # of an engine, of the record, or a bug: the agent may go on as if nothing had been
            self.unanswered[digest] = f"a turn gave no reply: {type(error).__name__}: {error}"
            raise
        self.unanswered.pop(digest, None)
        return said

    async def _turn(self, asked: AskedTurn, digest: bytes, key: str) -> SaidTurn:
        owner, seconds = f"session {self.id}", self.speaker.config.turn_seconds

        async def run() -> bytes:
            history = self._history(asked)
            prompt = await self._prompt(history, asked.tools)
            sampling = self.speaker.rule.sampling(asked, len(prompt.tokens))
            self._bridge.begin(history, prompt)
            turn = await self.session.turn(prompt.tokens, sampling, prompt.cause)
            said = self.speaker.teller.said(asked, turn, prompt.tokens, self.id, self.created)
            self.as_json += prompt.likeness is Likeness.EQUAL_AS_JSON
            behind = prompt.behind
            new = prompt.history[len(behind.history) :] if behind else prompt.history
            self.unapplied.update(self.speaker.rule.unapplied(asked))
            record = TurnRecord(said, turn.node, behind.id if behind else "", new, prompt.tools, key)
            return msgspec.json.encode(record)

        if key in self._told and key not in self._waiting:  # another request with this body has taken its reply
            return self._told[key][1]
        async with deadline(owner, "a turn", seconds):
            self.session.prefer(digest, lambda reply: msgspec.json.decode(reply, type=TurnRecord).key == key)
            # What an agent has been told is on record, whatever happens next.
            reply = await self.session.call(digest, run, repeatable=True, durable=True)
        record = msgspec.json.decode(reply, type=TurnRecord)
        self.session.claim(record.node)
        self._hold(record, live=True)
        self._note(digest, record)
        self._waiting.discard(record.key)
        self.last_text = record.said.message.text
        return record.said

    def _history(self, asked: AskedTurn) -> tuple[Message, ...]:
        """The whole of it, also when the request names an earlier reply."""
        history = asked.messages
        if asked.previous:
            before = self._bridge.turn(asked.previous)
            if before is None:
                raise RefusedRequest("previous_response_id", "unknown in this session", "the id of an earlier reply")
            held, system = before.history, history[:1] if history[0].role == "system" else ()
            if system and held[0].role == "system":  # instructions are told each time, and are not messages behind
                held = held[1:]
            history = (*system, *held, *history[len(system) :])
        return history

    async def _prompt(self, history: tuple[Message, ...], tools: tuple[Tool, ...]) -> NextPrompt:
        size = sum(map(_characters, history)) + len(msgspec.json.encode(tools).decode())
        most = self.speaker.rule.context * self.speaker.teller.longest_token
        if size > most:  # more tokens than the context has, however it is encoded
            allowed = f"at most {most:,}, which no context of {self.speaker.rule.context:,} tokens goes beyond"
            raise RefusedRequest("messages", f"{size:,} characters", allowed)
        try:
            if size > _LONG_TEXT:
                return await asyncio.to_thread(self._bridge.next, history, tools)
            return self._bridge.next(history, tools)
        except DataError as error:
            problem = error.problems[0]
            raise RefusedRequest("messages", problem.found[:400], problem.remedy[:400] or "see the template") from None

    def _note(self, digest: bytes, record: TurnRecord) -> None:
        if record.key:
            self._told[record.key] = digest, record.said

    def _hold(self, record: TurnRecord, *, live: bool) -> None:
        behind = self._bridge.turn(record.behind) if record.behind else None
        before = behind.history if behind else ()
        tokens = self.session.forest.tokens(record.node)
        history = (*before, *record.new, record.said.message)
        self._bridge.hold(HeldTurn(record.said.id, history, record.tools, tokens, live))


def _digest(asked: AskedTurn) -> bytes:
    return blake2b(msgspec.json.encode(asked, order="deterministic")).digest()


def _characters(message: Message) -> int:
    calls = sum(len(call.name) + len(call.arguments) for call in message.calls)
    return len(message.text) + len(message.reasoning) + calls


def shown(session: AgentSession) -> dict[str, Any]:
    """The session as ``GET /sessions/ID`` tells it."""
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
    """Nothing in place of a turn that has not ended."""
    unfinished = segment.sampled and segment.stop_reason is None
    return Segment(parent=segment.parent, cause=segment.cause) if unfinished else segment
