"""Promises: the padded step that stretto's is measured against is the same step; so is one with a fixed number of
micro-batches; the fixed number is the smallest that always fits; the count of operations is right by hand."""

from pathlib import Path

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from benchmarks.flops import step_flops
from benchmarks.lengths import batch, load, tokens
from benchmarks.padded import PaddedTrainer
from benchmarks.training_steps import ALGORITHM, DealtTrainer, dealt, fixed_count, in_turn
from stretto.core.records import Sampling
from stretto.model.hf.build import build_policy
from stretto.model.hf.config import BuildConfig
from stretto.model.hf.folder import load_policy
from stretto.model.packed.attention import PACKED_ATTENTION
from stretto.trainer.config import TrainerConfig
from stretto.trainer.trainer import Trainer
from tests.tiny_policy import sized
from tests.tolerances import EPS, LOGITS, RATE, after_adam, assert_close, near, operations

CONFIG = TrainerConfig(minibatches=1, learning_rate=RATE, eps=EPS, max_grad_norm=0.7, weight_decay=0.1)
BACKWARD = operations(24, 2, backward=True)
GROUPS = [(3, (2, 5, 4)), (6, (1, 7, 3))]
LONGEST = 8


@pytest.fixture
def model(tmp_path: Path) -> Path:
    build_policy(BuildConfig(hidden_size=16, layers=2, head_dim=8, intermediate_size=24), tmp_path / "model", seed=3)
    return tmp_path / "model"


@pytest.mark.parametrize(("rows", "by_length"), [(6, False), (4, False), (2, True)])
def test_a_padded_step_is_the_packed_one(model: Path, rows: int, by_length: bool) -> None:
    ours, theirs = load_policy(model, attention=PACKED_ATTENTION), load_policy(model)
    packed = Trainer(ours, CONFIG, ALGORITHM, Sampling(max_tokens=LONGEST))
    padded = PaddedTrainer(theirs, CONFIG, ALGORITHM, LONGEST, rows, by_length=by_length)
    for version in range(2):
        one = batch(GROUPS, 22, version)
        assert packed.train(one).metrics["loss"] == near(padded.train(one), BACKWARD, size=LOGITS)
    for left, right in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(left, right, rtol=0, atol=after_adam(2, BACKWARD))


@pytest.mark.parametrize("rows", [6, 4, 1])
def test_padding_changes_neither_the_loss_nor_a_gradient(model: Path, rows: int) -> None:
    """Gradients as AdamW's first moments hold them: a tenth of each, clipped."""
    ours, theirs = load_policy(model, attention=PACKED_ATTENTION), load_policy(model)
    packed = Trainer(ours, CONFIG, ALGORITHM, Sampling(max_tokens=LONGEST))
    padded = PaddedTrainer(theirs, CONFIG, ALGORITHM, LONGEST, rows)
    assert packed.train(batch(GROUPS, 22, 0)).metrics["loss"] == near(
        padded.train(batch(GROUPS, 22, 0)), BACKWARD, size=LOGITS
    )
    optimizers = (packed.learner.adamw, padded._optimizer)
    mine, other = ([state["exp_avg"] for state in each.state.values()] for each in optimizers)
    assert_close(mine, other, BACKWARD)


@pytest.mark.parametrize("count", [1, 4, 6])
def test_a_fixed_number_of_micro_batches_changes_nothing_but_their_number(model: Path, count: int) -> None:
    models = [load_policy(model, attention=PACKED_ATTENTION) for _ in range(2)]
    whole, cut = (
        kind(one, CONFIG, ALGORITHM, Sampling(max_tokens=LONGEST))
        for kind, one in zip((Trainer, DealtTrainer), models, strict=True)
    )
    assert isinstance(cut, DealtTrainer)
    cut.count = count
    updates = [one.train(batch(GROUPS, 22, 0)) for one in (whole, cut)]
    assert updates[0].metrics["loss"] == near(updates[1].metrics["loss"], BACKWARD, size=LOGITS)
    assert updates[0].trained_tokens == updates[1].trained_tokens == tokens(GROUPS) == 22
    for left, right in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(left, right, rtol=0, atol=after_adam(1, BACKWARD))


def test_the_fixed_number_is_the_smallest_that_always_fits() -> None:
    assert dealt([1, 2, 3, 4, 5], 2) == [[1, 2], [3, 4, 5]]
    assert dealt([1, 2], 5) == [[1], [2]]
    assert fixed_count([[5, 5, 5, 5], [1, 1, 9, 9]], 18) == 2
    assert fixed_count([[5, 5, 5, 5], [1, 1, 9, 9]], 17) == 4
    with pytest.raises(ValueError, match="more than 8"):
        fixed_count([[9]], 8)


def test_ways_take_turns_and_warm_up() -> None:
    seen: list[tuple[str, int]] = []
    kinds = {"a": lambda one: seen.append(("a", one.version)), "b": lambda one: seen.append(("b", one.version))}
    seconds = in_turn(kinds, [batch(GROUPS, 22, version) for version in range(3)], warm=1)
    assert seen == [("a", 0), ("b", 0), ("a", 1), ("b", 1), ("a", 2), ("b", 2)]
    assert {name: len(each) for name, each in seconds.items()} == {"a": 2, "b": 2}


def test_operations_by_hand() -> None:
    config = Qwen3Config(**sized(10, width=4, inner=5, layers=2, heads=(2, 1), head=3))
    # a layer: q 4x6, k and v 4x3, o 6x4, and three of 4x5: 132 weights; attention of 2 heads, 3 wide, over 2 layers
    expected = 6 * (2 * 132 * 7 + 10 * 4 * 3 + (9 + 16) * 2 * 3 * 2)
    assert step_flops(Qwen3ForCausalLM(config), own_tokens=7, wanted=3, sequences=[3, 4]) == expected


def test_the_lengths_are_those_of_a_long_tailed_run() -> None:
    batches = load()
    assert len(batches) == 24
    answers = sorted(n for groups in batches for _, group in groups for n in group)
    assert all(len(group) == 8 for groups in batches for _, group in groups)
    assert answers[-1] > 4 * answers[len(answers) // 2]
