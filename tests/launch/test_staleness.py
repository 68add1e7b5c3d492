"""Staleness is a promise of whole runs, held against the exported trajectories.

- 0 is exactly synchronous: each token was sampled by the version that trained on it (over TCP, by the way).
- With "expire" no token older than the bound is trained on, and what expired is counted (test_whole_run has "mask"
  and "wait").
"""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

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
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    wire = ("engine.transport=tcp", f"engine.base_port={port}")
    laboratory.trained(run_dir, "rollout.max_staleness=0", "rollout.beyond_bound=train", "trainer.steps=4", *wire)
    found = assert_the_law(run_dir)
    trajectories = exported(laboratory, run_dir)
    assert set(trained_ages(trajectories)) == {0}
    assert set(found.staleness.histogram) == {0}
    assert found.multi_version == found.interrupted == 0
    buffered = sum(len(trajectory["token_ids"]) for trajectory in trajectories if trajectory["state"] == "buffered")
    # What the end of the run cut off is wasted.
    assert found.tokens.trained + found.tokens.wasted + buffered == found.tokens.generated


def test_what_would_be_too_old_expires_and_is_asked_again(laboratory: Laboratory, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    # Nothing is the bound, and updates are quick: answers in flight are overdue all the time.
    laboratory.trained(run_dir, "rollout.max_staleness=1", "rollout.beyond_bound=expire", "trainer.steps=10")
    found, trajectories = assert_the_law(run_dir), exported(laboratory, run_dir)
    ages = trained_ages(trajectories)
    assert found.staleness.max == max(ages) <= 1 == found.staleness.bound
    assert found.staleness.histogram == {age: ages.count(age) for age in sorted(set(ages))}
    expired = [t for t in trajectories if t["state"] == "expired"]
    assert found.trajectories.expired == len(expired)
    assert all("version" in t["reason"] for t in expired)
    budget = {name: category.tokens for name, category in found.goodput.items()}
    assert sum(budget.values()) == found.tokens.generated + found.tokens.recomputed
    assert budget["expired"] >= sum(len(t["token_ids"]) for t in expired)
    assert budget["failed"] == 0  # what was aborted in flight had expired
