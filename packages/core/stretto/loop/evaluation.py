"""Held-out accuracy: completions for each prompt, sampled with seeds that never change."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import msgspec

from stretto.core.engine import Generate
from stretto.core.events import Span
from stretto.core.records import (
    Completion,
    GenerateRequest,
    Prompt,
    Sampling,
    Trajectory,
    Update,
    derive_seed,
    trajectory_id,
)
from stretto.core.tasks import cancel_and_wait, gather_or_cancel
from stretto.loop.best import BestPolicy
from stretto.loop.engines.router import attempts
from stretto.loop.records.evaluation import Evaluation, QuestionResult
from stretto.loop.records.recorder import Recorder
from stretto.store.series.samples import SampledCompletion
from stretto.worlds.single_turn import Detokenize, Score, judge
from stretto_verify.thoughts import with_opening

_PORTION = 64  # completions of one request; at least one prompt's
_PORTIONS_IN_FLIGHT = 4
_PREFIX = "evaluation."

#: Returns the final answer in a completion, or None, by (prompt, completion) as texts; maj@n counts these answers.
FinalAnswerOf = Callable[[str, str], str | None]


def is_evaluation(request: str) -> bool:
    """Whether the request with this id belongs to an evaluation."""
    return request.startswith(_PREFIX)


#: Runs the workflow once for a prompt, by (trajectory id, prompt, member, seed); returns the judged trajectory.
Converse = Callable[[str, Prompt, int, int], Coroutine[Any, Any, Trajectory]]


@dataclass(frozen=True)
class Evaluator:
    """Samples and judges completions of held-out prompts, during training or alone.

    `count` is called with each completion as it ends, even if the evaluation is cut short later. After a finished
    evaluation, `keep` is called with its judged completions, and `rows` with its results by question. `name`: name of
    the set of questions; "" for the main set.
    """

    prompts: Sequence[Prompt]
    sampling: Sampling
    seed: int
    generate: Generate
    score: Score
    detokenize: Detokenize
    count: Callable[[Completion], None] = lambda completion: None
    keep: Callable[[Sequence[SampledCompletion]], None] = lambda samples: None
    samples: int = 1  # completions of each prompt
    final_answer: FinalAnswerOf | None = None
    rows: Callable[[Sequence[QuestionResult]], None] = lambda results: None
    name: str = ""
    converse: Converse | None = None  # None: single turns. It counts its tokens itself

    async def __call__(self) -> Evaluation:
        """Sample and judge `samples` completions of every prompt, and return the combined result.

        Each wait inside has a deadline of its own. The prompts are always split into the same requests, so that a
        repeated evaluation on idle engines computes the same numbers.
        """
        free = asyncio.Semaphore(_PORTIONS_IN_FLIGHT)
        size = max(1, _PORTION // self.samples)
        parts = [self.prompts[start : start + size] for start in range(0, len(self.prompts), size)]
        judged = list(chain.from_iterable(await gather_or_cancel(*(self._judged(part, free) for part in parts))))
        results = [result for result, _ in judged]
        evaluation = Evaluation.of(results)
        kept = chain.from_iterable(samples for _, samples in judged)
        self.keep([msgspec.structs.replace(sample, version=evaluation.version) for sample in kept])
        self.rows(results)
        return evaluation

    async def _judged(
        self, prompts: Sequence[Prompt], free: asyncio.Semaphore
    ) -> list[tuple[QuestionResult, list[SampledCompletion]]]:
        if (converse := self.converse) is not None:
            async with free:
                judged = await gather_or_cancel(*(self._conversed(converse, prompt) for prompt in prompts))
        else:
            async with free:
                completions = await self._completions(prompts)
            judged = await gather_or_cancel(
                *(
                    judge(self._id(prompt), prompt, completions[prompt.id], self.score, self.detokenize)
                    for prompt in prompts
                )
            )
        return [self._result(prompt, trajectories) for prompt, trajectories in zip(prompts, judged, strict=True)]

    def _result(
        self, prompt: Prompt, trajectories: Sequence[Trajectory]
    ) -> tuple[QuestionResult, list[SampledCompletion]]:
        final = self.final_answer
        texts = [with_opening(one.text, prompt.opens) for one in trajectories]
        finals = [final(prompt.text, text) for text in texts] if final is not None else None
        samples = [SampledCompletion.of(prompt, one.versions, one.text, one.verdict) for one in trajectories]
        return QuestionResult.of(prompt, trajectories, finals), samples

    def _seeds(self, prompt: Prompt) -> tuple[int, ...]:
        further = (derive_seed(self.seed, prompt.id, number) for number in range(1, self.samples))
        return derive_seed(self.seed, prompt.id), *further

    async def _conversed(self, converse: Converse, prompt: Prompt) -> list[Trajectory]:
        """Run the workflow `samples` times for one prompt; returns the judged trajectories."""
        ids = [trajectory_id(self._id(prompt), number) for number in range(self.samples)]
        members = enumerate(zip(ids, self._seeds(prompt), strict=True))
        return await gather_or_cancel(*(converse(id, prompt, number, seed) for number, (id, seed) in members))

    def _id(self, prompt: Prompt) -> str:
        """Id of the prompt's request and group."""
        return f"{_PREFIX}{self.name}.{prompt.id}"

    def _request(self, prompt: Prompt) -> GenerateRequest:
        return GenerateRequest(
            id=self._id(prompt),
            prompt_token_ids=prompt.token_ids,
            seeds=self._seeds(prompt),
            sampling=self.sampling,
        )

    async def _completions(self, prompts: Sequence[Prompt]) -> dict[str, list[Completion]]:
        """Sample the completions of these prompts; returns them by prompt id, in the order of their seeds. If the
        engine is lost, all of these prompts are sampled again together, so that the batches stay the same."""
        found: dict[tuple[str, int], Completion] = {}
        requests = [self._request(prompt) for prompt in prompts]
        for attempt in attempts():
            with attempt:
                async for completion in self.generate(*requests):
                    self.count(completion)
                    found[completion.request, completion.member] = completion
                break
        return {prompt.id: [found[self._id(prompt), member] for member in range(self.samples)] for prompt in prompts}


