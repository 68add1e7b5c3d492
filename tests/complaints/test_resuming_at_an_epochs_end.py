"""What users suffered: after a resume a part of the data is never trained on, or twice, because the place in the
data is ahead of what was trained: groups that were over-sampled, in flight or filtered are forgotten (OpenRLHF#1322,
NeMo-RL#3599, NeMo-RL#3480, trl#7274, prime-rl#3332).

Promise: killed at the end of an epoch, or at any other batch's boundary, and with groups that are filtered and groups
that are sampled ahead, a run trains on the same prompts as often as one that was never killed: on each prompt whose
group is not filtered once in each epoch. So with toys, killed at each batch, and with real processes, all of which are
killed when the last batch of an epoch is on record."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from stretto.core.records import Verdict
from stretto.store.config import StoreConfig
from stretto.store.ledger.ledger import Ledger
from stretto.store.ledger.reading import last_step, read_batches
from stretto.store.run_folder import RunFolder
from tests.launch.running import Laboratory, assert_the_law, wait_for_step, wait_until
from tests.loop.conducting import OUTCOMES, PROMPTS, Stage, ToyFleet, ToyTrainer

EASY = 3  # each prompt whose number this divides is right every time: its group is filtered
LEFT = [prompt for prompt in PROMPTS if int(prompt.id) % EASY]  # 13 of the 20
#: Of 6.5 steps, with two groups in a batch: those that are looked at. The run goes on until all of these are trained.
EPOCHS = 3
STEPS = 26


class Killed(Exception):
    """What a trainer raises in place of the kill."""


async def score(prompt: str, completions: Sequence[str], answer: str) -> Sequence[Verdict]:
    """A group is right as a whole if its prompt is easy; of another one its first member alone."""
    easy = int(answer) % EASY == 0
    return [OUTCOMES[0] if easy or number == 0 else OUTCOMES[1] for number, _ in enumerate(completions)]


def lived(path: Path, kill_at: int | None) -> None:
    """One life of a run's conductor, which ends while it trains the batch of a step; of what it had not written to the
    disk nothing is left."""
    new = not path.exists()
    with RunFolder.create(path) if new else RunFolder.resume(path) as folder:
        ledger = Ledger(folder.ledger, StoreConfig())
        begins = ledger.last_step() or 0
        trainer = ToyTrainer() if kill_at is None else ToyTrainer(ill=Killed(), ill_at=kill_at)
        stage = Stage(folder, ledger, ToyFleet(version=begins), trainer)
        settings: dict[str, Any] = {"filter": "zero_variance", "max_staleness": 2, "max_in_flight": 8}
        if kill_at is None:
            stage.play(steps=STEPS, **settings)
            ledger.close()
            return
        with pytest.raises(Killed):
            stage.play(steps=STEPS, **settings)
        ledger._connection.close()
        ledger._broken = None


def trained(path: Path, epochs: int = EPOCHS) -> Counter[tuple[int, str]]:
    """How often each prompt was trained on in each of the first epochs."""
    batches = read_batches(path / "ledger.sqlite", 0, last_step(path / "ledger.sqlite"))
    found = ((int(group.id.split(".")[0]), group.prompt.id) for batch in batches for group in batch.groups)
    return Counter(one for one in found if one[0] < epochs)


@pytest.mark.parametrize(
    "kills",
    [(), (7, 13, 20), (7, 8, 13, 14, 20, 21), tuple(range(1, STEPS + 1))],
    ids=["never", "in the batch that ends an epoch", "there and in the next one", "in every step"],
)
def test_each_prompt_that_is_not_filtered_is_trained_on_once_in_each_epoch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kills: tuple[int, ...]
) -> None:
    monkeypatch.setattr("tests.loop.conducting.score", score)
    for kill in (*kills, None):
        lived(tmp_path / "run", kill)
    assert trained(tmp_path / "run") == {(epoch, prompt.id): 1 for epoch in range(EPOCHS) for prompt in LEFT}


@pytest.mark.long
def test_real_processes_that_are_killed_when_an_epoch_ends_train_on_what_an_uninterrupted_run_trains_on(
    laboratory: Laboratory, tmp_path: Path
) -> None:
    """Two epochs of 12 prompts, a third of which are easy, and a little more."""
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    settings = (
        "task.prompts=12", "rollout.filter=zero_variance", "rollout.max_staleness=2",
        "rewards.function=tests.complaints.rewards_by_prompt:easy_or_not", "trainer.checkpoint_every=5",
        "trainer.keep_versions=1", "evaluation.prompts=1", "sampling.max_tokens=16",
    )  # fmt: skip
    laboratory.trained(whole, *settings, "trainer.steps=12")
    uninterrupted = trained(whole, epochs=2)
    left = {prompt for _, prompt in uninterrupted}
    assert len(left) < 12
    assert uninterrupted == {(epoch, prompt): 1 for epoch in range(2) for prompt in left}
    with laboratory.train(killed, *settings, "trainer.steps=1000") as command:
        wait_for_step(command, 1)
        wait_until(lambda: all((0, one) in trained(killed) for one in left), "the end of an epoch", command)
        command.kill_all()
        command.process.wait(10)
    laboratory.trained(killed, *settings, f"trainer.steps={last_step(killed / 'ledger.sqlite') + 8}", "--resume")
    assert_the_law(killed)
    assert trained(killed, epochs=2) == uninterrupted
