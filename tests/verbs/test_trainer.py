"""`stretto.Trainer`.

- A step is AdamW's with the numbers that are given for it; a gradient that is not finite changes nothing.
- A gradient is that of whole calls, whatever ends a call in the middle; `load` forgets it.
- Adapters of one model in memory are trained apart; what is saved goes on bit for bit; peft loads what is exported.
- A version is what `weights` gives out, however many steps it took.
"""

import contextlib
import itertools
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import PeftModel
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

import stretto
from stretto.core.errors import StoreError
from stretto.model.hf.build import build_policy
from stretto.store.lock import is_held
from stretto_verbs.models import merged
from tests.tiny_policy import TINY
from tests.verbs.plain import plain_logprobs, plain_model


def test_steps_are_those_of_adamw_with_their_own_numbers(folder: Path, data: list[stretto.Datum]) -> None:
    trainer, model = stretto.Trainer(folder, weight_decay=0.0), plain_model(folder)
    groups = [
        {"params": [p for p in model.parameters() if (p.dim() >= 2) == matrices], "weight_decay": 0.0}
        for matrices in (True, False)
    ]
    adamw = torch.optim.AdamW(groups)
    for rate, betas, eps, decay, clip in [
        (1e-3, (0.9, 0.95), 1e-8, 0.1, 0.1),
        (3e-3, (0.8, 0.9), 1e-5, 0.0, math.inf),
        (1e-3, (0.9, 0.999), 1e-6, 0.2, 1.0),
    ]:
        trainer.forward_backward(data, "cross_entropy", aggregation="sum")
        step = trainer.optim_step(rate, beta1=betas[0], beta2=betas[1], eps=eps, weight_decay=decay, max_grad_norm=clip)
        loss = -sum((plain_logprobs(model, one) * torch.tensor(one.weights)).sum() for one in data)
        loss.backward()  # type: ignore[union-attr]
        norm = torch.nn.utils.clip_grad_norm_(list(model.parameters()), clip)
        for group, own in zip(adamw.param_groups, (decay, 0.0), strict=True):
            group.update(lr=rate, betas=betas, eps=eps, weight_decay=own)
        adamw.step()
        adamw.zero_grad()
        assert step.taken
        assert step.grad_norm == pytest.approx(float(norm), rel=1e-4)
    theirs = dict(model.named_parameters())
    for name, parameter in trainer._learner.model.named_parameters():
        assert torch.allclose(parameter, theirs[name], atol=2e-5), name


def test_a_gradient_of_any_layout_in_memory_is_the_same_step(folder: Path, data: list[stretto.Datum]) -> None:
    trainers = [stretto.Trainer(folder, learning_rate=1e-2) for _ in range(2)]
    for trainer in trainers:
        trainer.forward_backward(data)
    trainers[1].gradient = [one.t().contiguous().t() if one is not None else None for one in trainers[1].gradient]
    for trainer in trainers:
        trainer.optim_step()
    assert trainers[0].forward(data).logprobs == trainers[1].forward(data).logprobs


def test_a_gradient_that_is_not_finite_changes_nothing(folder: Path, data: list[stretto.Datum]) -> None:
    trainer = stretto.Trainer(folder)
    before = trainer.forward(data).logprobs
    trainer.forward_backward(data, lambda logprobs, _: logprobs[0].sum() * math.inf)
    assert not trainer.optim_step().taken
    assert trainer.forward(data).logprobs == before