class PeriodicEvaluation:
    """Evaluates one set of questions while training goes on, one evaluation at a time.

    An evaluation is due every `every` steps (0: never), and at the first step after `minutes` minutes since the last
    one (0: never). `evaluate` computes the result; `best`, if given, gets it too.
    """

    def __init__(
        self,
        evaluate: Callable[[], Awaitable[Evaluation]],
        recorder: Recorder,
        every: int,
        minutes: float = 0.0,
        name: str = "",
        best: BestPolicy | None = None,
    ) -> None:
        self._evaluate, self._recorder, self._every, self._seconds = evaluate, recorder, every, 60.0 * minutes
        self._name, self._best = name, best
        self._started = time.monotonic()
        self._running: asyncio.Task[None] | None = None

    def due(self, update: Update) -> bool:
        """Whether an evaluation should start after this step. False while the previous one is running."""
        waited = bool(self._seconds) and time.monotonic() - self._started >= self._seconds
        by_steps = bool(self._every) and update.step % self._every == 0
        return (by_steps or waited) and (self._running is None or self._running.done())

    def after(self, update: Update) -> None:
        """Start an evaluation in the background if one is due; raises the error of the previous one."""
        if self.due(update):
            self.check()
            self._started = time.monotonic()
            self._running = asyncio.create_task(self.evaluate(update.step))

    async def evaluate(self, step: int) -> None:
        """Evaluate now and record the result under `step`."""
        start = time.monotonic()
        if self._best is not None:
            self._best.hold(step)
        evaluation = await self._evaluate()
        self._recorder.evaluated(evaluation, step, self._name)
        span = Span(role="conductor", name="evaluate", start=start, end=time.monotonic(), version=evaluation.version)
        self._recorder.spans([span])
        if self._best is not None:
            self._best.measured(step, evaluation)

    def check(self) -> None:
        """Raise the error of the last evaluation, if it failed."""
        if self._running is not None and self._running.done() and not self._running.cancelled():
            self._running.result()

    async def end(self) -> None:
        """Wait for the running evaluation; each of its waits has a deadline."""
        if self._running is not None:
            await self._running

    async def close(self) -> None:
        """Cancel the running evaluation, if any."""
        if self._running is not None:
            await cancel_and_wait([self._running])


class Evaluations:
    """All evaluations of a run: the held-out questions and further sets. `best` tracks the accuracy on one set."""

    def __init__(self, evaluations: Sequence[PeriodicEvaluation], best: BestPolicy | None = None) -> None:
        self._all, self._best = tuple(evaluations), best

    @property
    def enough(self) -> bool:
        """Whether training should stop early."""
        return bool(self.why)

    @property
    def why(self) -> str:
        """Why training should stop early: the accuracy has reached its goal, or no longer grows; empty: it should
        not."""
        return self._best.why if self._best is not None else ""

    def keeps(self, update: Update) -> bool:
        """Whether the policy of this step must be saved: it is about to be evaluated and may become the best."""
        return self._best is not None and self._best.keeps and self.due(update)

    def due(self, update: Update) -> bool:
        """Whether an evaluation should start after this step."""
        return any(one.due(update) for one in self._all)

    def after(self, update: Update) -> None:
        """Start the evaluations that are due."""
        for one in self._all:
            one.after(update)

    async def evaluate(self, step: int) -> None:
        """Evaluate all sets now, one after the other, and record the results under `step`."""
        for one in self._all:
            await one.evaluate(step)

    def check(self) -> None:
        """Raise the error of the last evaluation of any set, if it failed."""
        for one in self._all:
            one.check()

    async def end(self) -> None:
        """Wait for the running evaluations."""
        for one in self._all:
            await one.end()

    async def close(self) -> None:
        """Cancel the running evaluations."""
        for one in self._all:
            await one.close()
