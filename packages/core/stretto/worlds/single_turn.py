"""The workflow of a single turn. A workflow makes the judged trajectories of a group from its ticket."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from stretto.core.records import Completion, GenerateRequest, Prompt, Sampling, Trajectory, Verdict, trajectory_id
from stretto.rollout.controller import Ticket
from stretto_verify.thoughts import with_opening


class Score(Protocol):
    """A verdict for each completion, in their order. Undecided is a verdict, not an exception."""

    async def __call__(self, prompt: str, completions: Sequence[str], answer: str) -> Sequence[Verdict]: ...


class Detokenize(Protocol):
    """Token ids to text; special tokens are left out, but for marks of thoughts."""

    def __call__(self, token_ids: Sequence[int], /) -> str: ...


class GroupWorkflow(Protocol):
    """From a ticket to the judged trajectories of its group."""

    async def __call__(self, ticket: Ticket, /) -> Sequence[Trajectory]: ...


@dataclass(frozen=True)
class SingleTurn:
    """Sample one completion for each member, judge each.

    The completions of a group are judged together when the last of them has ended; other groups are generated
    meanwhile. One request for a group of eight costs the conductor one message in place of eight.
    """

    generate: Callable[[GenerateRequest], AsyncIterator[Completion]]
    score: Score
    detokenize: Detokenize
    sampling: Sampling

    async def __call__(self, ticket: Ticket) -> Sequence[Trajectory]:
        prompt, id = ticket.draw.prompt, ticket.group_id
        request = GenerateRequest(id=id, prompt_token_ids=prompt.token_ids, seeds=ticket.seeds, sampling=self.sampling)
        completions = [completion async for completion in self.generate(request)]
        return await judge(id, prompt, completions, self.score, self.detokenize)


async def judge(
    group_id: str, prompt: Prompt, completions: Sequence[Completion], score: Score, detokenize: Detokenize
) -> list[Trajectory]:
    """The trajectories of a group of single turns, judged together.

    The reward gets a completion that ends within a thought of its prompt behind that thought's mark.
    """
    texts = [detokenize(completion.token_ids) for completion in completions]
    verdicts = await score(prompt.text, [with_opening(text, prompt.opens) for text in texts], prompt.answer)
    return [
        Trajectory(
            id=trajectory_id(group_id, completion.member), segments=(completion.segment,), verdict=verdict, text=text
        )
        for completion, text, verdict in zip(completions, texts, verdicts, strict=True)
    ]
