"""A synchronous run that an earlier commit recorded (tests/data/synchronous_run) stays what it was.

- Its replay comes to its weights, up to the rounding of another processor.
- `inspect`, `export` and `check` read it; a resume refuses it, with the number of its format and of ours.
"""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from stretto_app.extensions.commands.replay import replay
from stretto_report.audit.check import check_run
from stretto_report.reading.inspection import inspect_run
from tests.launch.running import Laboratory, exported
from tests.launch.warm import session_server
from tests.store.make import sql

RECORDED = Path(__file__).parents[1] / "data" / "synchronous_run"
STEPS = 6

#: Share of the whole way from the first to the last weights by which another processor's rounding may lead elsewhere.
#: One step of Adam carries a gradient's relative error (about 1e-6 in float32) over to the weights; where a gradient is
#: next to nothing it may turn a step round, which is a vanishing part of the way.
ROUNDING = 1e-3


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(shutil.copytree(RECORDED, tmp_path_factory.mktemp("recorded") / "run"))


def weights(policy: Path) -> torch.Tensor:
    """All parameters of a policy folder in one row."""
    return torch.cat([tensor.flatten() for _, tensor in sorted(load_file(policy / "model.safetensors").items())])


def test_its_replay_comes_to_its_weights(recorded: Path) -> None:
    replayed = replay(recorded, 0, [], None, say=lambda _: None, spawner=session_server())
    start, end = weights(recorded / "policy" / "v000000"), weights(recorded / "policy" / f"v{STEPS:06d}")
    again = weights(replayed.folder / "policy" / f"v{STEPS:06d}")
    assert (again - end).norm() <= ROUNDING * (end - start).norm()


def test_a_replay_of_a_run_that_goes_on_has_the_steps_that_it_trained_and_no_others(tmp_path: Path) -> None:
    run = Path(shutil.copytree(RECORDED, tmp_path / "run"))
    columns = sql(run / "ledger.sqlite", "SELECT name FROM pragma_table_info('steps')")
    grown = {"step": "step + 1", "version": "version + 1", "published_version": "published_version + 1"}
    next_step = ", ".join(grown.get(name, name) for (name,) in columns)

    def takes_a_step(said: str) -> None:
        if said.startswith("step 2:"):
            sql(run / "ledger.sqlite", f"INSERT INTO steps SELECT {next_step} FROM steps ORDER BY step DESC LIMIT 1")

    replayed = replay(run, 0, [], None, say=takes_a_step, spawner=session_server())
    assert inspect_run(run).steps == STEPS + 1
    assert inspect_run(replayed.folder).steps == replayed.branch.last_step == STEPS


def test_it_is_inspected_exported_and_checked(recorded: Path, laboratory: Laboratory) -> None:
    found = inspect_run(recorded)
    assert (found.steps, found.trajectories.trained) == (STEPS, 48)
    assert found.staleness.max == 0
    assert len(exported(laboratory, recorded)) == found.trajectories.issued
    assert check_run(recorded).kept


def test_a_resume_refuses_it_with_both_formats_and_changes_nothing(recorded: Path, laboratory: Laboratory) -> None:
    before = {path: path.read_bytes() for path in (recorded / "recipe.toml", recorded / "ledger.sqlite")}
    ended = laboratory.run("train", "--resume", recorded)
    assert ended.code == 1
    assert ended.err.endswith("ledger.sqlite: has format 2, this version of stretto resumes formats 3 to 6\n")
    assert all(path.read_bytes() == content for path, content in before.items())
