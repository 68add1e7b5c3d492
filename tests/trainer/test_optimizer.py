"""Promises: learning rates by hand; vectors do not decay; a gradient that is not finite changes nothing, is counted,
and ends the training when it keeps coming; dropout is off; activations that are computed again give the same gradients.
"""

import math

import pytest
import torch
from torch import Tensor

from stretto.core.errors import TrainingDiverged
from stretto.core.records import Sampling
from stretto.model.packed.logprobs import pack_tokens
from stretto.trainer.adapters import adapt
from stretto.trainer.config import LoraConfig, OptimizerConfig
from stretto.trainer.optimizer import Learner, learning_rate
from tests.tolerances import assert_close, near
from tests.trainer.staging import staged
from tests.trainer.tiny import FORWARD, tiny

PACKED = pack_tokens([(1, 2, 3, 4), (5, 6)])


def rates(steps: int, **options: object) -> list[float]:
    config = OptimizerConfig.model_validate({"learning_rate": 1.0, **options})
    return [learning_rate(config, step, steps) for step in range(steps)]


def test_learning_rates_by_hand() -> None:
    assert rates(3) == [1.0, 1.0, 1.0]
    assert rates(4, warmup_steps=2) == [0.5, 1.0, 1.0, 1.0]
    assert rates(6, warmup_steps=2, schedule="linear") == [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]
    assert rates(4, schedule="cosine") == pytest.approx([1.0, 0.5 + 0.5 / math.sqrt(2), 0.5, 0.5 - 0.5 / math.sqrt(2)])


def test_a_run_longer_than_its_schedule_stays_at_the_end_of_it() -> None:
    assert learning_rate(OptimizerConfig(learning_rate=1.0, schedule="linear"), 12, steps=10) == 0.0


def test_norms_and_biases_do_not_decay() -> None:
    decaying, free = Learner(tiny(), OptimizerConfig(weight_decay=0.05)).adamw.param_groups
    assert (decaying["weight_decay"], free["weight_decay"]) == (0.05, 0.0)
    assert {p.dim() for p in decaying["params"]} == {2}
    assert {p.dim() for p in free["params"]} == {1}


def test_the_gradient_is_clipped_by_its_global_norm() -> None:
    learner = Learner(tiny(), OptimizerConfig(max_grad_norm=0.01, weight_decay=0.0))
    (-learner.logprobs(PACKED).logprobs.sum()).backward()
    before = math.sqrt(sum(float(p.grad.square().sum()) for p in learner.model.parameters() if p.grad is not None))
    assert learner.step(1e-3, training_step=0).grad_norm == near(before, FORWARD)
    moment = math.sqrt(sum(float(s["exp_avg"].square().sum()) for s in learner.adamw.state.values()))
    assert moment == near(0.1 * 0.01, FORWARD)  # (1 - beta1) * clipped gradient


def test_a_gradient_that_is_not_finite_changes_nothing_and_is_counted() -> None:
    learner = Learner(tiny(), OptimizerConfig(max_bad_steps=2))
    before = [p.clone() for p in learner.model.parameters()]
    (learner.logprobs(PACKED).logprobs.sum() * math.nan).backward()
    assert not learner.step(1e-3, training_step=0).taken
    assert all(torch.equal(p, q) for p, q in zip(learner.model.parameters(), before, strict=True))
    assert learner.bad_steps_in_a_row == 1
    learner.logprobs(PACKED).logprobs.sum().backward()
    assert learner.step(1e-3, training_step=1).taken
    assert learner.bad_steps_in_a_row == 0


def test_the_smallest_epsilon_makes_no_leap_where_the_square_of_a_gradient_is_zero() -> None:
    """Of a token with the probability 1e-25 the output row has such a gradient; its square is 0 in float32."""
    learner = Learner(tiny(), OptimizerConfig(eps=1e-20, weight_decay=0.0))
    before = [p.clone() for p in learner.model.parameters()]
    (learner.logprobs(PACKED).logprobs.sum() * 1e-25).backward()
    assert learner.step(1e-3, training_step=0).taken
    assert all((p - q).abs().max() < 1e-3 for p, q in zip(learner.model.parameters(), before, strict=True))


