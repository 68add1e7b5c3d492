"""Staleness is a promise of whole runs, held against the exported trajectories.

With "expire" no token older than the bound is trained on, and what expired is counted (over TCP, by the way).
`test_whole_run` has "mask" and "wait", and `tests/faults/test_determinism.py` a staleness of 0.
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


def test_what_would_be_too_old_expires_and_is_asked_again(laboratory: Laboratory, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    # Nothing is the bound, and updates are quick: answers in flight are overdue all the time.
    settings = ("rollout.max_staleness=1", "rollout.beyond_bound=expire", "trainer.steps=10")
    laboratory.trained(run_dir, *settings, "engine.transport=tcp", f"engine.base_port={port}")
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
