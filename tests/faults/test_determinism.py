"""What can be repeated, bit for bit.

- Synchronous runs (``max_staleness = 0``) train on each token with the version that sampled it. Two of them are equal,
  whichever engine dies, and the whole system equals a plain loop.
- A run that is killed, however often, and goes on comes to the weights of one that was not.
- An asynchronous run, by its record: replayed, whole or from any step, it comes to its weights.
- The state of a trainer is the last checkpoint and the batches since, for every step at which it may be lost.
"""

import os
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from stretto.core.errors import RunFolderError
from stretto.core.records import Batch
from stretto.launch.preflight.plan import make_plan
from stretto.launch.recipe.recipe import load_recipe
from stretto.model.hf.folder import load_policy
from stretto.model.hf.tokenizer import load_tokenizer
from stretto.model.packed.attention import PACKED_ATTENTION
from stretto.store.checkpoints import Checkpoints
from stretto.store.ledger.reading import last_step, read_batches
from stretto.store.series.tokens import tokens_file
from stretto.trainer.trainer import Trainer
from stretto_app.extensions.commands.replay import replay
from stretto_report.audit.check import check_run
from stretto_report.audit.diff import diff_runs
from tests.faults.plain import train_plainly
from tests.launch.running import (
    TINY,
    Command,
    Laboratory,
    assert_the_law,
    exported,
    said,
    trained_ages,
    wait_for_step,
    wait_until,
)
from tests.launch.warm import session_server

STEPS = 5
SYNCHRONOUS = ("rollout.max_staleness=0", f"trainer.steps={STEPS}", "trainer.checkpoint_every=2")
ASYNCHRONOUS = (f"trainer.steps={STEPS}", "trainer.checkpoint_every=2", "trainer.keep_versions=all")


