"""Held-out accuracy: each prompt answered once, sampled with a seed of its own that never changes."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Protocol

import msgspec

from stretto.core.errors import EngineLost
from stretto.core.records import Completion, GenerateRequest, Outcome, Prompt, Record, Sampling, derive_seed
from stretto.rollout.protocols import Detokenize, Score
from stretto.store.samples import Sample

_TOGETHER = 64  # prompts that are asked together
_AT_ONCE = 4  # such portions under way
_LOSSES = 3
_PREFIX = "evaluation."


class GenerateTogether(Protocol):
    """One answer to each of several prompts that are asked together, each as soon as it is whole."""

    def __call__(self, *requests: GenerateRequest) -> AsyncIterator[Completion]: ...


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

    `tally` is told the tokens of each answer as it comes: also of an evaluation that is cut short later. `keep` gets
    the judged completions of a whole evaluation.
    """

    prompts: Sequence[Prompt]
    sampling: Sampling
    seed: int
    generate: GenerateTogether
    score: Score
    detokenize: Detokenize
    tally: Callable[[int], None] = lambda tokens: None
    keep: Callable[[Sequence[Sample]], None] = lambda samples: None

    async def __call__(self) -> Evaluation:
        """Answer and judge every prompt; each wait inside has its own deadline.

        Which prompts are asked together is always the same, so that engines which have nothing else to do come to the
        same numbers each time.
        """
        room = asyncio.Semaphore(_AT_ONCE)
        parts = [self.prompts[start : start + _TOGETHER] for start in range(0, len(self.prompts), _TOGETHER)]
        answers = list(chain.from_iterable(await asyncio.gather(*(self._answer(part, room) for part in parts))))
        outcomes = [sample.outcome for sample, _ in answers]
        version = max(sample.versions[-1] for sample, _ in answers)
        self.keep([msgspec.structs.replace(sample, version=version) for sample, _ in answers])
        return Evaluation(
            version=version,
            prompts=len(answers),
            right=outcomes.count(Outcome.RIGHT),
            undecided=outcomes.count(Outcome.UNDECIDED),
            tokens=sum(tokens for _, tokens in answers),
        )

    async def _answer(self, prompts: Sequence[Prompt], room: asyncio.Semaphore) -> list[tuple[Sample, int]]:
        """Of each prompt the judged completion, and how many tokens that has."""
        async with room:
            completions = await self._completions([self._request(prompt) for prompt in prompts])
        return await asyncio.gather(*(self._judge(prompt, completions[prompt.id]) for prompt in prompts))

    def _request(self, prompt: Prompt) -> GenerateRequest:
        return GenerateRequest(
            id=f"{_PREFIX}{prompt.id}",
            prompt_token_ids=prompt.token_ids,
            seeds=(derive_seed(self.seed, prompt.id),),
            sampling=self.sampling,
        )

    async def _completions(self, requests: Sequence[GenerateRequest]) -> dict[str, Completion]:
        """By prompt. An engine that is lost in mid-answer is replaced, and asked again."""
        for _ in range(_LOSSES):
            with contextlib.suppress(EngineLost):
                return await self._asked(requests)
        return await self._asked(requests)

    async def _asked(self, requests: Sequence[GenerateRequest]) -> dict[str, Completion]:
        found: dict[str, Completion] = {}
        async for completion in self.generate(*requests):
            self.tally(len(completion.token_ids))
            found[completion.request.removeprefix(_PREFIX)] = completion
        return found

    async def _judge(self, prompt: Prompt, completion: Completion) -> tuple[Sample, int]:
        text = self.detokenize(completion.token_ids)
        (verdict,) = await self.score(prompt.text, [text], prompt.answer)
        return Sample.of(prompt, completion, text, verdict), len(completion.token_ids)
