"""Groups of trajectories: a workflow runs once for each member, in its own session."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from stretto.conversation.forest import Tokens
from stretto.conversation.session import Session
from stretto.core.records import Prompt, Trajectory, trajectory_id
from stretto.core.tasks import gather_or_cancel
from stretto.rollout.controller import Ticket
from stretto.worlds.workflows.exchange import Exchange, Services
from stretto.worlds.workflows.pool import WorkflowPool
from stretto.worlds.workflows.task import ChatMessage, WorkflowTask


@dataclass(frozen=True)
class QuestionDetails:
    """Data of questions for workflows, beside their prompts.

    Attributes:
        fields: further fields of each row (JSON object), by prompt text and gold answer.
        chats: messages of questions that are chats, by prompt text and gold answer.
    """

    fields: Mapping[tuple[str, str], str] = field(default_factory=dict)
    chats: Mapping[tuple[str, str], Sequence[ChatMessage]] = field(default_factory=dict)

    def is_chat(self, prompt: Prompt) -> bool:
        """Whether the prompt was rendered by the chat template."""
        return (prompt.text, prompt.answer) in self.chats

    def task(self, prompt: Prompt, member: int, seed: int) -> WorkflowTask:
        """Make the task of one member of the prompt's group; `seed` is the member's."""
        key = (prompt.text, prompt.answer)
        messages = tuple(self.chats.get(key) or ({"role": "user", "content": prompt.text},))
        fields = json.loads(self.fields.get(key) or "{}")
        return WorkflowTask(prompt.id, prompt.text, prompt.answer, messages, fields, seed, member)


@dataclass(frozen=True)
class WorkflowGroups:
    """Runs the workflow for each member of a group (satisfies `worlds.single_turn.GroupWorkflow`).

    Attributes:
        open_session: called with trajectory id, prompt tokens and seed; returns the session that records the turns.
    """

    pool: WorkflowPool
    open_session: Callable[[str, Tokens, int], Session]
    questions: QuestionDetails
    services: Services

    async def __call__(self, ticket: Ticket) -> Sequence[Trajectory]:
        prompt = ticket.draw.prompt
        ids = [trajectory_id(ticket.group_id, member) for member in ticket.members]
        return await gather_or_cancel(
            *(self.member(id, prompt, *one) for id, one in zip(ids, enumerate(ticket.seeds), strict=True))
        )

    async def member(self, id: str, prompt: Prompt, member: int, seed: int) -> Trajectory:
        """Run the workflow for one member; returns its trajectory."""
        session = self.open_session(id, prompt.token_ids, seed)
        task = self.questions.task(prompt, member, seed)
        rendering = self.services.template if self.questions.is_chat(prompt) else None
        return await self.pool.run(Exchange(session, prompt, task, self.services, rendering))
