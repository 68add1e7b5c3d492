"""`stretto replay`, where it fails: what the trainer said of it stays, and nothing else; and where the run has no
weights to compare with: it says so, and why.

That a replay comes to the run's weights is shown on whole runs, in tests/faults/test_determinism.py.
"""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from stretto.core.errors import RoleError, RunFolderError, StoreError
from stretto.launch.commands.replay import replay
from stretto.loop.learner.recovery import seal_start
from stretto.store.folder.run_folder import RunFolder
from stretto.store.ledger.config import StoreConfig
from stretto.store.ledger.ledger import Ledger
from tests.launch import test_train
from tests.launch.test_train import begin, flip_a_bit, record
from tests.launch.warm import session_server
from tests.store.conftest import as_format_2

recipe = test_train.recipe


def test_a_trainer_that_fails_leaves_its_log_where_the_message_says(recipe: Path) -> None:
    run_dir, said = begin(recipe), list[str]()
    record(run_dir, 1)
    policy = RunFolder(run_dir).policy(0)
    (policy / "model.safetensors").write_bytes(b"no weights")
    with closing(Ledger(run_dir / "ledger.sqlite", StoreConfig())) as ledger:
        seal_start(ledger, policy, None)
    log = run_dir / "branches" / "001" / "trainer.txt"
    with pytest.raises(RoleError):
        replay(run_dir, 0, [], None, say=said.append, spawner=session_server())
    assert said == [f"logs of the trainer: {log}"]
    assert list(log.parent.iterdir()) == [log]


def test_a_replay_from_what_the_run_did_not_have_is_refused_and_leaves_nothing(recipe: Path) -> None:
    run_dir = begin(recipe)
    record(run_dir, 1)
    weights, own = run_dir / "policy" / "v000000" / "model.safetensors", run_dir / "recipe.toml"
    flip_a_bit(weights)
    with pytest.raises(StoreError, match=f"{weights}: has checksum"):
        replay(run_dir, 0, [], None)
    own.write_text(own.read_text().replace("learning_rate = 2e-05", "learning_rate = 0.5"))
    with pytest.raises(RunFolderError, match=f"^{own}: trainer.learning_rate: was 2e-05 and is 0.5; restore"):
        replay(run_dir, 0, ["trainer.learning_rate=0.5"], None)
    assert not (run_dir / "branches").exists()


def test_a_replay_without_its_batches_leaves_nothing(recipe: Path) -> None:
    run_dir, said = begin(recipe), list[str]()
    record(run_dir, 1)
    with closing(sqlite3.connect(run_dir / "ledger.sqlite", isolation_level=None)) as connection:
        connection.execute("DELETE FROM payloads")
    with pytest.raises(StoreError, match=r"store\.keep_payloads"):
        replay(run_dir, 0, [], None, say=said.append, spawner=session_server())
    assert list((run_dir / "branches").iterdir()) == []


def test_a_replay_of_a_run_without_its_last_policy_says_that_nothing_was_compared(recipe: Path) -> None:
    run_dir, said = begin(recipe), list[str]()
    record(run_dir, 1)
    as_format_2(run_dir / "ledger.sqlite")  # a run of the format before can be replayed as well
    replayed = replay(run_dir, 0, [], None, say=said.append, spawner=session_server())
    assert replayed.equal is None
    policy = run_dir / "policy" / "v000001"
    assert str(replayed).splitlines()[1:] == [
        f"the weights could not be compared with the run's: {policy} is not there"
    ]
