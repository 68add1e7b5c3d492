"""Held-out accuracy: each prompt answered once, sampled with a seed of its own that never changes."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from itertools import chain

import msgspec

from stretto.core.engine import Generate
from stretto.core.errors import EngineLost
from stretto.core.events import Span
from stretto.core.records import Completion, GenerateRequest, Outcome, Prompt, Sampling, Update, derive_seed
from stretto.core.tasks import cancel_and_wait
from stretto.loop.records.evaluation import Evaluation
from stretto.loop.records.recorder import Recorder
from stretto.rollout.protocols import Detokenize, Score
from stretto.store.series.samples import SampledCompletion

_TOGETHER = 64  # prompts that are asked together
_AT_ONCE = 4  # such portions under way
_LOSSES = 3
_PREFIX = "evaluation."


@dataclass(frozen=True)
class Evaluator:
    """Asks engines and rewards like the training loop does, beside it or alone.

    `tally` is told the tokens of each answer as it comes: also of an evaluation that is cut short later. `keep` gets
    the judged completions of a whole evaluation.
    """

    prompts: Sequence[Prompt]
    sampling: Sampling
    seed: int
    generate: Generate
    score: Score
    detokenize: Detokenize
    tally: Callable[[int], None] = lambda tokens: None
    keep: Callable[[Sequence[SampledCompletion]], None] = lambda samples: None

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

    async def _answer(self, prompts: Sequence[Prompt], room: asyncio.Semaphore) -> list[tuple[SampledCompletion, int]]:
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

    async def _judge(self, prompt: Prompt, completion: Completion) -> tuple[SampledCompletion, int]:
        text = self.detokenize(completion.token_ids)
        (verdict,) = await self.score(prompt.text, [text], prompt.answer)
        return SampledCompletion.of(prompt, completion.versions, text, verdict), len(completion.token_ids)


class PeriodicEvaluation:
    """Evaluates now and then beside the training, one evaluation at a time."""

    def __init__(self, evaluate: Callable[[], Awaitable[Evaluation]], recorder: Recorder, every: int) -> None:
        self._evaluate, self._recorder, self._every = evaluate, recorder, every
        self._running: asyncio.Task[None] | None = None

    def after(self, update: Update) -> None:
        """Start an evaluation if one is due and none is under way."""
        if self._every and update.step % self._every == 0 and (self._running is None or self._running.done()):
            self.check()
            self._running = asyncio.create_task(self.examine(update.step))

    async def examine(self, step: int) -> None:
        """Evaluate and record."""
        start = time.monotonic()
        evaluation = await self._evaluate()
        self._recorder.evaluated(evaluation, step)
        span = Span(role="conductor", name="evaluate", start=start, end=time.monotonic(), version=evaluation.version)
        self._recorder.spans([span])

    def check(self) -> None:
        """Raise what the last evaluation failed of, if it did."""
        if self._running is not None and self._running.done() and not self._running.cancelled():
            self._running.result()

    async def end(self) -> None:
        """Wait for the evaluation under way; each of its waits has a deadline."""
        if self._running is not None:
            await self._running

    async def close(self) -> None:
        """Put the evaluation under way away, if there is one."""
        if self._running is not None:
            await cancel_and_wait([self._running])