def test_bad_steps_in_a_row_end_the_training_with_a_name() -> None:
    learner = Learner(tiny(), OptimizerConfig(max_bad_steps=2))
    (learner.logprobs(PACKED).logprobs.sum() * math.inf).backward()
    learner.step(1e-3, training_step=41)
    (learner.logprobs(PACKED).logprobs.sum() * math.inf).backward()
    with pytest.raises(TrainingDiverged, match="step 42: 2 optimizer steps in a row"):
        learner.step(1e-3, training_step=42)


def test_a_temperature_of_zero_has_no_log_probabilities() -> None:
    with pytest.raises(ValueError, match="above 0"):
        Learner(tiny(), OptimizerConfig(), Sampling(max_tokens=1, temperature=0.0))


def test_bfloat16_computes_close_by_and_keeps_parameters_in_float32() -> None:
    full, half = Learner(tiny(), OptimizerConfig()), Learner(tiny(), OptimizerConfig(dtype="bfloat16"))
    ours, theirs = full.logprobs(PACKED).logprobs, half.logprobs(PACKED).logprobs
    assert theirs.dtype is torch.float32
    assert not torch.equal(ours, theirs)
    assert_close(theirs, ours, FORWARD, dtype=torch.bfloat16, size=1.0)
    theirs.sum().backward()
    assert half.step(1e-3, training_step=0).taken
    assert {p.dtype for p in half.model.parameters()} == {torch.float32}


def test_in_bfloat16_steps_too_small_for_it_are_not_lost() -> None:
    """The parameters that AdamW moves are float32: what bfloat16 cannot tell apart today adds up."""
    learner = Learner(tiny(), OptimizerConfig(dtype="bfloat16", weight_decay=0.0))
    matrix = learner.model.get_output_embeddings().weight
    with torch.no_grad():
        matrix.copy_(matrix.bfloat16())
    before, large = matrix.detach().clone(), matrix.detach().abs() > 0.01  # where bfloat16 has steps of 6e-5
    for _ in range(8):
        (-learner.logprobs(PACKED).logprobs.sum()).backward()
        learner.step(1e-6, 0)
        assert torch.equal(matrix.bfloat16()[large], before.bfloat16()[large])
    assert float((matrix.detach() - before)[large].abs().max()) > 4e-6
    states = [value for state in learner.adamw.state.values() for value in state.values()]
    assert {value.dtype for value in states} == {torch.float32}


@pytest.mark.parametrize("lora", [None, LoraConfig(rank=2)])
def test_moments_in_host_memory_give_the_same_weights(lora: LoraConfig | None) -> None:
    """To the last bit; they go through the device in several parts."""
    learners = []
    for states in ("device", "host"):
        model = tiny()
        if lora is not None:
            adapt(model, lora)
        learner = Learner(model, OptimizerConfig.model_validate({"optimizer_states": states, "max_grad_norm": 0.01}))
        with staged(largest=512) as through:
            for step in range(3):
                (-learner.logprobs(PACKED).logprobs.sum()).backward()
                assert learner.step(1e-2, step).taken
        moments = 3 * 2 * sum(p.nbytes for p in learner.model.parameters() if p.requires_grad)
        assert sum(through) == (moments if states == "host" else 0)
        learners.append(learner)
    device, host = learners
    for ours, theirs in zip(host.model.parameters(), device.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)
        if ours.requires_grad:
            assert all(torch.equal(host.state_of(ours)[key], one) for key, one in device.state_of(theirs).items())


def test_activations_that_are_computed_again_take_less_memory_and_give_the_same_gradients() -> None:
    gradients, kept = list[list[Tensor | None]](), list[int]()
    for again in (False, True):
        learner, held = Learner(tiny(), OptimizerConfig(activation_checkpointing=again)), list[int]()

        def hold(tensor: Tensor, held: list[int] = held) -> Tensor:
            held.append(tensor.numel())
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(hold, lambda tensor: tensor):
            value = learner.logprobs(PACKED).logprobs.sum()
        kept.append(sum(held))
        value.backward()
        gradients.append([p.grad for p in learner.model.parameters()])
    for plain, again_computed in zip(*gradients, strict=True):
        assert again_computed is not None
        assert plain is not None
        assert torch.equal(again_computed, plain)
    assert kept[1] < kept[0] / 2
