"""What users suffered: the bound on staleness is another one after a resume, and a validation is stamped with a step
that its engine did not serve (AReaL#1388, AReaL#1345, verl#4449, verl#7568, slime#1800).

Promise: killed and resumed again and again, a run trains on no token that is older than its bound says, by the record
of each token; an evaluation has the newest version that sampled a token of it, by the record of these tokens, and never
that of the step beside which it went on."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from stretto.core.engine import is_evaluation
from stretto.core.records import Completion, GenerateRequest, Sampling, Segment, StopReason
from stretto.loop.evaluation import Evaluator
from stretto.loop.records.evaluation import Evaluation
from stretto.store.config import StoreConfig
from stretto.store.ledger.ledger import Ledger
from stretto.store.ledger.reading import read_batches
from stretto.store.series.metrics import SampledCompletion, read_metrics
from tests.loop.conducting import PROMPTS, Stage, ToyFleet, ToyTrainer, score

STEPS = 24


class Killed(Exception):
    """What a trainer raises in place of the kill."""


@dataclass
class Slow(ToyFleet):
    """Completions of evaluations take a step: their first token has the version before it, the second one the next."""

    async def generate(self, *requests: GenerateRequest, least: int = 0) -> AsyncIterator[Completion]:
        for request in requests:
            if not is_evaluation(request.id):
                async for completion in super().generate(request, least=least):
                    yield completion
                continue
            before = self.version
            async with asyncio.timeout(10):
                while self.version == before < STEPS:
                    await asyncio.sleep(0.001)
            versions = (before, self.version)
            yield Completion(
                request.id,
                0,
                Segment.of(
                    token_ids=(1, 2), behavior_logprobs=(-0.1, -0.2), versions=versions, stop_reason=StopReason.STOP
                ),
            )


@dataclass
class Evaluating(Stage):
    """With real evaluations; `kept` has what each has sampled."""

    fleet: ToyFleet = field(default_factory=Slow)
    kept: list[Sequence[SampledCompletion]] = field(default_factory=list)

    async def evaluate(self) -> Evaluation:
        evaluator = Evaluator(PROMPTS[:4], Sampling(max_tokens=4), 1, self.fleet.generate, score, str)  # type: ignore[arg-type]  # of one request at a time
        return await replace(evaluator, keep=self.kept.append)()


@pytest.mark.parametrize("bound", [0, 1, 3])
def test_after_a_resume_no_token_is_beyond_its_bound_and_evaluations_have_versions(stage: Stage, bound: int) -> None:
    run = Evaluating(stage.folder, stage.ledger)
    settings: dict[str, Any] = {"max_staleness": bound, "beyond_bound": "wait", "evaluate_every": 4}
    for kill in (5, 6, 13, 20):
        run.trainer = ToyTrainer(ill=Killed(), ill_at=kill)
        with pytest.raises(Killed):
            run.play(steps=STEPS, **settings)
        run.ledger._connection.close()
        run.ledger._broken = None
        stage.ledger = run.ledger = Ledger(run.folder.ledger, StoreConfig())
        run.fleet = Slow(version=run.ledger.last_step() or 0)
    run.trainer = ToyTrainer()
    run.play(steps=STEPS, **settings)
    ages = {
        batch.version - version
        for batch in read_batches(run.folder.ledger, 0, STEPS)
        for group in batch.groups
        for one in group.trajectories
        for version in one.versions
    }
    assert min(ages) == 0
    assert max(ages) <= bound
    steps, evaluations = read_metrics(run.folder.metrics)
    assert max(step.staleness_max for step in steps) <= bound
    sampled = [sorted({version for one in kept for version in one.versions}) for kept in run.kept]
    assert [line.version for line in evaluations] == [versions[-1] for versions in sampled]
    assert [line.step for line in evaluations] == [versions[0] for versions in sampled], "begun behind that step"
    assert any(line.step < line.version for line in evaluations), "one that went on beside the next steps"