@pytest.mark.parametrize("loss", [None, "cross_entropy", lambda logprobs, _: sum(one.sum() for one in logprobs)])
def test_a_batch_without_a_token_in_the_loss_takes_no_step_and_the_loop_goes_on(folder: Path, loss: Any) -> None:
    """The third batch is a group that two others have overtaken; all of its tokens are masked."""
    scheduler = stretto.Scheduler([(2, 3)], batch_size=1, group_size=1, max_staleness=1, beyond_bound="mask")
    trainer, told = stretto.Trainer(folder), [stretto.Datum.of((2,), (3,))]
    late = scheduler.admit()
    for taken in (True, True, False):
        ticket = scheduler.admit() if taken else late
        assert ticket is not None
        version = ticket.admitted_version
        scheduler.finish(ticket, [stretto.TextCompletion("ab", (4,), (-0.5,), "stop", (version,))], [1.0])
        batch = scheduler.take()
        assert batch is not None
        before = trainer.forward(told).logprobs
        named: dict[str, Any] = {} if callable(loss) else {"aggregation": "fixed_length", "advantages": "reward"}
        assert (trainer.forward_backward(batch, loss, **named).loss != 0) == taken
        assert trainer.optim_step().taken == taken
        assert (trainer.forward(told).logprobs != before) == taken
        scheduler.advance(trainer.weights().version)


def own(logprobs: Sequence[Tensor], data: Sequence[stretto.Datum]) -> Tensor:
    return -sum((one * one).sum() for one in logprobs)  # type: ignore[return-value]


@given(
    loss=st.sampled_from(["cross_entropy", "ppo", own]),
    at=st.integers(0, 5),
    calls=st.integers(0, 2),
    error=st.sampled_from([KeyboardInterrupt, MemoryError, RuntimeError]),
)
@settings(max_examples=12)
def test_a_call_that_ends_in_the_middle_leaves_the_gradient_as_it_was(
    folder: Path, data: list[stretto.Datum], loss: Any, at: int, calls: int, error: type[BaseException]
) -> None:
    """Repeated, it counts once, bit for bit; at whichever forward pass of its micro-batches it ended."""
    trainer, other = (stretto.Trainer(folder, micro_batch_tokens=16) for _ in range(2))
    for one in (trainer, other):
        for _ in range(calls):
            one.forward_backward(data[:2], "cross_entropy")
    compute: Any = trainer._learner.logprobs
    passes = itertools.count()

    def broken(*arguments: Any, **named: Any) -> Any:
        if next(passes) == at:
            raise error
        return compute(*arguments, **named)

    with pytest.MonkeyPatch.context() as patch, contextlib.suppress(error):
        patch.setattr(trainer._learner, "logprobs", broken)
        trainer.forward_backward(data, loss)
        patch.undo()
        trainer.gradient = other.gradient  # so many passes it has not: it ended well, and counts
    trainer.forward_backward(data, loss)
    other.forward_backward(data, loss)
    for ours, theirs in zip(trainer.gradient, other.gradient, strict=True):
        assert ours is not None
        assert theirs is not None
        assert torch.equal(ours, theirs)


def test_what_is_loaded_has_no_gradient(folder: Path, data: list[stretto.Datum], tmp_path: Path) -> None:
    trainer = stretto.Trainer(folder)
    trainer.save(tmp_path)
    trainer.forward_backward(data)
    trainer.load(tmp_path)
    with pytest.raises(stretto.DataError, match="optim_step: there is no gradient"):
        trainer.optim_step()


def test_adapters_of_one_model_are_trained_apart(folder: Path, data: list[stretto.Datum]) -> None:
    shared = stretto.SharedModel(folder)
    first, second = stretto.Trainer(shared, lora=4, learning_rate=1e-2), stretto.Trainer(shared, lora=8)
    places = [
        {name: p.data_ptr() for name, p in one._learner.model.named_parameters() if "lora_" not in name}
        for one in (first, second)
    ]
    assert places[0] == places[1]
    before = second.forward(data).logprobs
    for _ in range(3):
        first.forward_backward(data)
        first.optim_step()
    assert first.forward(data).logprobs != before
    assert second.forward(data).logprobs == before
    assert first.weights().bytes < second.weights().bytes  # adapters alone, of another rank


