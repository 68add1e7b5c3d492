"""Held-out accuracy: one completion for each prompt, sampled with a seed that never changes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from itertools import chain

import msgspec

from stretto.core.engine import Generate
from stretto.core.events import Span
from stretto.core.records import Completion, GenerateRequest, Outcome, Prompt, Sampling, Update, derive_seed
from stretto.core.tasks import cancel_and_wait, gather_or_cancel
from stretto.loop.engines.in_flight import attempts
from stretto.loop.records.recorder import Evaluation, Recorder
from stretto.store.series.samples import SampledCompletion
from stretto.worlds.single_turn import Detokenize, Score

_PORTION = 64  # prompts of one request
_PORTIONS_IN_FLIGHT = 4
_PREFIX = "evaluation."


@dataclass(frozen=True)
class Evaluator:
    """Generates and scores as the training loop does, beside it or alone.

    `count` gets each completion as it ends, also in an evaluation that is cut short. `keep` gets the judged completions
    of a whole evaluation.
    """

    prompts: Sequence[Prompt]
    sampling: Sampling
    seed: int
    generate: Generate
    score: Score
    detokenize: Detokenize
    count: Callable[[Completion], None] = lambda completion: None
    keep: Callable[[Sequence[SampledCompletion]], None] = lambda samples: None

    async def __call__(self) -> Evaluation:
        """Generate and judge a completion for every prompt; each wait inside has its own deadline.

        The portions are always the same, so that engines without other work compute the same numbers each time.
        """
        free = asyncio.Semaphore(_PORTIONS_IN_FLIGHT)
        parts = [self.prompts[start : start + _PORTION] for start in range(0, len(self.prompts), _PORTION)]
        samples = list(chain.from_iterable(await gather_or_cancel(*(self._judged(part, free) for part in parts))))
        outcomes = [sample.outcome for sample, _ in samples]
        version = max(sample.versions[-1] for sample, _ in samples)
        self.keep([msgspec.structs.replace(sample, version=version) for sample, _ in samples])
        return Evaluation(
            version=version,
            prompts=len(samples),
            right=outcomes.count(Outcome.RIGHT),
            undecided=outcomes.count(Outcome.UNDECIDED),
            tokens=sum(tokens for _, tokens in samples),
        )

    async def _judged(self, prompts: Sequence[Prompt], free: asyncio.Semaphore) -> list[tuple[SampledCompletion, int]]:
        """The judged completion of each prompt, and its length."""
        async with free:
            completions = await self._completions([self._request(prompt) for prompt in prompts])
        return await gather_or_cancel(*(self._judge(prompt, completions[prompt.id]) for prompt in prompts))

    def _request(self, prompt: Prompt) -> GenerateRequest:
        return GenerateRequest(
            id=f"{_PREFIX}{prompt.id}",
            prompt_token_ids=prompt.token_ids,
            seeds=(derive_seed(self.seed, prompt.id),),
            sampling=self.sampling,
        )

    async def _completions(self, requests: Sequence[GenerateRequest]) -> dict[str, Completion]:
        """By prompt. When an engine is lost all are asked again, together, so that the numbers stay the same."""
        found: dict[str, Completion] = {}
        for attempt in attempts():
            with attempt:
                async for completion in self.generate(*requests):
                    self.count(completion)
                    found[completion.request.removeprefix(_PREFIX)] = completion
                break
        return found

    async def _judge(self, prompt: Prompt, completion: Completion) -> tuple[SampledCompletion, int]:
        text = self.detokenize(completion.token_ids)
        (verdict,) = await self.score(prompt.text, [text], prompt.answer)
        return SampledCompletion.of(prompt, completion.versions, text, verdict), len(completion.token_ids)


class PeriodicEvaluation:
    """Evaluates beside the training, one evaluation at a time."""

    def __init__(self, evaluate: Callable[[], Awaitable[Evaluation]], recorder: Recorder, every: int) -> None:
        self._evaluate, self._recorder, self._every = evaluate, recorder, every
        self._running: asyncio.Task[None] | None = None

    def after(self, update: Update) -> None:
        """Start an evaluation if one is due and none is under way."""
        if self._every and update.step % self._every == 0 and (self._running is None or self._running.done()):
            self.check()
            self._running = asyncio.create_task(self.evaluate(update.step))

    async def evaluate(self, step: int) -> None:
        """Evaluate and record."""
        start = time.monotonic()
        evaluation = await self._evaluate()
        self._recorder.evaluated(evaluation, step)
        span = Span(role="conductor", name="evaluate", start=start, end=time.monotonic(), version=evaluation.version)
        self._recorder.spans([span])

    def check(self) -> None:
        """Raise the error of the last evaluation, if it failed."""
        if self._running is not None and self._running.done() and not self._running.cancelled():
            self._running.result()

    async def end(self) -> None:
        """Wait for the evaluation under way; each of its waits has a deadline."""
        if self._running is not None:
            await self._running

    async def close(self) -> None:
        """Cancel the evaluation under way, if there is one."""
        if self._running is not None:
            await cancel_and_wait([self._running])
