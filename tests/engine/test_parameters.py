"""How a version comes into an engine's model.

Promises: a whole version is copied; of adapters the product is added to what was loaded last as a whole, however many
came before; what is not of the model is refused, with its name, before anything is changed. What is in memory is
compared with the digests of a publication; a tensor that the engine has rounded is not, and counts as such.
"""

import re
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace
from torch import Tensor, nn

from stretto.core.canary import TensorDigest
from stretto.core.errors import TornPublication
from stretto.engine.native import parameters as engine_parameters
from stretto.engine.native.parameters import Parameters
from stretto.weights.mailbox import texts
from stretto.weights.shared_memory import SharedMemoryPublisher, SharedMemorySubscriber, name_of

START = ((1.0, 2.0, 3.0), (4.0, 5.0, 6.0))
A, B = torch.tensor([[1.0, 0.0, 2.0]]), torch.tensor([[10.0], [-1.0]])  # B A = ((10, 0, 20), (-1, 0, -2))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 2), nn.Linear(2, 2, bias=False)


def model(dtype: torch.dtype = torch.float32) -> Model:
    made = Model().to(dtype).requires_grad_(False)
    made.first.weight.copy_(torch.tensor(START))
    return made


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_adapters_are_added_to_the_start_and_never_to_a_sum(dtype: torch.dtype) -> None:
    made = model(dtype)
    parameters, second = Parameters(made), made.second.weight.clone()
    for scale in (1.0, 2.0, 0.5):
        parameters.load({"first.lora_A": A, "first.lora_B": scale * B})
        expected = torch.tensor([[1 + 10 * scale, 2, 3 + 20 * scale], [4 - scale, 5, 6 - 2 * scale]])
        assert torch.equal(made.first.weight.float(), expected)
    assert torch.equal(made.second.weight, second)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_publication_in_the_engines_dtype_gives_the_weights_of_float32(dtype: torch.dtype, tmp_path: Path) -> None:
    trained = {name: torch.randn(parameter.shape) for name, parameter in model().named_parameters()}
    loaded = []
    for published in (None, dtype):
        made = model(dtype)
        SharedMemoryPublisher("run", tmp_path, published).publish(0, trained.items())
        Parameters(made).load(SharedMemorySubscriber("run", tmp_path).load(0))
        loaded.append(dict(made.named_parameters()))
    assert all(torch.equal(loaded[0][name], loaded[1][name]) for name in trained)


def test_adapters_after_a_whole_version_are_added_to_that_one() -> None:
    made = model()
    parameters = Parameters(made)
    parameters.load({"first.lora_A": A, "first.lora_B": B})
    whole = {name: torch.zeros_like(parameter) for name, parameter in made.named_parameters()}
    parameters.check(2, whole)
    parameters.load(whole)
    assert not any(parameter.any() for parameter in made.parameters())
    parameters.load({"first.lora_A": A, "first.lora_B": B})
    assert made.first.weight.tolist() == [[10, 0, 20], [-1, 0, -2]]


def test_a_layer_that_later_adapters_leave_out_has_its_base_weight_again(tmp_path: Path) -> None:
    made = model()
    parameters, second = Parameters(made), made.second.weight.clone()
    both = {"first.lora_A": A, "first.lora_B": B, "second.lora_A": torch.ones(1, 2), "second.lora_B": torch.ones(2, 1)}
    parameters.load(both)
    fewer = {"first.lora_A": A, "first.lora_B": 2 * B}
    parameters.load(fewer)
    assert torch.equal(made.second.weight, second)
    assert torch.equal(made.first.weight, torch.tensor(START) + 2 * B @ A)
    assert parameters.differing(SharedMemoryPublisher("run", tmp_path).publish(0, fewer.items())) == ((), 2)
    parameters.load(both)
    assert torch.equal(made.second.weight, second + 1)


