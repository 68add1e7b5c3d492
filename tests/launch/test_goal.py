"""A run ends by itself once its goal is reached and holds: the ledger, `inspect` and the log say why; a resume goes no
further."""

from __future__ import annotations

import json
from pathlib import Path

from tests.launch.running import Laboratory, steps_done

RIGHT = "def right(prompt, completion, answer):\n    return True\n"
REASON = "accuracy 1 reached in 2 evaluations in a row (evaluation.goal)"


def test_a_goal_that_holds_ends_the_run_and_its_resume(laboratory: Laboratory, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(RIGHT)
    settings = ("rewards.function=mine:right", f"rewards.path={tmp_path}", "trainer.steps=200")
    run_dir = tmp_path / "run"
    ended = laboratory.trained(run_dir, *settings, "evaluation.every=1", "evaluation.goal=1.0")
    assert f"stops early: {REASON}" in ended.out
    done = steps_done(run_dir)
    assert 1 <= done < 200
    found = json.loads(laboratory.run("inspect", run_dir, "--json").out)
    assert (found["state"], found["reason"]) == ("finished", REASON)
    again = laboratory.run("train", "--resume", run_dir)
    assert again.code == 0, again.err
    assert f"the run has ended early, after {done} steps: {REASON}; nothing is left to do" in again.out
    assert "starting the roles" not in again.out
    assert steps_done(run_dir) == done