def test_saved_adapters_go_on_beside_their_base_alone(folder: Path, data: list[stretto.Datum], tmp_path: Path) -> None:
    build_policy(TINY, tmp_path / "other", seed=2)  # of the same shapes and tokenizer
    trainer = stretto.Trainer(folder, lora=4)
    trainer.forward_backward(data)
    trainer.optim_step()
    saved = trainer.save(tmp_path / "saved")
    stranger = stretto.Trainer(tmp_path / "other", lora=4)
    before = stranger.forward(data).logprobs
    with pytest.raises(StoreError, match="is of adapters to another model, by "):
        stranger.load(tmp_path / "saved")
    assert stranger.forward(data).logprobs == before
    assert stretto.Trainer(folder, lora=4).load(tmp_path / "saved") == 1
    assert sorted(json.loads((saved / "base.json").read_bytes()))[-1] == "model.norm.weight"


@pytest.mark.parametrize("lora", [None, 4], ids=["whole", "adapters"])
def test_what_is_saved_goes_on_bit_for_bit(
    folder: Path, data: list[stretto.Datum], tmp_path: Path, lora: int | None
) -> None:
    first = stretto.Trainer(folder, lora=lora, learning_rate=1e-2)
    for _ in range(2):
        first.forward_backward(data)
        first.optim_step()
    path = first.save(tmp_path)
    first.forward_backward(data)
    first.optim_step()
    first.close()
    path.rename(path.with_name(f".{path.name}.old"))  # a kill, while the version was saved again
    again, new = (stretto.Trainer(folder, lora=lora, learning_rate=1e-2) for _ in range(2))
    assert again.load(tmp_path) == again.version == 1
    new.load(tmp_path, optimizer=False)
    assert again.forward(data).logprobs == new.forward(data).logprobs
    for one in (again, new):
        one.forward_backward(data)
        one.optim_step()
    assert again.forward(data).logprobs == first.forward(data).logprobs
    assert new.forward(data).logprobs != first.forward(data).logprobs
    assert not is_held(tmp_path / "checkpoints")


def test_a_version_is_what_is_given_out(folder: Path, data: list[stretto.Datum]) -> None:
    trainer = stretto.Trainer(folder)
    assert trainer.version == trainer.weights().version == 0
    for _ in range(2):
        trainer.forward_backward(data)
        trainer.optim_step()
        assert trainer.version == 1
    assert trainer.weights().version == trainer.weights().version == 1
    with pytest.raises(stretto.UserError, match="optim_step: there is no gradient; call forward_backward before it"):
        trainer.optim_step()
    with pytest.raises(ZeroDivisionError):
        trainer.forward_backward(data, lambda logprobs, _: logprobs[0].sum() * (1 // 0))
    with pytest.raises(stretto.UserError, match="optim_step: there is no gradient"):
        trainer.optim_step()
    assert trainer.version == 1
    trainer.forward_backward(data)
    trainer.optim_step()
    assert trainer.version == 2


def test_what_is_exported_is_the_policy_and_peft_loads_the_adapters(
    folder: Path, data: list[stretto.Datum], tmp_path: Path
) -> None:
    trainer = stretto.Trainer(folder, lora={"rank": 4, "target_modules": ["q_proj", "down_proj"]}, learning_rate=1e-2)
    for _ in range(2):
        trainer.forward_backward(data)
        trainer.optim_step()
    trainer.export(tmp_path / "whole")
    trainer.export(tmp_path / "adapters", adapters_only=True)
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    models: list[nn.Module] = [
        plain_model(tmp_path / "whole"),
        PeftModel.from_pretrained(base, tmp_path / "adapters").eval(),
    ]
    for model in models:
        for datum, expected in zip(data, trainer.forward(data).logprobs, strict=True):
            assert plain_logprobs(model, datum).tolist() == pytest.approx(expected, abs=1e-4)
    base_parameters = dict(plain_model(folder).named_parameters())
    whole = merged(base_parameters, trainer.weights().tensors)  # what servers of other makes get
    exported = dict(plain_model(tmp_path / "whole").named_parameters())
    assert whole.keys() == exported.keys()
    assert all(torch.allclose(whole[name], one, atol=1e-6) for name, one in exported.items())
    assert any(not torch.equal(one, base_parameters[name]) for name, one in exported.items())
