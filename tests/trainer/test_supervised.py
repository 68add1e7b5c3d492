"""Promises: the loss is the exact mean over a batch's answer tokens; a small model learns its demonstrations; the same
seed gives the same model; what cannot be learned from is refused.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from transformers import PreTrainedModel

from stretto.core.events import SupervisedProgress
from stretto.trainer.batch.samples import Sample
from stretto.trainer.config import SupervisedConfig
from stretto.trainer.messages import Demonstration
from stretto.trainer.supervised.sft import fine_tune
from tests.tolerances import EPS, LOGITS, RATE, near
from tests.trainer.batches import adamw, assert_same, sample_logprobs
from tests.trainer.tiny import FORWARD

Build = Callable[[], PreTrainedModel]
DEMONSTRATIONS = [
    Demonstration(prompt_ids=(2, 3 + k), completion_ids=(*(3 + (k + j) % 9 for j in range(1 + k)), 1)) for k in range(6)
]
CONFIG = SupervisedConfig(steps=60, batch_size=6, learning_rate=0.01, warmup_steps=5, weight_decay=0.0)


def test_a_small_model_learns_its_demonstrations(build: Build) -> None:
    seen: list[SupervisedProgress] = []
    fine_tune(build(), DEMONSTRATIONS, CONFIG, seed=1, progress=seen.append)
    assert [p.step for p in seen] == list(range(1, 61))
    assert seen[-1].loss < 0.1 < 1.0 < seen[0].loss


def test_the_learning_rate_warms_up(build: Build) -> None:
    """AdamW's first step moves a weight by at most the learning rate: a fifth of 0.01, in the first of 5 steps."""
    before, after = build(), build()
    fine_tune(after, DEMONSTRATIONS, CONFIG.model_copy(update={"steps": 1}), seed=1)
    pairs = zip(before.parameters(), after.parameters(), strict=True)
    assert max(float((one - other).detach().abs().max()) for one, other in pairs) == pytest.approx(0.002, rel=1e-3)


@pytest.mark.parametrize("tokens", [1, 16, 4096])
def test_the_loss_is_the_mean_over_answer_tokens_whatever_the_packing(build: Build, tokens: int) -> None:
    model, seen = build(), list[SupervisedProgress]()
    chosen = []
    with torch.no_grad():
        for d in DEMONSTRATIONS:
            ids = torch.tensor([d.prompt_ids + d.completion_ids])
            plain = build()
            plain.set_attn_implementation("eager")
            logprobs = plain(ids).logits[0].log_softmax(-1)[:-1].gather(1, ids[0, 1:, None])[:, 0]
            chosen.append(logprobs[len(d.prompt_ids) - 1 :])
    config = CONFIG.model_copy(update={"steps": 1, "micro_batch_tokens": tokens})
    fine_tune(model, DEMONSTRATIONS, config, seed=1, progress=seen.append)
    assert seen[0].loss == near(-float(torch.cat(chosen).mean()), FORWARD, size=LOGITS)


def test_the_same_seed_gives_the_same_model_and_another_one_another(build: Build) -> None:
    config = CONFIG.model_copy(update={"steps": 4, "batch_size": 4})
    models = [build(), build(), build()]
    for model, seed in zip(models, (1, 1, 2), strict=True):
        fine_tune(model, DEMONSTRATIONS, config, seed=seed)
    weights = [next(model.parameters()) for model in models]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


@pytest.mark.parametrize("bad", [[], [Demonstration((), (1,))], [Demonstration((1,), ())]])
def test_what_cannot_be_learned_from_is_refused(build: Build, bad: list[Demonstration]) -> None:
    with pytest.raises(ValueError, match="each with a prompt and a completion"):
        fine_tune(build(), bad, CONFIG, seed=1)


@pytest.mark.parametrize("tokens", [1, 24, 10_000])
def test_a_step_is_the_cross_entropy_written_out(build: Build, tokens: int) -> None:
    ours, plain = build(), build()
    config = SupervisedConfig(
        steps=1,
        batch_size=4,
        learning_rate=RATE,
        eps=EPS,
        weight_decay=0.1,
        max_grad_norm=0.7,
        micro_batch_tokens=tokens,
    )
    shown = [Demonstration((2, 3), tuple(4 + (k + j) % 7 for j in range(k + 1))) for k in range(4)]
    fine_tune(ours, shown, config, seed=1)
    samples = [
        Sample("", d.prompt_ids + d.completion_ids, 2, tuple(range(2, 2 + len(d.completion_ids))), (), (), ())
        for d in shown
    ]
    optimizer = adamw(plain)
    (-torch.cat([sample_logprobs(plain, sample)[0] for sample in samples]).mean()).backward()
    torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.7)
    optimizer.step()
    assert_same(ours, plain, steps=1)
