"""Programs of Tinker's cookbook, unchanged, before a server of ours: they run, and their curves rise.

Supervised ones begin with random weights, those that learn from rewards with a model that has seen demonstrations
(`conftest.warm_up`)."""

import json
from statistics import mean
from typing import Any

import pytest

from tests.real_tinker.conftest import NAME, SECONDS, Bench

pytestmark = pytest.mark.timeout(2 * SECONDS)
_SHORT = ("eval_every=0", "save_every=0")
_REWARD = "env/all/reward/total"


def curve(rows: list[dict[str, Any]], name: str) -> list[float]:
    """A metric over the steps."""
    return [row[name] for row in rows if name in row]


def test_sl_loop_learns(bench: Bench) -> None:
    words = ("batch_size=16", "learning_rate=5e-3", "lora_rank=8", "max_steps=20", "save_every=10")
    nll = curve(bench.recipe("sl_loop", "sl", *words), "train_mean_nll")
    assert len(nll) == 20
    assert nll[-1] < nll[0] / 3


def test_rl_loop_goes_on_from_what_sl_loop_left(bench: Bench) -> None:
    log = bench.folder / "logs" / "sl"
    if not (log / "checkpoints.jsonl").exists():
        pytest.skip("sl_loop has not run")
    (bench.folder / "logs" / "rl").mkdir()
    line = json.loads((log / "checkpoints.jsonl").read_text().splitlines()[-1])
    (bench.folder / "logs" / "rl" / "checkpoints.jsonl").write_text(json.dumps({**line, "batch": 3}) + "\n")
    words = ("batch_size=4", "group_size=2", "learning_rate=1e-3", "lora_rank=8", "max_steps=5", "max_tokens=32")
    rows = bench.recipe("rl_loop", "rl", *words, "save_every=0")
    assert [row["progress/batch"] for row in rows if "reward/total" in row] == [3, 4]


@pytest.mark.long
def test_rl_loop_learns(warm: Bench) -> None:
    words = ("batch_size=8", "group_size=8", "learning_rate=1e-2", "lora_rank=8", "max_steps=8", "max_tokens=12")
    rewards = curve(warm.recipe("rl_loop", "rl", *words, "save_every=0"), "reward/total")
    assert len(rewards) == 8
    assert mean(rewards[-2:]) > rewards[0] + 0.2


@pytest.mark.long
@pytest.mark.parametrize(
    ("mode", "words"),
    [
        ("synchronous", ()),
        ("asynchronous", ("max_steps_off_policy=1",)),
        ("streaming", ("stream_minibatch_config.groups_per_batch=8", "stream_minibatch_config.num_minibatches=2")),
    ],
)
def test_rl_train_learns_in_each_mode(mode: str, words: tuple[str, ...], warm: Bench) -> None:
    small = ("group_size=8", "groups_per_batch=8", "learning_rate=4e-3", "lora_rank=8", "max_tokens=12", "max_steps=8")
    rows = warm.recipe("math_rl.train", mode, "env=gsm8k", *small, *_SHORT, *words)
    rewards = curve(rows, _REWARD)
    assert mean(rewards[-2:]) > rewards[0] + 0.2
    if mode == "synchronous":
        assert max(map(abs, curve(rows, "optim/kl_sample_train_v1"))) < 1e-3  # what is trained on is what was sampled


def test_rl_train_runs_on_arithmetic(warm: Bench) -> None:
    words = ("group_size=4", "groups_per_batch=2", "lora_rank=8", "max_tokens=5", "max_steps=2")
    assert len(curve(warm.recipe("math_rl.train", "sums", "env=arithmetic", *words, *_SHORT), _REWARD)) == 2


def test_a_game_of_several_turns_runs(warm: Bench) -> None:
    words = ("renderer_name=qwen3", "group_size=2", "batch_size=1", "max_tokens=8", "max_steps=1", *_SHORT)
    [reward] = curve(warm.recipe("multiplayer_rl.guess_number.train", "game", *words), _REWARD)
    assert -10 <= reward <= 1  # ten turns, each of which costs 1 that is no guess


@pytest.mark.long
def test_a_preference_for_short_replies_is_learnt(warm: Bench) -> None:
    words = ("batch_size=8", "group_size=4", "max_tokens=32", "renderer_name=qwen3", "learning_rate=1e-2")
    rows = warm.recipe("preference.shorter.train", "shorter", *words, "max_steps=8", "eval_every=0")
    lengths = curve(rows, "env/all/ac_tokens_per_turn")
    assert mean(lengths[-2:]) < 0.8 * lengths[0]


@pytest.mark.long
def test_a_student_comes_nearer_to_its_teacher(bench: Bench) -> None:
    """The teacher is what `sl_loop` left, the student begins with random weights."""
    log = bench.folder / "logs" / "sl" / "checkpoints.jsonl"
    if not log.exists():
        pytest.skip("sl_loop, whose policy is the teacher, has not run")
    teacher = json.loads(log.read_text().splitlines()[-1])["sampler_path"]
    words = ("group_size=4", "groups_per_batch=8", "lora_rank=8", "max_tokens=12", "learning_rate=1e-2", "max_steps=10")
    told = (f"teacher_model={NAME}", f"teacher_checkpoint={teacher}", *words, *_SHORT)
    divergence = curve(bench.recipe("distillation.on_policy_distillation", "distilled", *told), "teacher_kl")
    assert len(divergence) == 10
    assert mean(divergence[-2:]) < divergence[0] / 2


def test_dpo_learns(bench: Bench) -> None:
    words = ("dataset=hhh", "batch_size=8", "learning_rate=2e-3", "max_steps=8")
    losses = curve(bench.recipe("preference.dpo.train", "dpo", *words), "dpo_loss")
    assert losses[-1] < losses[0] / 2
