"""Staleness is a promise of whole runs, held against the exported trajectories.

- 0 is exactly synchronous: each token was sampled by the version that trained on it.
- With wait, mask and expire no token older than the bound is ever trained on, and what it cost is counted.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.launch.running import Laboratory, assert_the_law, exported


def trained_ages(trajectories: list[dict[str, Any]]) -> list[int]:
    """Versions between sampling and training, of every token of every trained trajectory."""
    return [
        trajectory["trained_step"] - 1 - version
        for trajectory in trajectories
        if trajectory["state"] == "trained"
        for version in trajectory["versions"]
    ]


def test_a_staleness_of_zero_is_exactly_synchronous(laboratory: Laboratory, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    laboratory.trained(run_dir, "rollout.max_staleness=0", "rollout.beyond_bound=train", "trainer.steps=4")
    found = assert_the_law(run_dir)
    trajectories = exported(laboratory, run_dir)
    assert set(trained_ages(trajectories)) == {0}
    assert set(found.staleness.histogram) == {0}
    assert found.multi_version == found.interrupted == found.tokens.wasted == 0


@pytest.mark.parametrize("beyond_bound", ["wait", "mask", "expire"])
def test_no_token_beyond_the_bound_is_trained_on(laboratory: Laboratory, tmp_path: Path, beyond_bound: str) -> None:
    run_dir = tmp_path / "run"
    laboratory.trained(run_dir, "rollout.max_staleness=1", f"rollout.beyond_bound={beyond_bound}", "trainer.steps=8")
    found = assert_the_law(run_dir)
    trajectories = exported(laboratory, run_dir)
    ages = trained_ages(trajectories)
    assert found.staleness.bound == 1
    assert found.staleness.max <= 1
    assert found.staleness.histogram == {age: ages.count(age) for age in sorted(set(ages)) if age <= 1}
    if beyond_bound != "mask":
        assert max(ages) <= 1
    if beyond_bound != "expire":
        assert found.trajectories.expired == 0
    assert all(t["reason"] for t in trajectories if t["state"] in ("expired", "failed", "filtered"))
