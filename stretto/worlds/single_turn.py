"""What happens between a question and its judged answers. One turn here; a workflow of more turns is a sibling."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from stretto.core.records import Completion, Trajectory, Verdict, trajectory_id
from stretto.rollout.controller import Ticket
from stretto.rollout.protocols import Detokenize, Generate, Score


class Workflow(Protocol):
    """From a ticket to the judged answers of its group."""

    async def __call__(self, ticket: Ticket, /) -> Sequence[Trajectory]: ...


@dataclass(frozen=True)
class SingleTurn:
    """Ask once, judge each answer.

    The answers of one group are judged together when the last of them is whole; other groups go on being generated
    meanwhile. Judging them one by one costs the conductor eight messages in place of one.
    """

    generate: Generate
    score: Score
    detokenize: Detokenize

    async def __call__(self, ticket: Ticket) -> Sequence[Trajectory]:
        completions = [completion async for completion in self.generate(ticket.request)]
        texts = [self.detokenize(completion.token_ids) for completion in completions]
        prompt = ticket.draw.prompt
        verdicts = await self.score(prompt.text, texts, prompt.answer)
        return [
            _trajectory(ticket, completion, text, verdict=verdict)
            for completion, text, verdict in zip(completions, texts, verdicts, strict=True)
        ]


def _trajectory(ticket: Ticket, completion: Completion, text: str, verdict: Verdict) -> Trajectory:
    return Trajectory(
        id=trajectory_id(ticket.group_id, completion.member), completion=completion, verdict=verdict, text=text
    )
