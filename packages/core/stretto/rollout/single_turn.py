"""Workflow of a single turn. It turns a ticket (an admitted prompt) into the judged trajectories of its group."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass

from stretto.core.columns import view_of_ids
from stretto.core.records import Completion, GenerateRequest, Prompt, Sampling, Trajectory, Verdict, trajectory_id
from stretto.rollout.controller import Ticket
from stretto_verify.thoughts import with_opening

#: Judges completions: called with prompt, completions and gold answer, returns one verdict per completion, in order.
#: An undecided verdict is returned, not raised.
Score = Callable[[str, Sequence[str], str], Awaitable[Sequence[Verdict]]]
#: Decodes token ids to text, without special tokens other than those that mark thoughts. The ids may be packed.
Detokenize = Callable[[Sequence[int]], str]


#: Generates and judges the group of one ticket; returns its trajectories.
GroupWorkflow = Callable[[Ticket], Awaitable[Sequence[Trajectory]]]


@dataclass(frozen=True)
class SingleTurn:
    """Samples one completion for each member of a group and judges them together when the last has ended. It is the
    `GroupWorkflow` of a run without workflows. Errors of `generate` and `score` are raised unchanged.

    One request asks for all members, so that a group of eight costs the conductor one message. `generate` sends it to
    an engine, and yields each member's completion as it ends.
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
    """Judge single-turn completions of one prompt together; returns their trajectories in order.

    If the prompt ends in an open thinking tag, that tag is put before each text that `score` gets, but not before the
    trajectories' texts.
    """
    segments = [completion.segment for completion in completions]
    texts = [detokenize(view_of_ids(segment.columns, segment.length)) for segment in segments]
    verdicts = await score(prompt.text, [with_opening(text, prompt.opens) for text in texts], prompt.answer)
    return [
        Trajectory(
            id=trajectory_id(group_id, completion.member), segments=(completion.segment,), verdict=verdict, text=text
        )
        for completion, text, verdict in zip(completions, texts, verdicts, strict=True)
    ]