@pytest.mark.parametrize(("spare", "beyond"), [(None, []), (1 << 20, []), (8, ["first"])])
def test_base_weights_that_the_device_has_no_room_for_are_kept_on_the_host(
    spare: int | None, beyond: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a GPU what is kept in host memory is seen by who asked for it; the sums are the same."""
    made, kept = model(), list[Tensor]()

    def room(like: Tensor) -> Tensor:
        kept.append(torch.full_like(like, torch.nan))
        return kept[-1]

    monkeypatch.setattr(engine_parameters, "pinned", room)
    parameters, before = Parameters(made), made.first.weight.detach().clone()
    parameters.spare = spare
    for scale in (1, 2):
        parameters.load({"first.lora_A": A, "first.lora_B": scale * B})
        assert torch.equal(made.first.weight, before + scale * B @ A)
    assert [one.tolist() for one in kept] == [before.tolist() for _ in beyond]
    assert parameters.differing({}) == ((), 0)


def test_memory_is_compared_with_the_digests_of_a_publication(tmp_path: Path) -> None:
    made, publisher = model(), SharedMemoryPublisher("run", tmp_path)
    parameters = Parameters(made)
    digests = publisher.publish(0, made.named_parameters())
    assert parameters.differing(digests) == ((), 3)
    made.second.weight.view(torch.int32)[1, 0] ^= 1
    made.first.weight.data = made.first.weight.t().contiguous().t()  # how it lies is nobody's business
    assert parameters.differing(digests) == (("second.weight",), 3)


def test_weights_on_a_gpu_are_compared_by_their_sums_and_never_copied_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every flipped bit and every swap is found by 16 bytes of a tensor; here as if they lay on a GPU."""

    def copies(tensor: Tensor) -> TensorDigest:
        raise AssertionError(f"{tensor.shape} was copied")

    for kind in (torch.float32, torch.bfloat16):
        made = model(kind)
        found = texts(dict(made.named_parameters()))
        digests = {name: TensorDigest(name_of(kind), "of another way", one) for name, one in found.items()}
        parameters = Parameters(made)
        with monkeypatch.context() as patch:
            patch.setattr(engine_parameters, "is_away", lambda tensor: True)
            patch.setattr(engine_parameters, "digest_of_tensor", copies)
            assert parameters.differing(digests) == ((), 3)
            bits = made.second.weight.view(torch.int32 if kind is torch.float32 else torch.int16)
            for bit in range(8 * kind.itemsize - 1):
                bits[1, 0] ^= 1 << bit
                assert parameters.differing(digests) == (("second.weight",), 3)
                bits[1, 0] ^= 1 << bit
            made.first.weight.copy_(made.first.weight.flip(1))
            assert parameters.differing(digests)[0] == ("first.weight",)
            assert parameters.differing({"first.bias": TensorDigest("F16", "", "0" * 32)}) == ((), 0)


@pytest.mark.parametrize("away", [False, True], ids=["engine on a CPU", "engine on a GPU"])
@pytest.mark.parametrize("summed", [False, True], ids=["trainer on a CPU", "trainer on a GPU"])
def test_every_form_of_publication_is_compared_wherever_the_engine_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, away: bool, summed: bool
) -> None:
    made = model()
    digests = SharedMemoryPublisher("run", tmp_path).publish(0, made.named_parameters())
    if summed:
        digests = {name: replace(digests[name], sums=one) for name, one in texts(dict(made.named_parameters())).items()}
    monkeypatch.setattr(engine_parameters, "is_away", lambda tensor: away)
    parameters = Parameters(made)
    assert parameters.differing(digests) == ((), 3)
    made.second.weight.view(torch.int32)[1, 0] ^= 1
    assert parameters.differing(digests) == (("second.weight",), 3)


def test_a_tensor_that_the_engine_has_rounded_is_not_compared_and_counts_as_such(tmp_path: Path) -> None:
    digests = SharedMemoryPublisher("run", tmp_path).publish(0, model().named_parameters())
    assert Parameters(model(torch.bfloat16)).differing(digests) == ((), 0)


def test_adapters_that_are_not_held_differ(tmp_path: Path) -> None:
    tensors = {"first.lora_A": A, "first.lora_B": B}
    digests = SharedMemoryPublisher("run", tmp_path).publish(0, tensors.items())
    parameters = Parameters(model())
    assert parameters.differing(digests) == (("first.lora_A", "first.lora_B"), 2)
    parameters.load(tensors)
    assert parameters.differing(digests) == ((), 2)
    parameters.load({"first.lora_A": A, "first.lora_B": 2 * B})
    assert parameters.differing(digests) == (("first.lora_B",), 2)


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        ({"first.lora_A": A}, "it lacks first.lora_B"),
        ({"first.lora_B": B}, "its first.lora_B is unknown"),
        ({"third.lora_A": A, "third.lora_B": B}, "its third.lora_A (and 1 more) is unknown"),
        ({"first.lora_A": A, "first.lora_B": B, "first.weight": torch.zeros(2, 3)}, "its first.weight is unknown"),
        ({"first.lora_A": A[:, :2], "first.lora_B": B}, "first.lora_A is (1, 2), the model has (1, 3)"),
        ({"first.lora_A": A, "first.lora_B": B[:1]}, "first.lora_B is (1, 1), the model has (2, 1)"),
        ({"first.weight": torch.zeros(2, 3)}, "it lacks first.bias (and 1 more)"),
    ],
)
def test_what_is_not_of_the_model_is_refused_with_its_name(tensors: dict[str, Tensor], words: str) -> None:
    with pytest.raises(TornPublication, match=re.escape(words)):
        Parameters(model()).check(7, tensors)
