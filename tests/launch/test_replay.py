"""`stretto replay`, where it fails: what the trainer said of it stays, and nothing else; and where the run has no
weights to compare with: it says so, and why. A branch has its own measurements and none of its run's: what the run
measured of its engines, of its time and on held-out prompts is unknown of a branch. A replay that was killed left no
run, or a whole branch.

That a replay comes to the run's weights is shown on whole runs, in tests/faults/test_determinism.py.
"""

import math
import shutil
import sqlite3
import time
from contextlib import closing
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from stretto.core.errors import RoleError, RunFolderError, StoreError
from stretto.launch.recipe.recipe import load_recipe
from stretto.loop.recovery import seal_start
from stretto.run import open_run
from stretto.store.config import StoreConfig
from stretto.store.ending import condition
from stretto.store.ledger.ledger import Ledger
from stretto.store.run_folder import Branch, RunFolder
from stretto.store.series.metrics import EvaluationLine, MetricsLog
from stretto.store.totals import ENGINES, JUDGED, TOTALS, Judged, Membership, Totals
from stretto_app.extensions.commands.replay import _COPY, _copy_ledger, _record, _Repeated, replay
from stretto_report.audit.check import check_run
from stretto_report.reading.inspection import inspect_run
from tests.kills import killed_at_each_write
from tests.launch import test_train
from tests.launch.test_train import begin, flip_a_bit, record
from tests.launch.warm import session_server
from tests.store.conftest import as_format_2
from tests.store.make import Make
from tests.watch.conftest import serving
from tests.watch.runs import step_line

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
    assert str(replayed).splitlines()[1] == f"the weights could not be compared with the run's: {policy} is not there"


def measured(run_dir: Path) -> None:
    """What a run of two steps measures beside its batches."""
    engine = Membership("engine-0", "native", "node", version=2, joined_step=0)
    totals = Totals(
        max_staleness=4,
        generated=999,
        busy={"engine-0": 5.0, "trainer": 7.0},
        wall_seconds=1e6,
        rl_seconds=1e5,
        initial_accuracy=0.25,
        final_accuracy=0.75,
        generated_by={"engine-0": 999},
        rewards={"format": 0.5},
    )
    with closing(Ledger(run_dir / "ledger.sqlite", StoreConfig())) as ledger:
        for name, fact in ((TOTALS, totals), (ENGINES, (engine,)), (JUDGED, Judged(3, 4, 0.5))):
            ledger.put(name, fact)
    log = MetricsLog(run_dir / "metrics.jsonl")
    for step in (1, 2):
        log.append(step_line(step))
    log.append(EvaluationLine(step=2, version=2, wall_seconds=9.0, rl_seconds=8.0, accuracy=0.75, prompts=4))


def test_a_replay_that_is_killed_at_any_write_leaves_no_run_or_a_whole_branch(recipe: Path, tmp_path: Path) -> None:
    run_dir, kills = begin(recipe), 0
    record(run_dir, 2)
    measured(run_dir)
    folder, target, after = RunFolder.open(run_dir), tmp_path / "branch", load_recipe(run_dir / "recipe.toml")
    branch, step = Branch(str(run_dir), 1, 2, {}), _Repeated(Make.update(2), 2.0, 1.0)
    target.mkdir()

    def work() -> None:
        _copy_ledger(folder, target / _COPY)
        _record(folder, target, after, branch, [step])

    for number in killed_at_each_write(work):
        kills = number
        with pytest.raises(RunFolderError, match="holds no run"):
            inspect_run(target)
        shutil.rmtree(target)
        target.mkdir()
    assert kills >= 6
    assert (condition(target).state, inspect_run(target).version) == ("finished", 2)
    assert [line.step for line in open_run(target).metrics] == [2]


