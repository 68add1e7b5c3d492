"""What users suffered: a run that hangs in silence, for hours, since somebody waits without a deadline: after the last
step (prime-rl#2912), for one prompt that is too long for every engine (NeMo-RL#3938), for a process that neither works
nor ends (SkyRL#1173, NeMo-RL#3488, verl#5815, trl#6796).

Promises: a prompt that every engine refuses is given up, and the run goes on, with a real engine too; whichever process
is stopped, and also when an evaluation is all that is left of the run, the run goes on and ends well."""

import asyncio
import os
import signal
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

import msgspec
import pytest

from stretto.core.records import Completion, GenerateRequest
from stretto.engine.config import EngineConfig
from stretto.engine.http.client import HttpEngine
from stretto.engine.native.engine import NativeEngine
from stretto.model.hf.folder import load_policy
from stretto.store.series.metrics import read_metrics
from stretto_report.reading.export import read_trajectories
from tests.engine.serving import Mailbox, served
from tests.launch.running import Laboratory, assert_the_law, wait_for_step, wait_for_words
from tests.launch.test_workflows import recipe_of
from tests.loop.conducting import PROMPTS, Stage, ToyFleet
from tests.tiny_policy import TINY

_REFUSED = 7  # the prompt


@dataclass
class RealEngine(ToyFleet):
    """A native engine behind its server, for as long as the conductor has its versions loaded."""

    folder: Path = Path()
    up: asyncio.Event = field(default_factory=asyncio.Event)
    client: HttpEngine | None = None

    async def generate(self, request: GenerateRequest, *, least: int = 0) -> AsyncIterator[Completion]:
        self.asked.append(request.id)
        async with asyncio.timeout(20):
            await self.up.wait()
        assert self.client is not None
        async for completion in self.client.generate(request):
            yield completion

    async def keep_loaded(self) -> NoReturn:
        weights = dict(load_policy(self.folder / "policy").named_parameters())
        engine, mailbox = NativeEngine.load(self.folder / "policy", EngineConfig(), name="engine-0"), Mailbox()
        async with served(engine, self.folder / "e.sock", mailbox) as self.client:
            self.up.set()
            while True:
                await self.published.wait()
                self.published.clear()
                mailbox.publications[self.version] = weights
                self.on_load((await self.client.update(self.version)).version)


def test_a_prompt_that_every_engine_refuses_is_given_up_each_epoch_and_the_others_are_trained(
    stage: Stage, short_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    too_long = msgspec.structs.replace(PROMPTS[_REFUSED], token_ids=(_REFUSED,) * 2 * TINY.context_length)
    monkeypatch.setattr("tests.loop.conducting.PROMPTS", [*PROMPTS[:_REFUSED], too_long, *PROMPTS[_REFUSED + 1 :]])
    stage.fleet = RealEngine(folder=short_folder)
    stage.play(steps=20)  # of two groups: more than two epochs of the other 19 prompts
    trained = Counter(group.prompt.token_ids[0] for batch in stage.trainer.batches for group in batch.groups)
    assert set(trained) == set(range(len(PROMPTS))) - {_REFUSED}
    assert set(trained.values()) <= {2, 3}
    tried = Counter(int(id.split(".")[0]) for id in stage.fleet.asked if id.split(".")[1] == str(_REFUSED))
    assert tried[0] == tried[1] == 3, "rollout.max_attempts, in each epoch"
    (reason,) = {one.reason for one in read_trajectories(stage.folder.path) if one.state == "failed"}
    assert f"{2 * TINY.context_length} tokens" in reason


@pytest.mark.long
def test_whichever_process_is_stopped_and_in_the_last_evaluation_too_the_run_ends_well(
    laboratory: Laboratory, tmp_path: Path
) -> None:
    """A workflow's process, and when nothing is left but the last evaluation, which waits for it, the engine, the
    trainer and the reward worker, all at once."""
    run_dir, recipe, hold = tmp_path / "run", recipe_of(tmp_path), tmp_path / "hold"
    settings = ("trainer.steps=4", "deadlines.hung=1", f"workflow.settings.hold={hold}")
    with laboratory.train(run_dir, *settings, recipe=recipe) as command:
        wait_for_step(command, 1)
        hold.touch()
        (workflow,) = command.processes("stretto_workflows.worker")
        os.kill(workflow, signal.SIGSTOP)
        wait_for_words(command, run_dir, "the held-out accuracy of the last version")
        for role in ("engine", "trainer", "rewards"):
            os.kill(command.role(role), signal.SIGSTOP)
        for name in ("workflow-0", "engine-0", "trainer", "rewards-0"):
            wait_for_words(command, run_dir, f"{name} sent no heartbeat for")
        hold.unlink()
        command.end().well()
        command.assert_nothing_is_left()
    assert assert_the_law(run_dir).steps == 4
    steps, evaluations = read_metrics(run_dir / "metrics.jsonl")
    assert [step.step for step in steps] == list(range(1, 5))
    assert [(line.step, line.version) for line in evaluations] == [(0, 0), (4, 4)]
