"""Held-out accuracy: each prompt answered once, sampled with a seed of its own that never changes."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from stretto.core.errors import EngineLost
from stretto.core.records import Completion, GenerateRequest, Outcome, Prompt, Record, Sampling, derive_seed
from stretto.rollout.protocols import Detokenize, Generate, Score

_AT_ONCE = 256
_LOSSES = 3


class Evaluation(Record, frozen=True):
    """What was measured. Undecided answers count as not right, and are counted apart.

    `version` is the newest version that sampled any of the tokens; `tokens` counts the answers' tokens.
    """

    version: int
    prompts: int
    right: int
    undecided: int
    tokens: int

    @property
    def accuracy(self) -> float:
        return self.right / self.prompts

    def __str__(self) -> str:
        note = f", {self.undecided} undecided" if self.undecided else ""
        return f"accuracy {self.accuracy:.4f}: {self.right} of {self.prompts} right{note}"

    def as_json(self) -> str:
        """One object with every field and the accuracy."""
        return msgspec.json.encode(msgspec.structs.asdict(self) | {"accuracy": self.accuracy}).decode()


@dataclass(frozen=True)
class Evaluator:
    """Asks engines and rewards like the training loop does, beside it or alone.

    `tally` is told the tokens of each answer as it comes: also of an evaluation that is cut short later.
    """

    prompts: Sequence[Prompt]
    sampling: Sampling
    seed: int
    generate: Generate
    score: Score
    detokenize: Detokenize
    tally: Callable[[int], None] = lambda tokens: None

    async def __call__(self) -> Evaluation:
        """Answer and judge every prompt; each wait inside has its own deadline."""
        room = asyncio.Semaphore(_AT_ONCE)
        answers = await asyncio.gather(*(self._answer(prompt, room) for prompt in self.prompts))
        outcomes = [outcome for outcome, _, _ in answers]
        return Evaluation(
            version=max(version for _, version, _ in answers),
            prompts=len(answers),
            right=outcomes.count(Outcome.RIGHT),
            undecided=outcomes.count(Outcome.UNDECIDED),
            tokens=sum(tokens for _, _, tokens in answers),
        )

    async def _completion(self, request: GenerateRequest) -> Completion:
        """An engine that is lost in mid-answer is replaced, and asked again."""
        for _ in range(_LOSSES):
            with contextlib.suppress(EngineLost):
                return await self._asked(request)
        return await self._asked(request)

    async def _asked(self, request: GenerateRequest) -> Completion:
        (completion,) = [completion async for completion in self.generate(request)]
        return completion

    async def _answer(self, prompt: Prompt, room: asyncio.Semaphore) -> tuple[Outcome, int, int]:
        request = GenerateRequest(
            id=f"evaluation.{prompt.id}",
            prompt_token_ids=prompt.token_ids,
            seeds=(derive_seed(self.seed, prompt.id),),
            sampling=self.sampling,
        )
        async with room:
            completion = await self._completion(request)
            self.tally(len(completion.token_ids))
        (verdict,) = await self.score(prompt.text, [self.detokenize(completion.token_ids)], prompt.answer)
        return verdict.outcome, completion.versions[-1], len(completion.token_ids)
