"""What a reward says about itself is recorded with the run: the level of the sandbox it judges programs in."""

from __future__ import annotations

import json
from pathlib import Path

from stretto.launch.assemble.roles import record_facts
from stretto.store.folder.run_folder import RunFolder


def test_the_level_of_the_sandbox_is_recorded_with_the_run(tmp_path: Path) -> None:
    with RunFolder.create(tmp_path / "run") as folder:
        record_facts(folder, {"sandbox": "sandbox level A (warm): 33 attacks stopped"})
    assert json.loads((tmp_path / "run" / "rewards.json").read_text()) == {
        "sandbox": "sandbox level A (warm): 33 attacks stopped"
    }


def test_a_reward_that_has_nothing_to_say_leaves_no_file(tmp_path: Path) -> None:
    with RunFolder.create(tmp_path / "run") as folder:
        record_facts(folder, {})
    assert not (tmp_path / "run" / "rewards.json").exists()
