"""Whole runs of composed objectives, in real processes: what the recipe asks for is what happened.

- A reference is the policy at the start: no divergence at first, some later; a bonus on the entropy has it measured.
- Answers that were cut off are filtered, replaced and counted; nobody trains on them.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from stretto.core.records import State
from stretto.store.series.metrics import read_metrics
from tests.launch.running import Laboratory, assert_the_law, exported
from tests.tolerances import EXACT

STEPS = 4
CRITIC = "algorithm.advantages={kind = 'gae', lam = 0.9, normalised = true, critic = {}}"


def test_a_run_with_a_reference_and_filters_does_what_its_recipe_says(laboratory: Laboratory, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    laboratory.trained(
        run_dir,
        f"trainer.steps={STEPS}",
        'algorithm.loss={kind = "gspo", anchor = "interpolated"}',
        "algorithm.aggregation=sequence_mean",
        "algorithm.correction=kpop",
        "algorithm.advantages=lite_ppo",
        "algorithm.shaping={overlong_buffer = 32}",
        "algorithm.reference={weight = 0.1}",
        "algorithm.entropy_bonus=0.01",
        "rollout.truncated=filter",
        "rollout.min_group_size=2",
    )
    steps, _ = read_metrics(run_dir / "metrics.jsonl")
    kept_close = [step.trainer["kl_reference"] for step in steps]
    assert len(kept_close) == STEPS
    assert all(value is not None for value in kept_close)
    # Two minibatches: the second has seen an update. Their mean is small at first, and the policy goes on from there.
    assert 0 <= (kept_close[0] or 0) < (kept_close[-1] or 0)
    assert all(step.trainer["entropy"] for step in steps)
    assert not any(step.skipped for step in steps)
    found = assert_the_law(run_dir)
    assert found.trajectories.filtered > 0
    trajectories = exported(laboratory, run_dir)
    trained = [one for one in trajectories if one["state"] == State.TRAINED]
    assert {one["stop_reason"] for one in trained} == {"stop"}
    assert min(Counter(one["group"] for one in trained).values()) >= 2
    reasons = {one["reason"] for one in trajectories if one["state"] == State.FILTERED}
    assert "cut off at its length" in reasons
    assert all(reason == "cut off at its length" or reason.endswith("of the group are left") for reason in reasons)


def test_a_loss_that_chooses_over_a_minibatch_and_a_critic_run_in_micro_batches(
    laboratory: Laboratory, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    laboratory.trained(run_dir, "trainer.steps=3", "trainer.micro_batch_tokens=64", "algorithm.loss=m2po", CRITIC)
    steps, _ = read_metrics(run_dir / "metrics.jsonl")
    assert all(step.trainer["value_loss"] for step in steps)
    assert {file.name for file in (run_dir / "checkpoints" / "step-000003" / "critic").iterdir()} >= {"trainer.json"}
    assert [step.trainer["behavior_weight_mean"] for step in steps] == [1.0] * 3
    assert (steps[0].trainer["behavior_logprob_error_max"] or 0) < EXACT  # version 0 has sampled what it is trained on
    assert_the_law(run_dir)