def test_a_branch_has_its_own_measurements_and_none_of_its_run(recipe: Path, tmp_path: Path) -> None:
    run_dir, said, began = begin(recipe), list[str](), time.monotonic()
    record(run_dir, 2)
    measured(run_dir)
    shutil.copytree(run_dir / "policy" / "v000000", run_dir / "policy" / "v000002")
    replayed = replay(run_dir, 1, ["trainer.learning_rate=0.01"], None, say=said.append, spawner=session_server())
    elapsed, found = time.monotonic() - began, inspect_run(replayed.folder)
    assert (found.initial_accuracy, found.final_accuracy, found.busy) == (None, None, {})
    assert (found.tokens.generated, found.tokens.wasted, found.engines, found.rewards) == (0, 0, (), {})
    assert (found.goodput, found.goodput_roles, found.idle) == ({}, {}, {})
    assert 0 < found.rl_seconds <= found.wall_seconds <= elapsed
    assert (found.version, found.staleness.bound) == (2, 4)
    assert (found.reason, found.replay) == (f"a replay of {run_dir} from step 1", replayed.branch)
    branch = open_run(replayed.folder)
    assert (branch.accuracy, branch.evaluations) == (None, [])
    (line,) = branch.metrics
    of_the_run = step_line(2)
    assert (line.step, line.reward, line.trained_tokens) == (2, of_the_run.reward, of_the_run.trained_tokens)
    assert (line.rl_seconds, line.wall_seconds) == (found.rl_seconds, found.wall_seconds)
    assert (line.generated_tokens, line.busy, line.canary) == (0, {}, {})
    assert line.trainer.keys() > of_the_run.trainer.keys() - {"entropy"}
    with serving(run_dir.parent, tmp_path / "cache") as client:
        rows = {row["path"]: row for row in client.get("/api/runs").json()["runs"]}
    assert (rows[str(run_dir)]["accuracy"], rows[str(run_dir)]["generated_tokens"]) == (0.75, 16)
    row = rows[str(replayed.folder)]
    assert (row["accuracy"], row["generated_tokens"], row["engines"]) == (None, 0, 0)
    assert (row["rl_seconds"], row["wall_seconds"]) == (found.rl_seconds, found.wall_seconds)
    assert row["reason"] == found.reason
    questions = [RunFolder(path).questions.read_bytes() for path in (run_dir, replayed.folder)]
    assert questions[0] == questions[1]
    order = [check_run(path).breaches["prompts come in their order"] for path in (run_dir, replayed.folder)]
    assert order[0] == order[1], "the law of the data says of a branch what it says of the run"


def test_a_replay_with_changed_settings_says_how_far_the_weights_are_from_the_run(recipe: Path) -> None:
    run_dir, said = begin(recipe), list[str]()
    record(run_dir, 1)
    spawner = session_server()
    ours = replay(run_dir, 0, ["trainer.learning_rate=0.01"], None, say=said.append, spawner=spawner).folder
    shutil.copytree(ours / "policy" / "v000001", run_dir / "policy" / "v000001")
    same = replay(run_dir, 0, ["trainer.learning_rate=0.01"], None, say=said.append, spawner=spawner)
    assert (same.equal, same.apart) == (None, (0.0, 0.0))
    assert "equal to the run's: the changed settings made no difference" in str(same)
    weights = run_dir / "policy" / "v000001" / "model.safetensors"
    tensors = load_file(weights)
    name = max(tensors, key=lambda one: float(tensors[one].abs().max()))
    tensors[name] = tensors[name] + 0.5
    save_file(tensors, weights, {"format": "pt"})
    other = replay(run_dir, 0, ["trainer.learning_rate=0.01"], None, say=said.append, spawner=spawner)
    assert other.apart is not None
    share, largest = other.apart
    norm = math.sqrt(sum(float(tensor.double().square().sum()) for tensor in tensors.values()))
    assert largest == pytest.approx(0.5, rel=1e-5)
    assert share == pytest.approx(0.5 * math.sqrt(tensors[name].numel()) / norm, rel=1e-5)
    assert f"differ from the run's by {share:.2%} of their norm, one weight by 0.5 at most" in str(other)
    tensors[name] = tensors[name] * float("nan")
    save_file(tensors, weights, {"format": "pt"})
    assert "some are not finite" in str(replay(run_dir, 0, ["trainer.learning_rate=0.01"], None, spawner=spawner))
