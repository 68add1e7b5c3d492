"""Promises of a training step's kernels on a GPU (in Triton's interpreter where there is none):

- values and gradients of fused layers are those of the modules, to rounding; in bfloat16 no further from float32 than
  the modules are;
- log-probabilities, entropies and their gradients are those of torch, together or either alone, at any temperature;
- NaN among logits is not hidden, and tokens that may not be drawn count nothing.
"""

import math
from typing import cast

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from stretto.model.packed import layer as packed_layer
from stretto.model.packed.layer import fuse_layers
from stretto.model.packed.logprobs import PackedTokens, chosen_logprobs, pack_tokens, token_logprobs
from stretto_kernels.gpu import layer_loops
from stretto_kernels.gpu import logprobs as by_triton
from stretto_kernels.gpu.logprobs import head_logprobs
from stretto_kernels.steps import layer
from tests.model.families import Family
from tests.model.test_layer import SHAPED, UNCHANGED, build, relative_error
from tests.tolerances import LOGITS, assert_close, operations_of

pytest.importorskip("triton")

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(autouse=True)
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer, "_loops", lambda tensor: layer_loops)
    monkeypatch.setattr(packed_layer, "LONGEST", 0)  # attention of the CPU's own takes only rows without gaps
    monkeypatch.setattr(by_triton, "computes", lambda logits: True)


def few() -> PackedTokens:
    """Few tokens, since the interpreter is slow: four sequences are gathered into cells."""
    return pack_tokens([[5, 2, 7, 1, 3], [4, 6, 2], [1, 8, 3, 3, 9, 2, 5], [2, 2]], device=DEVICE)


