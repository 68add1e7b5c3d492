"""What a run writes to, or reads from, is taken away while it runs: it ends with the path in its message, nothing is
left of it, and the last checkpoint is one to go on from.
"""

import os
import shutil
from pathlib import Path

import pytest

from stretto.store.checkpoints import Checkpoints
from tests.launch.running import Laboratory, assert_the_law, shared_files, steps_done, wait_for_step, wait_until


def sweep(run_dir: Path) -> bool:
    """Unlink every publication, as a cleaner of temporary files would."""
    for file in shared_files(run_dir):
        file.unlink(missing_ok=True)
    return True


@pytest.mark.parametrize(
    "taken", ["run", "ledger", *(pytest.param(one, marks=pytest.mark.long) for one in ("policy", "weights"))]
)
def test_what_vanishes_ends_the_run_with_its_name(laboratory: Laboratory, tmp_path: Path, taken: str) -> None:
    run_dir, gone = tmp_path / "run", tmp_path / "gone"
    in_run = {"ledger": run_dir / "ledger.sqlite", "policy": run_dir / "policy"}
    place = {"run": run_dir, "weights": Path("/dev/shm"), **in_run}[taken]
    with laboratory.train(run_dir, "trainer.steps=100000", "trainer.checkpoint_every=2") as command:
        wait_for_step(command, 3)
        # The one of step 2 is written beside the steps: on a busy machine step 3 may be done before.
        wait_until(lambda: bool(Checkpoints(run_dir / "checkpoints").steps()), "a checkpoint", command)
        if taken == "weights":
            wait_until(lambda: sweep(run_dir) and command.process.poll() is not None, "the end")
        else:
            os.rename(place, gone)  # a second or two later it is noticed
        ended = command.end(30)
        assert ended.code == 1, ended.out + ended.err
        assert str(place) in ended.err.splitlines()[-1], ended.err  # before it, a line for each log that went, too
        assert "Traceback" not in ended.err, ended.err
        if gone.exists():
            shutil.rmtree(place, ignore_errors=True)  # a role may have been about to write there
            os.rename(gone, place)
        command.assert_nothing_is_left()
    checkpoint = Checkpoints(run_dir / "checkpoints").latest()
    assert checkpoint is not None
    assert checkpoint.step % 2 == 0
    assert checkpoint.broken == ()
    assert_the_law(run_dir)
    if taken == "run":  # the others' resume is no other
        steps = f"trainer.steps={steps_done(run_dir) + 1}"
        laboratory.trained(run_dir, steps, "trainer.checkpoint_every=2", "--resume")
        assert_the_law(run_dir)