@pytest.fixture(scope="module")
def synchronous(laboratory: Laboratory, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("synchronous") / "run"
    laboratory.trained(run_dir, *SYNCHRONOUS)
    return run_dir


def wait_for_the_end(command: Command) -> None:
    wait_until(lambda: not command.processes(), "the end of all roles")


def killed_at(laboratory: Laboratory, run_dir: Path, settings: tuple[str, ...], steps: tuple[int, ...]) -> None:
    """Train, and kill everything after each of these steps; what is left goes on to the end."""
    for step in steps:
        resume = ("--resume",) if run_dir.exists() else ()
        with laboratory.train(run_dir, *settings, *resume) as command:
            wait_for_step(command, step)
            os.kill(command.process.pid, signal.SIGKILL)
            wait_for_the_end(command)
        assert check_run(run_dir).kept, check_run(run_dir)
    laboratory.trained(run_dir, *settings, "--resume")


def without_texts(batches: list[Batch]) -> list[object]:
    """What decides the weights: every token, number, version and reward, in order."""
    return [
        (
            group.id,
            group.prompt.token_ids,
            [(t.token_ids, t.behavior_logprobs, t.versions) for t in group.trajectories],
            [t.reward for t in group.trajectories],
        )
        for batch in batches
        for group in batch.groups
    ]


def test_the_asynchronous_system_at_staleness_0_is_a_plain_loop(
    laboratory: Laboratory, synchronous: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STRETTO_CACHE", str(laboratory.cache))
    plan = make_plan(load_recipe(TINY, SYNCHRONOUS))
    batches, weights = train_plainly(plan, synchronous / "policy" / "v000000")
    assert without_texts(list(read_batches(synchronous / "ledger.sqlite", 0, STEPS))) == without_texts(batches)
    theirs = load_file(synchronous / "policy" / f"v{STEPS:06d}" / "model.safetensors")
    assert all(torch.equal(theirs[name], weights[name]) for name in theirs)


def test_each_token_of_a_synchronous_run_was_sampled_by_the_version_that_trained_on_it(
    laboratory: Laboratory, synchronous: Path
) -> None:
    found, trajectories = assert_the_law(synchronous), exported(laboratory, synchronous)
    assert set(trained_ages(trajectories)) == {0}
    assert set(found.staleness.histogram) == {0}
    assert found.multi_version == found.interrupted == 0
    buffered = sum(len(trajectory["token_ids"]) for trajectory in trajectories if trajectory["state"] == "buffered")
    # What the end of the run cut off is wasted.
    assert found.tokens.trained + found.tokens.wasted + buffered == found.tokens.generated


def test_a_synchronous_run_that_was_killed_twice_equals_one_that_was_not(
    laboratory: Laboratory, synchronous: Path, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    killed_at(laboratory, run_dir, SYNCHRONOUS, (1, 3))
    parting = diff_runs(synchronous, run_dir)
    assert (parting.step, parting.fields) == (STEPS, ())
    assert check_run(run_dir).kept
    assert assert_the_law(run_dir).trajectories.failed == 0
    for step in range(1, STEPS + 1):  # those of steps that were trained again, too
        assert (
            tokens_file(run_dir / "tokens", step).read_bytes() == tokens_file(synchronous / "tokens", step).read_bytes()
        )


@pytest.mark.long
def test_with_two_engines_it_makes_no_difference_which_of_them_dies(laboratory: Laboratory, tmp_path: Path) -> None:
    settings = ("rollout.max_staleness=0", "rollout.batch_size=3", "engine.count=2", "trainer.steps=5")
    undisturbed, run_dir = tmp_path / "undisturbed", tmp_path / "run"
    laboratory.trained(undisturbed, *settings)
    with laboratory.train(run_dir, *settings) as command:
        wait_for_step(command, 2)
        os.kill(command.processes("stretto.engine.role")[0], signal.SIGKILL)
        command.end().well()
    assert "a new one is started" in said(run_dir)
    parting = diff_runs(undisturbed, run_dir)
    assert (parting.step, parting.fields) == (5, ())


def test_an_asynchronous_run_that_was_killed_is_replayed_to_its_weights(laboratory: Laboratory, tmp_path: Path) -> None:
    run_dir, forked = tmp_path / "run", session_server()
    killed_at(laboratory, run_dir, ASYNCHRONOUS, (3,))
    found = check_run(run_dir)
    assert found.kept, found
    assert found.balance["failed"] == 0
    replayed = replay(run_dir, 0, [], None, say=lambda text: None, spawner=forked)
    assert replayed.equal
    assert diff_runs(run_dir, replayed.folder).fields == ()
    changed = replay(
        run_dir, STEPS - 2, ["trainer.learning_rate=1e-2"], tmp_path / "branch", say=lambda text: None, spawner=forked
    )
    assert changed.equal is None
    assert changed.branch.changes == {"trainer.learning_rate": "was 0.001 and is 0.01"}
    assert diff_runs(run_dir, tmp_path / "branch").step == STEPS - 1
    (notes := tmp_path / "mine" / "notes.txt").parent.mkdir()
    notes.write_text("not a branch")
    with pytest.raises(RunFolderError, match="cannot be created"):
        replay(run_dir, 0, [], notes.parent, say=lambda text: None, spawner=forked)
    assert notes.exists()


def test_at_whatever_step_a_trainer_is_lost_the_last_weights_are_the_same(synchronous: Path, tmp_path: Path) -> None:
    recipe, ledger = load_recipe(synchronous / "recipe.toml"), synchronous / "ledger.sqlite"
    sampling = recipe.sampling.record(load_tokenizer(synchronous / "policy" / "v000000").eos_token_ids)

    def new() -> Trainer:
        torch.set_num_threads(1)
        folder = synchronous / "policy" / "v000000"
        model = load_policy(folder, attention=PACKED_ATTENTION, dtype=torch.float32, device="cpu")
        return Trainer(model, recipe.trainer, recipe.algorithm, sampling)

    expected = load_file(synchronous / "policy" / f"v{STEPS:06d}" / "model.safetensors")
    checkpoints, first = Checkpoints(tmp_path, keep=STEPS), new()
    for batch in read_batches(ledger, 0, STEPS - 1):
        first.train(batch)
        if batch.step % recipe.trainer.checkpoint_every == 0:
            checkpoints.save(batch.step, first.save_checkpoint)
    left = [checkpoints.latest(step) for step in (1, 2, 4)]  # whichever step it is lost at: one of these is left
    assert [checkpoint and checkpoint.step for checkpoint in left] == [None, 2, 4]
    for checkpoint in left:
        second = new()
        if checkpoint is not None:
            second.load_checkpoint(checkpoint.path)
        for batch in read_batches(ledger, second.version, STEPS):
            second.train(batch)
        weights = dict(second.learner.model.named_parameters())
        assert all(torch.equal(expected[name], weights[name]) for name in expected), checkpoint
    assert last_step(ledger) == STEPS
