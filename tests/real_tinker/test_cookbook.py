"""Programs of Tinker's cookbook, unchanged, before a server of ours."""

from __future__ import annotations

import json

import pytest

from tests.real_tinker.conftest import NAME, Bench

_SMALL = ("group_size=4", "groups_per_batch=8", "learning_rate=1e-2", "lora_rank=8", "max_tokens=5")
_SHORT = ("eval_every=0", "save_every=0")


def test_sl_loop_learns(bench: Bench) -> None:
    words = ("batch_size=16", "learning_rate=5e-3", "lora_rank=8", "max_steps=20", "save_every=10")
    nll = [row["train_mean_nll"] for row in bench.recipe("sl_loop", "sl", *words) if "train_mean_nll" in row]
    assert len(nll) == 20
    assert nll[-1] < nll[0] / 3


def test_rl_loop_goes_on_from_what_sl_loop_left(bench: Bench) -> None:
    log = bench.folder / "logs" / "sl"
    if not (log / "checkpoints.jsonl").exists():
        pytest.skip("sl_loop has not run")
    (bench.folder / "logs" / "rl").mkdir()
    line = json.loads((log / "checkpoints.jsonl").read_text().splitlines()[-1])
    (bench.folder / "logs" / "rl" / "checkpoints.jsonl").write_text(json.dumps({**line, "batch": 0}) + "\n")
    words = ("batch_size=4", "group_size=8", "learning_rate=2e-3", "lora_rank=8", "max_steps=4", "max_tokens=12")
    rows = bench.recipe("rl_loop", "rl", *words, "save_every=0")
    assert len([row for row in rows if "reward/total" in row]) == 4


@pytest.mark.parametrize(
    ("mode", "words"),
    [
        ("synchronous", ("max_steps=10",)),
        ("asynchronous", ("max_steps=5", "max_steps_off_policy=1")),
        (
            "streaming",
            (
                "max_steps=3",
                "stream_minibatch_config.groups_per_batch=8",
                "stream_minibatch_config.num_minibatches=2",
            ),
        ),
    ],
)
def test_rl_train_in_each_mode_on_arithmetic(mode: str, words: tuple[str, ...], bench: Bench) -> None:
    rows = bench.recipe("math_rl.train", mode, "env=arithmetic", *_SMALL, *_SHORT, *words)
    rewards = [row["env/all/reward/total"] for row in rows if "env/all/reward/total" in row]
    assert len(rewards) >= 3
    kl = [row["optim/kl_sample_train_v1"] for row in rows if "optim/kl_sample_train_v1" in row]
    if mode == "synchronous":
        assert max(map(abs, kl)) < 1e-3  # what is trained on is what was sampled


@pytest.mark.parametrize(
    ("recipe", "words"),
    [
        (
            "multiplayer_rl.guess_number.train",
            ("renderer_name=qwen3", "group_size=2", "batch_size=2", "max_steps=1", "max_tokens=8", *_SHORT),
        ),
        (
            "preference.shorter.train",
            ("batch_size=2", "group_size=4", "max_tokens=16", "renderer_name=qwen3", "max_steps=2", "eval_every=0"),
        ),
        (
            "distillation.on_policy_distillation",
            (
                f"teacher_model={NAME}",
                "group_size=2",
                "groups_per_batch=4",
                "lora_rank=8",
                "max_tokens=16",
                "max_steps=2",
                *_SHORT,
            ),
        ),
    ],
)
def test_recipes_of_several_turns_preferences_and_distillation_run(
    recipe: str, words: tuple[str, ...], bench: Bench
) -> None:
    assert bench.recipe(recipe, recipe, *words)


def test_dpo_learns(bench: Bench) -> None:
    words = ("dataset=hhh", "batch_size=8", "learning_rate=1e-3", "max_steps=6")
    losses = [row["dpo_loss"] for row in bench.recipe("preference.dpo.train", "dpo", *words) if "dpo_loss" in row]
    assert losses[-1] < losses[0] / 2
