"""Promises: layers that multiply by any kernel give the values of `nn.Linear`, those of a trainer its gradients too; a
kernel's copy of a weight follows the weight, and a copy that has not followed it is told from it."""

import pytest
import torch
from torch import nn

from stretto.model.kernels import use_onednn
from stretto_kernels.steps.matmul import COPIED, GENERATION, TRAINING, Kernel, KernelChoice, Name, OneDnnLinear, fits
from tests.model.choosing import always
from tests.tolerances import assert_close

pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this torch has no oneDNN")


def pair(wide_in: int, wide_out: int, bias: bool) -> tuple[nn.Linear, nn.Linear]:
    torch.manual_seed(1)
    plain = nn.Linear(wide_in, wide_out, bias=bias)
    ours = nn.Linear(wide_in, wide_out, bias=bias)
    ours.load_state_dict(plain.state_dict())
    assert use_onednn(ours, TRAINING, always("onednn", 4)) == 1
    assert type(ours) is OneDnnLinear
    return plain, ours


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(8, 24), (24, 8), (16, 16), (7, 1)])
@pytest.mark.parametrize("tokens", [(40,), (2, 33), (1, 3)])
def test_values_and_gradients_are_as_of_nn_linear(shape: tuple[int, int], tokens: tuple[int, ...], bias: bool) -> None:
    plain, ours = pair(*shape, bias)
    x = torch.randn(*tokens, shape[0])
    left, right = x.clone().requires_grad_(), x.clone().requires_grad_()
    plain(left).square().sum().backward()
    ours(right).square().sum().backward()
    assert_close(ours(x), plain(x), shape[0])
    assert_close(right.grad, left.grad, sum(shape))
    for mine, theirs in zip(ours.parameters(), plain.parameters(), strict=True):
        assert_close(mine.grad, theirs.grad, shape[0] + x.shape[:-1].numel())


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_types_are_left_to_torch(dtype: torch.dtype) -> None:
    plain, ours = pair(8, 24, bias=True)
    x = torch.randn(40, 8, dtype=dtype)
    assert torch.equal(plain.to(dtype)(x), ours.to(dtype)(x))


def test_autocast_is_respected() -> None:
    _, ours = pair(8, 24, bias=False)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert ours(torch.randn(40, 8)).dtype is torch.bfloat16


def test_the_change_leaves_names_and_other_layers_alone() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    names = list(model.state_dict())
    assert use_onednn(model, TRAINING, always("onednn")) == 2
    assert list(model.state_dict()) == names
    assert [type(layer) for layer in model] == [OneDnnLinear, nn.ReLU, OneDnnLinear]
    assert use_onednn(model) == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kernel", GENERATION)
def test_every_kernel_follows_a_weight_that_is_written_to(kernel: Name, dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    plain, ours = (nn.Linear(96, 40).to(dtype).requires_grad_(False) for _ in range(2))
    ours.load_state_dict(plain.state_dict())
    use_onednn(ours, chooser=always(kernel if fits(kernel, dtype) else "linear", fewest=3))
    eps = torch.finfo(dtype).eps
    for _ in range(3):
        for tokens in (1, 2, 3, 70):
            x = torch.randn(1, tokens, 96).to(dtype)
            with torch.inference_mode():
                torch.testing.assert_close(ours(x), plain(x), rtol=2 * eps, atol=96 * eps)
        for written in (plain, ours):
            written.weight.copy_(torch.arange(40 * 96).reshape(40, 96).remainder(7) / 7 + plain.weight[0, 0])


def test_a_weight_that_is_an_embedding_as_well_keeps_its_place_in_memory() -> None:
    embedding, tied, free = nn.Embedding(40, 96), nn.Linear(96, 40), nn.Linear(40, 40)
    tied.weight = embedding.weight
    use_onednn(nn.Sequential(embedding, tied, free), chooser=always("columns"))
    assert embedding.weight.is_contiguous()
    assert not free.weight.is_contiguous()


def test_few_tokens_are_multiplied_by_the_default_and_many_by_the_kernel() -> None:
    layer, fewest = nn.Linear(64, 512).requires_grad_(False), 24
    kernel = Kernel(KernelChoice("onednn", fewest), torch.float32)
    for tokens in (1, fewest - 1, fewest, fewest + 1):
        x = torch.randn(1, tokens, 64)
        assert_close(kernel.multiply(x, layer.weight, layer.bias), layer(x), 64)
    x = torch.randn(1, fewest - 1, 64)
    assert torch.equal(kernel.multiply(x, layer.weight, layer.bias), layer(x))


@pytest.mark.parametrize(
    ("dtype", "name"),
    [(torch.float32, "panels"), (torch.float32, "packed"), *((torch.bfloat16, name) for name in COPIED)],
)
@pytest.mark.parametrize("shape", [(96, 40), (33, 3), (1, 1)])
def test_one_bit_that_differs_in_a_copy_is_seen(name: Name, dtype: torch.dtype, shape: tuple[int, int]) -> None:
    if not fits(name, dtype):
        pytest.skip(f"{name} is not for {dtype} on this processor")
    kernel, weight = Kernel(KernelChoice(name), dtype), torch.randn(shape).to(dtype)
    assert kernel.holds(weight)
    weight.mul_(2)
    assert kernel.holds(weight), "it is renewed"
    whole = torch.int32 if dtype is torch.float32 else torch.int16
    for place in {0, weight.numel() // 2, weight.numel() - 1}:
        weight.data.view(-1).view(whole)[place] ^= 1  # behind the back of the count of writes
        assert not kernel.holds(weight), place
        weight.data.view(-1).view(whole)[place] ^= 1
        assert kernel.holds(weight)
