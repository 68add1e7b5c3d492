"""What users suffered: one judge that takes fifty times as long as the others, or a sandbox that never boots, holds the
batch, since nobody cancels it with its group (slime#2176, slime#1361, OpenEnv#1036).

Promises: no step waits for the group that a judge holds, or whose sandbox does not come up. By default it stays in
flight, holds one place, and is trained on when it is judged, without the tokens that are too old by then; with
`beyond_bound = "expire"` its judging is cancelled as soon as it is too old, and its prompt is asked again. A sandbox
that does not come up is given up at its deadline."""

import asyncio
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from stretto.core.records import Batch, Update, Verdict
from stretto.processes.tree import descendants
from stretto.rollout.prompts import PromptStream
from stretto_verify.sandbox.config import SandboxConfig
from stretto_verify.sandbox.sandbox import Sandbox, SandboxFailed
from stretto_verify.sandbox.walls import Walls, ladder
from tests.loop.conducting import OUTCOMES, PROMPTS, Stage, ToyTrainer

SLOW = PromptStream(PROMPTS, seed=1).take().prompt.id  # the first that is asked


@dataclass
class Judge:
    """Judges every group at once but that of one prompt, which it holds until it is told."""

    told: asyncio.Event = field(default_factory=asyncio.Event)
    held: int = 0
    cancelled: int = 0

    async def __call__(self, prompt: str, completions: Sequence[str], answer: str) -> Sequence[Verdict]:
        if answer == SLOW and not self.told.is_set():
            self.held += 1
            try:
                await self.told.wait()
            except asyncio.CancelledError:
                self.cancelled += 1
                raise
        return [OUTCOMES[min(number, 1)] for number, _ in enumerate(completions)]


@dataclass
class Telling(ToyTrainer):
    """Tells the judge, while it trains the batch of a step."""

    judge: Judge = field(default_factory=Judge)
    at: int = 6

    async def train(self, batch: Batch) -> Update:
        if batch.step == self.at:
            self.judge.told.set()
        return await super().train(batch)


def prompts(trainer: ToyTrainer) -> list[list[str]]:
    """Those of each batch."""
    return [[group.prompt.id for group in batch.groups] for batch in trainer.batches]


def test_steps_go_on_without_the_group_that_a_judge_holds_which_is_trained_on_later_without_its_old_tokens(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The default, `beyond_bound = "mask"`; each batch has its own deadline."""
    judge = Judge()
    stage.trainer = trainer = Telling(judge=judge)
    monkeypatch.setattr("tests.loop.conducting.score", judge)
    stage.play(steps=10, max_staleness=3, deadlines={"batch": 5.0})
    assert (judge.held, judge.cancelled) == (1, 0), "nobody has judged it, and it is not asked twice"
    assert len(prompts(trainer)) == 10
    ((batch, group),) = [
        (batch, group) for batch in trainer.batches for group in batch.groups if group.prompt.id == SLOW
    ]
    assert batch.step > trainer.at
    oldest = batch.oldest_by_group.get(group.id, batch.oldest_trainable)
    assert {version for one in group.trajectories for version in one.versions} == {0}
    assert oldest > 0, "none of its tokens is trained on"


def test_what_a_judge_holds_too_long_is_cancelled_and_asked_anew(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    judge = Judge()
    monkeypatch.setattr("tests.loop.conducting.score", judge)
    stage.play(steps=8, max_staleness=1, beyond_bound="expire", deadlines={"batch": 5.0})
    assert judge.cancelled == judge.held > 1
    assert len(prompts(stage.trainer)) == 8
    assert stage.ledger.balance().failed == 0


@pytest.mark.parametrize("walls", [walls for walls in ladder(warm=False) if walls.bwrap], ids=lambda walls: walls.level)
def test_a_sandbox_that_does_not_come_up_is_given_up_at_its_deadline(
    walls: Walls, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a bubblewrap that neither begins nor ends."""
    (program := tmp_path / "bwrap").write_text("#!/bin/sh\nexec sleep 600\n")
    program.chmod(0o755)
    monkeypatch.setattr("stretto_verify.sandbox.walls._BWRAP_PLACES", str(tmp_path))
    monkeypatch.setattr("stretto_verify.sandbox.sandbox._START_SECONDS", 1.0)
    monkeypatch.setattr("stretto_verify.sandbox.sandbox._END_SECONDS", 0.1)
    before, began = descendants(os.getpid()), time.monotonic()
    with Sandbox(walls, SandboxConfig()) as sandbox, pytest.raises(SandboxFailed):
        sandbox.run({"source": "print(1)"}, b"", seconds=5)
    assert time.monotonic() - began < 60, "ten minutes otherwise"
    assert descendants(os.getpid()) == before
