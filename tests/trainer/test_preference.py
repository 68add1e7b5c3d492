"""Promises: DPO's loss by hand; at the reference it is log 2; a step is its equation written out, whatever the packing;
a model learns to prefer; the reference does not move.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers import PreTrainedModel

from stretto.core.events import SupervisedProgress
from stretto.model.packed.logprobs import pack_tokens
from stretto.trainer.config import PreferenceConfig
from stretto.trainer.messages import Preference
from stretto.trainer.supervised.dpo import dpo, prefer
from tests.tolerances import EPS, LOGITS, RATE, near
from tests.trainer.batches import adamw, assert_same
from tests.trainer.tiny import FORWARD, elsewhere

Build = Callable[[], PreTrainedModel]
PAIRS = [
    Preference(
        prompt_ids=(2, 3 + k),
        chosen_ids=(*(3 + (k + j) % 9 for j in range(1 + k)), 1),
        rejected_ids=(*(3 + (2 * k + j) % 7 for j in range(5 - k)), 1),
    )
    for k in range(5)
]
CONFIG = PreferenceConfig(
    steps=1, batch_size=5, learning_rate=RATE, eps=EPS, weight_decay=0.1, max_grad_norm=0.7, beta=0.5
)


def test_the_loss_by_hand() -> None:
    # beta (1 - (-2)) = 1.5; beta (0 - 4) = -2
    losses = dpo(torch.tensor([1.0, 0.0]), torch.tensor([-2.0, 4.0]), beta=0.5)
    assert losses.tolist() == near([math.log(1 + math.exp(-1.5)), math.log(1 + math.exp(2))])


@given(st.floats(-5, 5), st.floats(-5, 5), st.floats(0.01, 2))
def test_its_gradient_pulls_the_pair_apart_by_how_wrong_it_is(chosen: float, rejected: float, beta: float) -> None:
    one, other = (torch.tensor([value], requires_grad=True) for value in (chosen, rejected))
    dpo(one, other, beta).sum().backward()
    assert one.grad is not None
    assert other.grad is not None
    wrong = 1 / (1 + math.exp(beta * (chosen - rejected)))
    assert one.grad.item() == near(-beta * wrong, size=2.0)
    assert other.grad.item() == -one.grad.item()


def answer_logprob(model: PreTrainedModel, prompt: tuple[int, ...], answer: tuple[int, ...]) -> Tensor:
    """The plain module on one sequence."""
    packed = pack_tokens([prompt + answer])
    ids, positions = packed.input_ids, packed.packing.position_ids
    logits = model(ids, position_ids=positions, use_cache=False, packing=packed.packing).logits[0]
    logprobs: Tensor = logits.log_softmax(-1)[:-1].gather(1, ids[0, 1:, None])
    return logprobs[len(prompt) - 1 :].sum()


@pytest.mark.parametrize("tokens", [1, 24, 10_000])
def test_a_step_is_the_equation_written_out(build: Build, tokens: int) -> None:
    ours, plain, reference, seen = build(), build(), elsewhere(build()), list[SupervisedProgress]()
    config = CONFIG.model_copy(update={"micro_batch_tokens": tokens})
    prefer(ours, reference, PAIRS, config, seed=1, progress=seen.append)
    margins = []
    for pair in PAIRS:
        gaps = []
        for answer in (pair.chosen_ids, pair.rejected_ids):
            with torch.no_grad():
                base = answer_logprob(reference, pair.prompt_ids, answer)
            gaps.append(answer_logprob(plain, pair.prompt_ids, answer) - base)
        margins.append(gaps[0] - gaps[1])
    loss = torch.stack([(1 + (-0.5 * margin).exp()).log() for margin in margins]).mean()
    optimizer = adamw(plain)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.7)
    optimizer.step()
    assert_same(ours, plain, steps=1)
    assert seen[0].loss == near(float(loss.detach()), FORWARD, size=LOGITS)
    assert seen[0].accuracy == sum(float(margin.detach()) > 0 for margin in margins) / 5
    assert_same(reference, elsewhere(build()))


def test_at_the_reference_the_loss_is_log_2_and_then_it_falls(build: Build) -> None:
    seen: list[SupervisedProgress] = []
    config = CONFIG.model_copy(update={"steps": 30, "learning_rate": 1e-2, "eps": 1e-5})
    prefer(build(), build(), PAIRS, config, seed=1, progress=seen.append)
    assert seen[0].loss == near(math.log(2), FORWARD)
    assert seen[-1].loss < 0.1
    assert seen[-1].accuracy == 1.0


@pytest.mark.parametrize("bad", [[], [Preference((), (1,), (1,))], [Preference((1,), (), (1,))]])
def test_what_cannot_be_preferred_is_refused(build: Build, bad: list[Preference]) -> None:
    with pytest.raises(ValueError, match="a prompt and two completions"):
        prefer(build(), build(), bad, CONFIG, seed=1)
