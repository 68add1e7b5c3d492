"""Groups of trajectories: an agent runs once for each member, in its own session.

    ticket ─► session ─► a program is started, or a service requests the session ─► end ─► reward ─► trajectory

After a crash of the conductor, an unfinished agent is started again; it gets its recorded turns until it sends a
different request. If an agent fails, its trajectory is undecided, with the reason; it never gets a reward of zero.
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
from stretto.core.forest import Tokens
from stretto.core.records import Outcome, Prompt, Record, Trajectory, Verdict, trajectory_id
from stretto.core.tasks import cancel_and_wait, first_of, gather_or_cancel
from stretto.launch.recipe.extensions import AgentConfig
from stretto.rollout.controller import Ticket
from stretto_gateway.agents.environment import environment_of
from stretto_gateway.agents.programs import run_program
from stretto_gateway.model import ServedModel
from stretto_gateway.requests import NotServed
from stretto_gateway.sessions.agent_session import AgentSession, GivenRewards
from stretto_gateway.sessions.sessions import SessionTable, new_key
from stretto_workflows.failures import RecentFailures
from stretto_workflows.session import Session

_LINGER_SECONDS = 5.0  # in which a program that has ended its session itself may exit
_CREATED, _REWARDED, _ENDED = b"created", b"reward ", b"ended"
_NOT_STARTED = "the agent could not be started"
_TASK_BYTES = 130_000  # as JSON; Linux allows 131,072 for a variable and its name

#: Judges texts by the run's reward: called with prompt, completions and gold answer, returns a verdict for each.
ScoreText = Callable[[str, Sequence[str], str], Awaitable[Sequence[Verdict]]]


@dataclass(frozen=True)
class AgentServices:
    """Services of a run for its agents.

    Attributes:
        table: sessions that the gateway serves.
        model: the served model.
        address: address of the gateway, ``http://host:port``.
        room: limit on agents that run at once, those of concurrent evaluations included.
        score: judges completions by the run's reward.
        verdict: converts a reward that was given over HTTP to a verdict.
        decode: converts token ids to text.
        task: makes the task that an agent gets, from the prompt, the index of the member in its group, and its seed.
        arguments: returns the arguments of the chat template for the question of a prompt.
    """

    table: SessionTable
    model: ServedModel
    address: str
    room: asyncio.Semaphore
    score: ScoreText
    verdict: Callable[[float], Verdict]
    decode: Callable[[Tokens], str]
    task: Callable[[Prompt, int, int], Mapping[str, Any]]
    arguments: Callable[[Prompt], Mapping[str, Any]] = lambda prompt: {}


class _Sealed(Record, frozen=True):
    """Recorded result of an ended session. `nodes`: node ids of the turns that the agent got; `last_text`: text of the
    last one; `reward`: reward of the trajectory, None if none was given; `by_turn`: rewards of turns by node; `broken`:
    why the trajectory is undecided, "" if it is not."""

    nodes: tuple[int, ...]
    last_text: str
    reward: float | None
    broken: str
    by_turn: Mapping[int, float] = {}

    def restore(self, session: AgentSession) -> None:
        """Set this result on a session that ended in an earlier process of the run, and end it."""
        for node in self.nodes:
            session.session.claim(node)
        session.last_text, session.given = self.last_text, GivenRewards(self.reward, self.by_turn, self.nodes)
        if self.broken:
            session.unanswered[b""] = self.broken
        session.end()


@dataclass
class WaitingSessions:
    """Queue of the run's sessions that wait for external services; records rewards and ends in the run folder
    (satisfies `stretto_gateway.sessions.sessions.Host`)."""

    waiting: deque[AgentSession] = field(default_factory=deque)

    async def open(self, about: Mapping[str, Any]) -> AgentSession:
        """Take the open session that has waited for longest out of the queue and return it. `about` is not used,
        because the task comes from the run.

        Raises:
            NotServed: no session waits; the client may try again.
        """
        while self.waiting:
            session = self.waiting.popleft()
            if session.state == "open":
                return session
        raise NotServed(503, "no trajectory of the run waits for a service; try again later", code="unavailable")

    async def served(self, session: AgentSession) -> None:
        """Queue a session for a service, and wait until it has ended. If the wait is cancelled, no service gets it."""
        self.waiting.append(session)
        try:
            await session.ended.wait()
        finally:
            if session in self.waiting:
                self.waiting.remove(session)

    async def rewarded(self, session: AgentSession) -> None:
        async def run() -> bytes:
            return msgspec.json.encode(session.given)

        number = len(session.session.calls)  # makes each reward a call of its own, also if it equals an earlier one
        await session.session.call(b"%b%d" % (_REWARDED, number), run, repeatable=True, durable=True)

    async def ended(self, session: AgentSession) -> None:
        async def run() -> bytes:
            nodes, given = tuple(session.session.returned), session.rewards
            return msgspec.json.encode(_Sealed(nodes, session.last_text, given.reward, session.broken, given.by_turn))

        await session.session.call(_ENDED, run, repeatable=True, durable=True)


@dataclass
class AgentGroups:
    """Runs the agent for each member of a group (satisfies `rollout.single_turn.GroupWorkflow`).

    Attributes:
        open_session: called with trajectory id, prompt tokens and seed; returns the session that records the turns.
        host: gives sessions to external services, if the agent is one.
    """

    config: AgentConfig
    services: AgentServices
    open_session: Callable[[str, Tokens, int], Session]
    host: WaitingSessions

    def __post_init__(self) -> None:
        self._failures = RecentFailures(self.config.max_failed, "agent")

    @property
    def ended(self) -> int:
        """Number of trajectories that have ended, failed ones included."""
        return self._failures.ended

    async def __call__(self, ticket: Ticket) -> Sequence[Trajectory]:
        prompt = ticket.draw.prompt
        members = zip(ticket.members, ticket.seeds, strict=True)
        ids = [(trajectory_id(ticket.group_id, member), member, seed) for member, seed in members]
        return await gather_or_cancel(*(self.member(id, prompt, member, seed) for id, member, seed in ids))

    async def member(self, id: str, prompt: Prompt, member: int, seed: int) -> Trajectory:
        """Run the agent for the trajectory `id`, as soon as there is room. Returns the trajectory, undecided with the
        reason if the agent fails. `member`: index of the trajectory in its group.

        Raises:
            WorkflowError: more than the share `workflow.max_failed` of the last trajectories failed.
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
        # Random at each opening, because evaluations repeat trajectories, and an old key must not open a new session.
        name, key = new_key(), new_key()
        task, given = services.task(prompt, member, seed), services.arguments(prompt)
        found = AgentSession(name, key, created, task, session, services.model, template_arguments=given)
        for call in session.calls:
            if call.reply is not None and call.asked.startswith(_REWARDED):
                found.given = msgspec.json.decode(call.reply, type=GivenRewards)
            elif call.reply is not None and call.asked == _ENDED:
                msgspec.json.decode(call.reply, type=_Sealed).restore(found)
        return found

    async def _end_of(self, session: AgentSession) -> str:
        """Start the agent's program, or queue the session for a service, and wait for the agent's end, for
        `workflow.deadline` seconds at most; then end the session. Returns at once for an ended session. Returns why the
        agent failed, "" if it did not."""
        if session.state == "ended":
            return ""
        try:
            async with asyncio.timeout(self.config.deadline):
                if not (self.config.command or self.config.function):
                    await self.host.served(session)
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
            if not running.done():  # the program has ended its session itself
                await asyncio.wait([running], timeout=_LINGER_SECONDS)
            if not running.done():
                return ""
            ended = running.result()  # its output may hold the session's key, in the address that clients print
            failure = replace(ended, said=ended.said.replace(session.key, "KEY")).failure
            if not failure and session.state == "open":
                await self.host.ended(session)
            return failure
        finally:
            session.end()  # first, so that later requests of the program sample nothing for this group
            await cancel_and_wait([running, sealed])

    async def _trajectory(self, session: AgentSession, prompt: Prompt, failure: str) -> Trajectory:
        services, given = self.services, session.rewards
        segments = session.session.segments(given.by_turn)
        if any(call.asked == _ENDED and call.reply is not None for call in session.session.calls):
            failure = ""  # the end that is on record decides, as it does after a crash
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