def step(model: PreTrainedModel, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Log-probabilities, and the gradient of all parameters."""
    with torch.autocast(DEVICE.type, dtype=torch.bfloat16, enabled=dtype is torch.bfloat16):
        logprobs = token_logprobs(model, few(), UNCHANGED).logprobs
    return [logprobs.detach(), *torch.autograd.grad(logprobs.square().mean(), list(model.parameters()))]


def distribution(logits: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probabilities of the chosen tokens, and entropies, by torch."""
    logprobs = logits.log_softmax(-1)
    return logprobs.gather(1, chosen[:, None])[:, 0], -(logprobs.exp() * logprobs).sum(-1)


@pytest.mark.parametrize("family", [SHAPED[1], SHAPED[2]], ids=str)  # norms of heads, a group of 4; biases
def test_values_and_gradients_are_those_of_the_modules(family: Family) -> None:
    model = cast(PreTrainedModel, build(family).to(DEVICE))  # type: ignore[arg-type]  # as torch's own
    expected = step(model)
    assert fuse_layers(model) == 2
    logprobs, *gradients = step(model)
    assert_close(logprobs, expected[0], operations_of(model.config), size=LOGITS)
    assert_close(gradients, expected[1:], operations_of(model.config, backward=True))


def test_bfloat16_is_as_near_to_float32_as_the_modules_are() -> None:
    model = cast(PreTrainedModel, build(SHAPED[0]).to(DEVICE))  # type: ignore[arg-type]
    exact, modules = step(model), step(model, torch.bfloat16)
    fuse_layers(model)
    fused = step(model, torch.bfloat16)
    assert not any(torch.equal(*both) for both in zip(fused, exact, strict=True))
    most = 2.0 if DEVICE.type == "cuda" else 3.0  # the interpreter cuts numbers off where a GPU rounds
    assert relative_error(fused, exact) <= most * relative_error(modules, exact)


@pytest.mark.parametrize("width", [1024, 1536, 40])
def test_sums_over_rows_are_shared_by_programs(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer_loops, "_PROGRAMS", 3)
    chance = torch.Generator().manual_seed(1)
    x, gradient, beside = (torch.randn(7, width, generator=chance).to(DEVICE) for _ in range(3))
    weight = torch.randn(width, generator=chance).to(DEVICE)
    exact, own = x.double().requires_grad_(), weight.double().requires_grad_()
    normed = own * exact * (exact.square().mean(-1, keepdim=True) + 1e-6).rsqrt()
    normed.backward(gradient.double())
    assert exact.grad is not None
    assert own.grad is not None
    found, copy, of_weight = layer_loops.norm_back(x, weight, 1e-6, gradient.bfloat16(), beside, copied=True)
    assert copy.dtype is torch.bfloat16
    assert_close(copy.float(), found, 1, dtype=torch.bfloat16)
    found, _, of_weight = layer_loops.norm_back(x, weight, 1e-6, gradient, beside)
    assert_close(found, (exact.grad + beside).float(), width)
    assert_close(of_weight, own.grad.float(), width)


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("temperature", "of_logprobs", "of_entropies"), [(1.0, 1, 0), (0.7, 1, 1), (1.0, 0, 1)])
def test_log_probabilities_and_their_gradients_are_those_of_torch(
    kind: torch.dtype, temperature: float, of_logprobs: int, of_entropies: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(by_triton, "_BLOCK", 64)
    logits = (torch.randn(5, 300, generator=torch.Generator().manual_seed(2)) * 5).to(DEVICE, kind)
    chosen, weights = torch.tensor([0, 63, 64, 200, 299]).to(DEVICE), torch.linspace(-1, 2, 5).to(DEVICE)
    exact, leaf = logits.double().requires_grad_(), logits.clone().requires_grad_()
    expected = distribution(exact / temperature, chosen)
    found = chosen_logprobs(leaf * 1, chosen, entropy=of_entropies > 0, temperature=temperature)
    for scores in (found, expected):
        parts = [
            one @ weights.to(one.dtype)
            for one, wanted in zip(scores, (of_logprobs, of_entropies), strict=True)
            if one is not None and wanted
        ]
        torch.stack(parts).sum().backward()
    assert_close(found[0], expected[0].float(), 300, size=30 / temperature)
    if found[1] is not None:
        assert_close(found[1], expected[1].float(), 300, size=30 / temperature)
    assert leaf.grad is not None
    assert exact.grad is not None
    assert_close(leaf.grad.float(), exact.grad.float(), 300 if kind is torch.float32 else 1, dtype=kind)


def test_tokens_that_may_not_be_drawn_count_nothing_and_have_no_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(by_triton, "_BLOCK", 4)  # the first block has none that may be drawn
    lowest = torch.finfo(torch.float32).min
    leaf = torch.tensor([[lowest] * 4 + [1.0, lowest, 0.0, lowest]], device=DEVICE).requires_grad_()
    logprobs, entropy = chosen_logprobs(leaf * 1, torch.tensor([4], device=DEVICE), entropy=True)
    assert entropy is not None
    expected = distribution(torch.tensor([[1.0, 0.0]], device=DEVICE), torch.tensor([0], device=DEVICE))
    assert_close((logprobs, entropy), expected)
    (logprobs.sum() + 100 * entropy.sum()).backward()
    assert leaf.grad is not None
    assert leaf.grad[0].ne(0).tolist() == [False] * 4 + [True, False, True, False]


def test_a_logit_that_is_not_a_number_is_not_hidden() -> None:
    logits = torch.zeros(2, 100, device=DEVICE)
    logits[1, 7] = math.nan
    logprobs, _ = chosen_logprobs(logits, torch.tensor([3, 3], device=DEVICE), entropy=False)
    assert logprobs.isnan().tolist() == [False, True]


def test_the_gradient_is_taken_once() -> None:
    leaf = torch.randn(2, 5, device=DEVICE, requires_grad=True)
    logprobs, _ = chosen_logprobs(leaf * 1, torch.tensor([0, 1], device=DEVICE), entropy=False)
    logprobs.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        logprobs.sum().backward()


@pytest.mark.parametrize("most", [3, 8])
@pytest.mark.parametrize("half", [False, True])
def test_the_output_matrix_is_multiplied_in_chunks(most: int, half: bool) -> None:
    chance = torch.Generator().manual_seed(3)
    hidden, weight = (torch.randn(rows, 16, generator=chance).to(DEVICE).requires_grad_() for rows in (8, 50))
    chosen = torch.arange(8).to(DEVICE)
    with torch.autocast(DEVICE.type, dtype=torch.bfloat16, enabled=half):
        found = head_logprobs(hidden, weight, chosen, entropy=True, temperature=0.8, most=most)
        expected = distribution((hidden @ weight.t()).float() / 0.8, chosen)
    dtype = torch.bfloat16 if half else torch.float32
    assert_close(found, [one.detach() for one in expected], 50, size=30)
    ours, theirs = (torch.autograd.grad(one[0].sum() + 2 * one[1].sum(), (hidden, weight)) for one in (found, expected))
    assert_close(ours, theirs, 50, dtype=dtype)
