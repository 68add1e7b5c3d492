"""Groups of trajectories, each made by an agent in a session of its own.

    ticket ─► session ─► program started, or a service that asks for it ─► end ─► reward ─► trajectory

After a crash of the conductor, an unfinished agent is started again; its recorded turns are replayed until it deviates
from them. An agent that fails makes an undecided trajectory with the reason, never a reward of zero.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec

import stretto
import stretto_gateway
from stretto.conversation.forest import Tokens
from stretto.conversation.session import Session
from stretto.core.records import Outcome, Prompt, Record, Trajectory, Verdict, trajectory_id
from stretto.core.tasks import cancel_and_wait, first_of, gather_or_cancel
from stretto.launch.recipe.agents import AgentConfig
from stretto.rollout.controller import Ticket
from stretto.rollout.failures import RecentFailures
from stretto_gateway.agents.environment import environment_of
from stretto_gateway.agents.programs import run_program
from stretto_gateway.model import ServedModel
from stretto_gateway.sessions.agent_session import AgentSession, GivenRewards
from stretto_gateway.sessions.sessions import NothingWaits, SessionTable, new_key

_LINGER_SECONDS = 5.0  # for a program whose session it has ended itself
_CREATED, _REWARDED, _ENDED = b"created", b"reward ", b"ended"
_NOT_STARTED = "the agent could not be started"
_TASK_BYTES = 130_000  # as JSON; Linux allows 131,072 for a variable and its name

#: Judges texts by the rewards of the run, by (prompt, completions, gold answer).
ScoreText = Callable[[str, Sequence[str], str], Awaitable[Sequence[Verdict]]]


@dataclass(frozen=True)
class AgentServices:
    """Services of a run for its agents.

    Attributes:
        room: limit on agents that run at once, those of concurrent evaluations included.
        verdict: makes a verdict of a number given over HTTP.
        task: the part of a task that an agent sees: the prompt, its member and its seed.
    """

    table: SessionTable
    model: ServedModel
    address: str
    room: asyncio.Semaphore
    score: ScoreText
    verdict: Callable[[float], Verdict]
    decode: Callable[[Tokens], str]
    task: Callable[[Prompt, int, int], Mapping[str, Any]]


class Sealed(Record, frozen=True):
    """Recorded result of an ended session: nodes of its turns, and the fields of `AgentSession`."""

    nodes: tuple[int, ...]
    last_text: str
    reward: float | None
    broken: str
    by_turn: Mapping[int, float] = {}

    def restore(self, session: AgentSession) -> None:
        """Restore the end of a session that an earlier process of the run ended."""
        for node in self.nodes:
            session.session.claim(node)
        session.last_text, session.given = self.last_text, GivenRewards(self.reward, self.by_turn, self.nodes)
        if self.broken:
            session.unanswered[b""] = self.broken
        session.end()


@dataclass
class WaitingSessions:
    """Sessions that wait for external services (satisfies `gateway.sessions.sessions.Host`)."""

    waiting: deque[AgentSession] = field(default_factory=deque)

    async def open(self, about: Mapping[str, Any]) -> AgentSession:
        """See `Host`; the task comes from the run."""
        while self.waiting:
            session = self.waiting.popleft()
            if session.state == "open":
                return session
        raise NothingWaits

    async def rewarded(self, session: AgentSession) -> None:
        """See `Host`."""

        async def run() -> bytes:
            return msgspec.json.encode(session.given)

        number = len(session.session.calls)  # two rewards are two calls, equal ones too
        await session.session.call(b"%b%d" % (_REWARDED, number), run, repeatable=True, durable=True)

    async def ended(self, session: AgentSession) -> None:
        """See `Host`."""

        async def run() -> bytes:
            nodes, given = tuple(session.session.returned), session.rewards
            return msgspec.json.encode(Sealed(nodes, session.last_text, given.reward, session.broken, given.by_turn))

        await session.session.call(_ENDED, run, repeatable=True, durable=True)


@dataclass
class AgentGroups:
    """Makes a group of trajectories by an agent (satisfies `worlds.single_turn.GroupWorkflow`)."""

    config: AgentConfig
    services: AgentServices
    open_session: Callable[[str, Tokens, int], Session]
    host: WaitingSessions

    def __post_init__(self) -> None:
        self._failures = RecentFailures(self.config.max_failed, "agent")

    @property
    def ended(self) -> int:
        """Number of trajectories that have ended: a sign of progress."""
        return self._failures.ended

    async def __call__(self, ticket: Ticket) -> Sequence[Trajectory]:
        prompt = ticket.draw.prompt
        members = zip(ticket.members, ticket.seeds, strict=True)
        ids = [(trajectory_id(ticket.group_id, member), member, seed) for member, seed in members]
        return await gather_or_cancel(*(self.member(id, prompt, member, seed) for id, member, seed in ids))

    async def member(self, id: str, prompt: Prompt, member: int, seed: int) -> Trajectory:
        """Make one trajectory.

        Raises:
            WorkflowError: most of the last trajectories failed.
        """
        async with self.services.room:
            session = await self._opened(id, prompt, member, seed)
            self.services.table.add(session)
            try:
                failure = await self._end_of(session)
            finally:
                self.services.table.retire(session)
        trajectory = await self._trajectory(session, prompt, failure)
        self._failures.count(trajectory)
        return trajectory

    async def _opened(self, id: str, prompt: Prompt, member: int, seed: int) -> AgentSession:
        services = self.services
        session = self.open_session(id, prompt.token_ids, seed)
        created = int(await session.call(_CREATED, _now, repeatable=True))
        # New ones at each opening: an evaluation has the same trajectories again, and old keys must not open them.
        name, key = new_key(), new_key()
        found = AgentSession(name, key, created, services.task(prompt, member, seed), session, services.model)
        for call in session.calls:
            if call.reply is not None and call.asked.startswith(_REWARDED):
                found.given = msgspec.json.decode(call.reply, type=GivenRewards)
            elif call.reply is not None and call.asked == _ENDED:
                msgspec.json.decode(call.reply, type=Sealed).restore(found)
        return found

    async def _end_of(self, session: AgentSession) -> str:
        """Wait for the end of the agent; returns why it failed, "" if it did not."""
        if session.state == "ended":
            return ""
        try:
            async with asyncio.timeout(self.config.deadline):
                if not (self.config.command or self.config.function):
                    self.host.waiting.append(session)
                    await session.ended.wait()
                    return ""
                return await self._program(session)
        except TimeoutError:
            return f"the agent took more than {self.config.deadline:g} s (workflow.deadline)"
        except OSError as error:
            return f"{_NOT_STARTED}: {error.strerror or error}"
        finally:
            session.end()

    async def _program(self, session: AgentSession) -> str:
        config, services = self.config, self.services
        task = json.dumps(dict(session.about))
        if len(task) > _TASK_BYTES:
            return f"{_NOT_STARTED}: its task has {len(task):,} bytes, and its environment holds {_TASK_BYTES:,}"
        environment = environment_of(os.environ, services.address, session.id, session.key, services.model.name, task)
        command = config.command
        if config.function is not None:
            command = (sys.executable, "-m", "stretto_gateway.agents.call", config.function)
            ours = dict.fromkeys(str(Path(str(one.__file__)).parents[1]) for one in (stretto, stretto_gateway))
            environment["PYTHONPATH"] = os.pathsep.join(filter(None, (*ours, environment.get("PYTHONPATH"))))
        running = asyncio.ensure_future(run_program(command, environment, config.path))
        sealed = asyncio.ensure_future(session.ended.wait())
        try:
            await first_of(running, sealed)
            if not running.done():  # it has ended its session itself
                await asyncio.wait([running], timeout=_LINGER_SECONDS)
            if not running.done():
                return ""
            ended = running.result()  # clients print addresses, which have the key in them
            failure = replace(ended, said=ended.said.replace(session.key, "KEY")).failure
            if not failure and session.state == "open":
                await self.host.ended(session)
            return failure
        finally:
            session.end()  # first: what its program still asks for finds no group that is in flight
            await cancel_and_wait([running, sealed])

    async def _trajectory(self, session: AgentSession, prompt: Prompt, failure: str) -> Trajectory:
        services, given = self.services, session.rewards
        segments = session.session.segments(given.by_turn)
        failure = failure or session.broken
        if not failure and not segments:
            failure = "the agent has ended without a completion"
        if failure:
            verdict = Verdict(Outcome.UNDECIDED, None, failure)
        elif given.reward is not None:
            verdict = services.verdict(given.reward)
        else:
            [verdict] = await services.score(prompt.text, [session.last_text], prompt.answer)
        text = services.decode(tuple(token for segment in segments for token in segment.token_ids))
        return Trajectory(session.session.id, segments, verdict, text, session.id)


async def _now() -> bytes:
    return msgspec.json.encode(int(time.time()))
