"""Whole runs of composed objectives, in real processes: what the recipe asks for is what happened.

- A reference is the policy at the start: no divergence at first, some later; a bonus on the entropy has it measured.
- Answers that were cut off are filtered, replaced and counted; nobody trains on them.
- With "expire" no token older than the bound is trained on, and what expired is counted (over TCP, by the way).
  `test_whole_run` has "mask" and "wait", and `tests/faults/test_determinism.py` a staleness of 0.
- A run ends by itself once its goal is reached and holds: the ledger, `inspect` and the log say why; a resume goes no
  further.
"""

import json
import socket
from collections import Counter
from pathlib import Path

import pytest

from stretto.core.records import State
from stretto.store.series.metrics import read_metrics
from tests.launch.running import Laboratory, assert_the_law, exported, steps_done, trained_ages
from tests.tolerances import EXACT

STEPS = 6
CRITIC = "algorithm.advantages={kind = 'gae', lam = 0.9, normalised = true, critic = {}}"
RIGHT = "def right(prompt, completion, answer):\n    return True\n"
REASON = "accuracy 1 reached in 2 evaluations in a row (evaluation.goal)"


@pytest.fixture(scope="module")
def run_dir(laboratory: Laboratory, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with a reference and filters, under the smallest bound: as updates are quick, answers in flight are overdue
    all the time."""
    run_dir = tmp_path_factory.mktemp("composed") / "run"
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
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
        "rollout.max_staleness=1",
        "rollout.beyond_bound=expire",
        "engine.transport=tcp",
        f"engine.base_port={port}",
    )
    return run_dir


def test_a_run_with_a_reference_and_filters_does_what_its_recipe_says(laboratory: Laboratory, run_dir: Path) -> None:
    steps, _ = read_metrics(run_dir / "metrics.jsonl")
    kept_close = [step.trainer["kl_reference"] for step in steps]
    assert len(kept_close) == STEPS
    assert all(value is not None for value in kept_close)
    # Two minibatches: the second has seen an update. Their mean is small at first, and the policy goes on from there.
    assert 0 <= (kept_close[0] or 0) < (kept_close[-1] or 0)
    assert all(step.trainer["entropy"] for step in steps)
    assert not any(step.skipped for step in steps)
    assert assert_the_law(run_dir).trajectories.filtered > 0
    trajectories = exported(laboratory, run_dir)
    trained = [one for one in trajectories if one["state"] == State.TRAINED]
    assert {one["stop_reason"] for one in trained} == {"stop"}
    assert min(Counter(one["group"] for one in trained).values()) >= 2
    reasons = {one["reason"] for one in trajectories if one["state"] == State.FILTERED}
    assert "truncated: cut off at its length" in reasons
    assert all(reason.startswith(("truncated: ", "min_group_size: only ")) for reason in reasons)


def test_what_would_be_too_old_expires_and_is_asked_again(laboratory: Laboratory, run_dir: Path) -> None:
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


def test_a_goal_that_holds_ends_a_run_with_a_critic_in_micro_batches_and_its_resume(
    laboratory: Laboratory, tmp_path: Path
) -> None:
    """Its loss chooses over a minibatch."""
    (tmp_path / "mine.py").write_text(RIGHT)
    goal = ("rewards.function=mine:right", f"rewards.path={tmp_path}", "evaluation.every=1", "evaluation.goal=1.0")
    algorithm = ("trainer.micro_batch_tokens=64", "algorithm.loss=m2po", CRITIC)
    run_dir = tmp_path / "run"
    ended = laboratory.trained(run_dir, "trainer.steps=200", *algorithm, *goal)
    assert f"stops early: {REASON}" in ended.out
    done = steps_done(run_dir)
    assert 1 <= done < 200
    found = json.loads(laboratory.run("inspect", run_dir, "--json").out)
    assert (found["state"], found["reason"]) == ("finished", REASON)
    steps, _ = read_metrics(run_dir / "metrics.jsonl")
    assert all(step.trainer["value_loss"] for step in steps)
    assert (run_dir / "checkpoints" / f"step-{done:06d}" / "critic" / "trainer.json").is_file()
    assert [step.trainer["behavior_weight_mean"] for step in steps] == [1.0] * done
    assert (steps[0].trainer["behavior_logprob_error_max"] or 0) < EXACT  # version 0 has sampled what it is trained on
    assert_the_law(run_dir)
    printed = laboratory.run("train", "--resume", run_dir).well()
    assert f"the run has ended early, after {done} steps: {REASON}; nothing is left to do" in printed
    assert "starting the roles" not in printed
    assert steps_done(run_dir) == done
