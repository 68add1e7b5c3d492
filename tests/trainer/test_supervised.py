"""Promises: the loss is the exact mean over a batch's answer tokens; a small model learns its demonstrations; the same
seed gives the same model; what cannot be learned from is refused.

Of DPO: the loss by hand; at the reference it is log 2; a step is its equation written out, whatever the packing; a
model learns to prefer; the reference does not move.
"""

import math

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from stretto.core.events import SupervisedProgress
from stretto.model.packed.logprobs import pack_tokens
from stretto.trainer.batch.samples import Sample
from stretto.trainer.config import PreferenceConfig, SupervisedConfig
from stretto.trainer.messages import Demonstration, Preference
from stretto.trainer.roles.supervised import fine_tune
from stretto_app.extensions.preference_learning import dpo, prefer
from tests.tolerances import EPS, LOGITS, RATE, near
from tests.trainer.batches import adamw, assert_same, sample_logprobs
from tests.trainer.tiny import FORWARD, elsewhere, tiny

DEMONSTRATIONS = [
    Demonstration(prompt_ids=(2, 3 + k), completion_ids=(*(3 + (k + j) % 9 for j in range(1 + k)), 1)) for k in range(6)
]
CONFIG = SupervisedConfig(steps=20, batch_size=6, learning_rate=0.03, warmup_steps=5, weight_decay=0.0)


def test_a_small_model_learns_its_demonstrations() -> None:
    seen: list[SupervisedProgress] = []
    fine_tune(tiny(), DEMONSTRATIONS, CONFIG, seed=1, progress=seen.append)
    assert [p.step for p in seen] == list(range(1, 21))
    assert seen[-1].loss < 0.1 < 1.0 < seen[0].loss


def test_the_learning_rate_warms_up() -> None:
    """AdamW's first step moves a weight by at most the learning rate: a fifth of 0.03, in the first of 5 steps."""
    before, after = tiny(), tiny()
    fine_tune(after, DEMONSTRATIONS, CONFIG.model_copy(update={"steps": 1}), seed=1)
    pairs = zip(before.parameters(), after.parameters(), strict=True)
    assert max(float((one - other).detach().abs().max()) for one, other in pairs) == pytest.approx(0.006, rel=1e-3)


def test_the_same_seed_gives_the_same_model_and_another_one_another() -> None:
    config = CONFIG.model_copy(update={"steps": 4, "batch_size": 4})
    models = [tiny(), tiny(), tiny()]
    for model, seed in zip(models, (1, 1, 2), strict=True):
        fine_tune(model, DEMONSTRATIONS, config, seed=seed)
    weights = [next(model.parameters()) for model in models]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


@pytest.mark.parametrize("bad", [[], [Demonstration((), (1,))], [Demonstration((1,), ())]])
def test_what_cannot_be_learned_from_is_refused(bad: list[Demonstration]) -> None:
    with pytest.raises(ValueError, match="each with a prompt and a completion"):
        fine_tune(tiny(), bad, CONFIG, seed=1)


@pytest.mark.parametrize("tokens", [1, 24, 10_000])
def test_a_step_is_the_cross_entropy_written_out(tokens: int) -> None:
    ours, plain = tiny(), tiny()
    numbers = {"learning_rate": RATE, "eps": EPS, "weight_decay": 0.1, "max_grad_norm": 0.7}
    config = SupervisedConfig.model_validate({"steps": 1, "batch_size": 4, "micro_batch_tokens": tokens, **numbers})
    shown = [Demonstration((2, 3), tuple(4 + (k + j) % 7 for j in range(k + 1))) for k in range(4)]
    seen: list[SupervisedProgress] = []
    fine_tune(ours, shown, config, seed=1, progress=seen.append)
    samples = [
        Sample("", d.prompt_ids + d.completion_ids, 2, tuple(range(2, 2 + len(d.completion_ids))), (), (), ())
        for d in shown
    ]
    optimizer = adamw(plain)
    loss = -torch.cat([sample_logprobs(plain, sample)[0] for sample in samples]).mean()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.7)
    optimizer.step()
    assert_same(ours, plain, steps=1)
    assert seen[0].loss == near(float(loss.detach()), FORWARD, size=LOGITS)


PAIRS = [
    Preference(
        prompt_ids=(2, 3 + k),
        chosen_ids=(*(3 + (k + j) % 9 for j in range(1 + k)), 1),
        rejected_ids=(*(3 + (2 * k + j) % 7 for j in range(5 - k)), 1),
    )
    for k in range(5)
]
PAIRWISE = PreferenceConfig(
    steps=1, batch_size=5, learning_rate=RATE, eps=EPS, weight_decay=0.1, max_grad_norm=0.7, beta=0.5
)


def test_the_loss_by_hand() -> None:
    # beta (1 - (-2)) = 1.5; beta (0 - 4) = -2
    losses = dpo(torch.tensor([1.0, 0.0]), torch.tensor([-2.0, 4.0]), beta=0.5)
    assert losses.tolist() == near([math.log(1 + math.exp(-1.5)), math.log(1 + math.exp(2))])


def answer_logprob(model: PreTrainedModel, prompt: tuple[int, ...], answer: tuple[int, ...]) -> Tensor:
    """The plain module on one sequence."""
    packed = pack_tokens([prompt + answer])
    ids, positions = packed.input_ids, packed.packing.position_ids
    logits = model(ids, position_ids=positions, use_cache=False, packing=packed.packing).logits[0]
    logprobs: Tensor = logits.log_softmax(-1)[:-1].gather(1, ids[0, 1:, None])
    return logprobs[len(prompt) - 1 :].sum()


@pytest.mark.parametrize("tokens", [1, 24, 10_000])
def test_a_step_is_the_equation_written_out(tokens: int) -> None:
    ours, plain, reference, seen = tiny(), tiny(), elsewhere(tiny()), list[SupervisedProgress]()
    config = PAIRWISE.model_copy(update={"micro_batch_tokens": tokens})
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
    assert_same(reference, elsewhere(tiny()))


def test_at_the_reference_the_loss_is_log_2_and_then_it_falls() -> None:
    seen: list[SupervisedProgress] = []
    config = PAIRWISE.model_copy(update={"steps": 12, "learning_rate": 3e-2, "eps": 1e-5})
    prefer(tiny(), tiny(), PAIRS, config, seed=1, progress=seen.append)
    assert seen[0].loss == near(math.log(2), FORWARD)
    assert seen[-1].loss < 0.1
    assert seen[-1].accuracy == 1.0


@pytest.mark.parametrize("bad", [[], [Preference((), (1,), (1,))], [Preference((1,), (), (1,))]])
def test_what_cannot_be_preferred_is_refused(bad: list[Preference]) -> None:
    with pytest.raises(ValueError, match="a prompt and two completions"):
        prefer(tiny(), tiny(), bad, PAIRWISE, seed=1)
