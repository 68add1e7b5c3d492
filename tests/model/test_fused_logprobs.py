"""Promises: log-probabilities and entropies are torch's own, and so are their gradients, together or either alone;
tokens that may not be drawn have none; the backward pass is taken in the logits themselves, and once.
"""

import math
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stretto.core.records import Sampling
from stretto.model.packed import logprobs as chosen
from stretto.model.packed.logprobs import _head_logprobs, chosen_logprobs
from tests.tolerances import assert_close, near

ROWS = st.lists(st.lists(st.floats(-20, 20), min_size=5, max_size=5), min_size=1, max_size=6)


def torchs(logits: torch.Tensor, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    logprobs = logits.log_softmax(-1)
    return logprobs.gather(1, tokens[:, None])[:, 0], -(logprobs.exp() * logprobs).sum(-1)


def test_by_hand() -> None:
    # p = 1/2, 1/4, 1/4: log p of the second is -2 ln 2, H = 3/2 ln 2; d log p / dz = -1/2, 3/4, -1/4
    logits = torch.tensor([[math.log(2), 0.0, 0.0]], requires_grad=True)
    logprobs, entropy = chosen_logprobs(logits * 1, torch.tensor([1]), entropy=True)
    assert entropy is not None
    assert logprobs.tolist() == near([-2 * math.log(2)])
    assert entropy.tolist() == near([1.5 * math.log(2)])
    logprobs.sum().backward()
    assert logits.grad is not None
    assert logits.grad.tolist() == [near([-0.5, 0.75, -0.25])]


@given(ROWS, st.floats(-2, 2), st.floats(-2, 2), st.sampled_from([1, 2, 1000]), st.sampled_from([1.0, 0.5, 1.3]))
def test_values_and_gradients_are_torchs(
    rows: list[list[float]], weight: float, of_entropy: float, block: int, temperature: float
) -> None:
    ours, theirs = (torch.tensor(rows, requires_grad=True) for _ in range(2))
    tokens = torch.tensor([k % 5 for k in range(len(rows))])
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(chosen._BLOCK, "cpu", 5 * block)
        logprobs, entropy = chosen_logprobs(ours * 1, tokens, entropy=True, temperature=temperature)
        assert entropy is not None
        (weight * logprobs.sum() + of_entropy * entropy.sum()).backward()
    expected = torchs(theirs / temperature, tokens)
    assert_close((logprobs, entropy), expected, size=20 / temperature)
    (weight * expected[0].sum() + of_entropy * expected[1].sum()).backward()
    assert_close(ours.grad, theirs.grad, size=2 * 20 / temperature**2)  # an entropy's gradient has logits in it


@pytest.mark.parametrize("kind", [0, 1])
def test_each_alone_has_its_gradient(kind: int) -> None:
    ours, theirs = (torch.linspace(-2, 3, 15).view(3, 5).requires_grad_() for _ in range(2))
    tokens = torch.tensor([0, 2, 4])
    found, expected = chosen_logprobs(ours * 1, tokens, entropy=True)[kind], torchs(theirs, tokens)[kind]
    assert found is not None
    found.square().sum().backward()
    expected.square().sum().backward()
    assert_close(ours.grad, theirs.grad)


def test_tokens_that_may_not_be_drawn_count_nothing_and_have_no_gradient() -> None:
    lowest = torch.finfo(torch.float32).min
    ours = torch.tensor([[1.0, lowest, 0.0, lowest]], requires_grad=True)
    theirs = torch.tensor([[1.0, 0.0]], requires_grad=True)
    for logits in (ours, theirs):
        logprobs, entropy = chosen_logprobs(logits * 1, torch.tensor([0]), entropy=True)
        assert entropy is not None
        (logprobs.sum() + 100 * entropy.sum()).backward()
    assert ours.grad is not None
    assert theirs.grad is not None
    assert ours.grad[0, [1, 3]].tolist() == [0.0, 0.0]
    assert_close(ours.grad[:, [0, 2]], theirs.grad)


def test_half_precision_is_computed_in_float32() -> None:
    logits = (torch.randn(4, 300) * 3).bfloat16()
    tokens = torch.tensor([3, 30, 120, 299])
    logprobs, entropy = chosen_logprobs(logits, tokens, entropy=True)
    assert_close((logprobs, entropy), torchs(logits.float(), tokens), 300)
    leaf = logits.clone().requires_grad_()
    chosen_logprobs(leaf * 1, tokens, entropy=False)[0].sum().backward()
    expected = torch.nn.functional.one_hot(tokens, 300) - logits.float().softmax(-1)
    assert leaf.grad is not None
    assert_close(leaf.grad.float(), expected, 1, dtype=torch.bfloat16)


def test_a_temperature_keeps_no_second_tensor_of_logits() -> None:
    """In half precision all that is kept of [N, V] is the logits, in that precision."""
    weight, kept = torch.randn(300, 8).bfloat16().requires_grad_(), list[torch.Tensor]()

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor)
        return tensor

    hidden, tokens = torch.randn(4, 8).bfloat16(), torch.tensor([3, 30, 120, 299])
    multiply = partial(torch.nn.functional.linear, weight=weight)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        found, _ = _head_logprobs(multiply, hidden, tokens, Sampling(max_tokens=1, temperature=0.7), False)
    assert [one.dtype for one in kept if one.shape == (4, 300)] == [torch.bfloat16]
    assert_close(found, torchs((hidden @ weight.detach().T).float() / 0.7, tokens)[0], 300)


def test_the_gradient_takes_the_place_of_the_logits_and_is_taken_once() -> None:
    leaf = torch.randn(2, 5, requires_grad=True)
    logits = leaf * 1
    logprobs, _ = chosen_logprobs(logits, torch.tensor([0, 1]), entropy=False)
    logprobs.sum().backward(retain_graph=True)
    assert leaf.grad is not None
    assert torch.equal(logits, leaf.grad)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        logprobs.sum().backward()
