"""Promises of what a server's worker tells of its memory (`stretto_servers.worker.readback`), with layers named and cut
as those of vLLM and SGLang are.

- Fused layers, a padded vocabulary, shards of several workers, copies on each of them and layers that compute from a
  copy in an order of their own all come to the sums of the published tensors.
- A flipped bit, two numbers that change places, a skipped tensor, one that was scaled: each is named, alone.
- What the workers do not tell is not compared, and counts as such. A file that is not the trainer's is named."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.functional import linear, pad

from stretto.core.canary import TensorDigest
from stretto.core.errors import WireError
from stretto.weights.mailbox import texts
from stretto.weights.shared_memory import digest_of_tensor
from stretto_servers.staging import compare
from stretto_servers.worker.readback import Sums, held, sums_of

HEADS, KV_HEADS, HEAD, WIDTH, INNER, VOCABULARY, PADDED = 4, 2, 32, 256, 512, 50, 64
LAYER = "model.layers.0"


def published(dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """A layer and the embedding of a model."""
    drawn = torch.Generator().manual_seed(3)
    shapes = {
        "model.embed_tokens.weight": (VOCABULARY, WIDTH),
        f"{LAYER}.self_attn.q_proj.weight": (HEADS * HEAD, WIDTH),
        f"{LAYER}.self_attn.k_proj.weight": (KV_HEADS * HEAD, WIDTH),
        f"{LAYER}.self_attn.v_proj.weight": (KV_HEADS * HEAD, WIDTH),
        f"{LAYER}.self_attn.q_proj.bias": (HEADS * HEAD,),
        f"{LAYER}.self_attn.k_proj.bias": (KV_HEADS * HEAD,),
        f"{LAYER}.self_attn.v_proj.bias": (KV_HEADS * HEAD,),
        f"{LAYER}.self_attn.o_proj.weight": (WIDTH, HEADS * HEAD),
        f"{LAYER}.mlp.gate_proj.weight": (INNER, WIDTH),
        f"{LAYER}.mlp.up_proj.weight": (INNER, WIDTH),
        f"{LAYER}.mlp.down_proj.weight": (WIDTH, INNER),
        "model.norm.weight": (WIDTH,),
    }
    return {name: torch.randn(shape, generator=drawn).to(dtype) for name, shape in shapes.items()}


@dataclass
class Cut:
    """How a worker's layers are made."""

    rank: int = 0
    workers: int = 1
    packed: bool = False
    padding: int = 0  # of the inner width, in all
    beyond: float = 0.0  # what stands there


class Layer(nn.Module):
    """As a layer of vLLM or SGLang says of itself what it holds; a packed one has no weights that could be read."""

    def __init__(self, weight: Tensor, cut: Cut, bias: Tensor | None = None, **facts: Any) -> None:
        super().__init__()
        self.params_dtype, self.tp_rank, self.tp_size = weight.dtype, cut.rank, cut.workers
        self.output_size_per_partition, self.input_size_per_partition = weight.shape
        self.input_size, self.output_size = facts.pop("whole", weight.shape)[::-1]
        for name, value in facts.items():
            setattr(self, name, value)
        self.bias = None if bias is None else nn.Parameter(bias.clone())
        self.weight = nn.Parameter(weight.clone())
        if cut.packed:
            turned = weight.t().contiguous()
            self.cpu_linear = lambda x, _weight, bias: linear(x, turned.t(), bias)
            self.quant_method = SimpleNamespace(apply=lambda layer, x, bias: layer.cpu_linear(x, layer.weight, bias))
            self.weight = nn.Parameter(torch.empty(0, dtype=weight.dtype))


def model_of(tensors: Mapping[str, Tensor], cut: Cut) -> nn.Module:
    """A worker's part of the model."""

    def rows(name: str, copies: int = 1) -> Tensor:
        return tensors[name].chunk(cut.workers // copies)[cut.rank // copies]

    attention, mlp, inner = f"{LAYER}.self_attn", f"{LAYER}.mlp", INNER + cut.padding
    tensors = dict(tensors)
    for part, sides in (("gate", (0, 0, 0, cut.padding)), ("up", (0, 0, 0, cut.padding)), ("down", (0, cut.padding))):
        tensors[f"{mlp}.{part}_proj.weight"] = pad(tensors[f"{mlp}.{part}_proj.weight"], sides, value=cut.beyond)
    copies = max(1, cut.workers // KV_HEADS)
    heads = {"num_kv_head_replicas": copies}
    shards = [rows(f"{attention}.{part}_proj.weight", 1 if part == "q" else copies) for part in "qkv"]
    biases = [rows(f"{attention}.{part}_proj.bias", 1 if part == "q" else copies) for part in "qkv"]
    sizes = [len(shard) * cut.workers for shard in shards]
    qkv = torch.cat(shards)
    gate_up = torch.cat([rows(f"{mlp}.{part}_proj.weight") for part in ("gate", "up")])
    narrow = {
        name: tensors[name].chunk(cut.workers, 1)[cut.rank]
        for name in tensors
        if name.endswith(("o_proj.weight", "down_proj.weight"))
    }
    table = torch.zeros(PADDED, WIDTH, dtype=qkv.dtype)
    table[:VOCABULARY] = tensors["model.embed_tokens.weight"]
    own = table.chunk(cut.workers)[cut.rank]
    first = cut.rank * len(own)
    indices = SimpleNamespace(
        org_vocab_start_index=first, num_org_elements=max(0, min(VOCABULARY, first + len(own)) - first)
    )

    model = nn.Module()
    model.model, model.lm_head = nn.Module(), Layer(own, cut, shard_indices=indices)
    model.model.embed_tokens = Layer(own, Cut(cut.rank, cut.workers), shard_indices=indices)
    model.model.layers = nn.ModuleList([nn.Module()])
    layer: Any = model.model.layers[0]
    layer.self_attn, layer.mlp = nn.Module(), nn.Module()
    whole = (sum(sizes), WIDTH)
    layer.self_attn.qkv_proj = Layer(qkv, cut, torch.cat(biases), output_sizes=sizes, whole=whole, **heads)
    layer.self_attn.o_proj = Layer(narrow[f"{attention}.o_proj.weight"], cut, whole=(WIDTH, HEADS * HEAD))
    layer.mlp.gate_up_proj = Layer(gate_up, cut, output_sizes=[inner, inner], whole=(2 * inner, WIDTH))
    layer.mlp.down_proj = Layer(narrow[f"{mlp}.down_proj.weight"], cut, whole=(WIDTH, inner))
    model.model.norm = nn.Module()
    model.model.norm.weight = nn.Parameter(tensors["model.norm.weight"].clone())
    return model


def digests(tensors: Mapping[str, Tensor]) -> dict[str, TensorDigest]:
    return {name: digest_of_tensor(tensor) for name, tensor in tensors.items()}


def told_by(given: Mapping[str, Tensor], cut: Cut | None = None) -> dict[str, str]:
    """What a worker tells whose layers are cut so."""
    shapes = {name: tuple(tensor.shape) for name, tensor in published().items()}
    return held(model_of(given, cut or Cut()), shapes | {"lm_head.weight": (VOCABULARY, WIDTH)})


def compared(
    folder: Path,
    tensors: Mapping[str, Tensor],
    workers: int = 1,
    *,
    packed: bool = False,
    given: Mapping[str, Tensor] | None = None,
) -> tuple[tuple[str, ...], int]:
    """`tensors` were published, and the workers hold `given`."""
    folder.mkdir(exist_ok=True)
    save_file(dict(tensors), folder / "model.safetensors")
    told = [told_by(given or tensors, Cut(rank, workers, packed)) for rank in range(workers)]
    return compare(folder, digests(tensors), told)


@pytest.mark.parametrize("packed", [False, True], ids=["plain", "packed"])
@pytest.mark.parametrize("workers", [1, 2, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_whatever_is_fused_cut_padded_or_packed_is_what_was_published(
    tmp_path: Path, dtype: torch.dtype, workers: int, packed: bool
) -> None:
    tensors = published(dtype)
    assert compared(tmp_path, tensors, workers, packed=packed) == ((), len(tensors))


def test_digests_of_a_trainer_on_a_gpu_which_have_sums_too_are_compared_like_others(tmp_path: Path) -> None:
    tensors = published()
    save_file(tensors, tmp_path / "model.safetensors")
    found = digests(tensors)
    summed = {name: replace(found[name], sums=one) for name, one in texts(tensors).items()}
    assert compare(tmp_path, summed, [told_by(tensors)]) == ((), len(tensors))
    other = summed | {"model.norm.weight": replace(summed["model.norm.weight"], checksum="0" * 16)}
    assert compare(tmp_path, other, [told_by(tensors)])[0] == ("model.norm.weight",)


@pytest.mark.parametrize("workers", [1, 4])
@pytest.mark.parametrize("packed", [False, True], ids=["plain", "packed"])
def test_padding_is_no_part_of_a_tensor_and_has_to_be_zero(tmp_path: Path, workers: int, packed: bool) -> None:
    tensors = published(torch.bfloat16)
    save_file(tensors, tmp_path / "model.safetensors")
    for beyond, wrong in (
        (0.0, ()),
        (0.5, tuple(f"{LAYER}.mlp.{part}_proj.weight" for part in ("gate", "up", "down"))),
    ):
        told = [told_by(tensors, Cut(rank, workers, packed, 128, beyond)) for rank in range(workers)]
        assert compare(tmp_path, digests(tensors), told) == (wrong, len(tensors))


def test_memory_in_another_type_is_compared_with_what_was_published_in_that_type(tmp_path: Path) -> None:
    tensors = published()
    given = {name: tensor.bfloat16() for name, tensor in tensors.items()}
    assert compared(tmp_path, tensors, given=given) == ((), len(tensors))
    given[f"{LAYER}.mlp.down_proj.weight"][7, 7] *= 1.01
    assert compared(tmp_path, tensors, given=given) == ((f"{LAYER}.mlp.down_proj.weight",), len(tensors))


def bit(tensor: Tensor) -> None:
    tensor.view(torch.int16)[0] ^= 1


def places(tensor: Tensor) -> None:
    flat = tensor.view(-1)
    flat[[0, 1]] = flat[[1, 0]]


def scaled(tensor: Tensor) -> None:
    tensor *= 1.02


def other(tensor: Tensor) -> None:
    tensor.copy_(torch.randn(tensor.shape))


@pytest.mark.parametrize("packed", [False, True], ids=["plain", "packed"])
@pytest.mark.parametrize("spoil", [bit, places, scaled, other])
def test_what_differs_is_named_alone(tmp_path: Path, spoil: Callable[[Tensor], None], packed: bool) -> None:
    for name in list(published())[:: 5 if packed else 1]:  # asked for its outputs, a layer takes longer
        tensors, given = published(torch.bfloat16), published(torch.bfloat16)
        spoil(given[name])
        assert compared(tmp_path, tensors, 2, packed=packed, given=given) == ((name,), len(tensors))


def test_an_output_layer_that_kept_the_old_embedding_is_named(tmp_path: Path) -> None:
    tensors = published(torch.bfloat16)
    save_file(tensors, tmp_path / "model.safetensors")
    told = told_by(tensors, Cut(packed=True))
    before = published(torch.bfloat16) | {"model.embed_tokens.weight": torch.randn(VOCABULARY, WIDTH).bfloat16()}
    told["lm_head.weight"] = told_by(before, Cut(packed=True))["lm_head.weight"]
    assert compare(tmp_path, digests(tensors), [told]) == (("model.embed_tokens.weight",), len(tensors))


def test_what_no_worker_tells_is_not_compared(tmp_path: Path) -> None:
    tensors = published()
    save_file(tensors, tmp_path / "model.safetensors")
    told = told_by(tensors)
    assert compare(tmp_path, digests(tensors), []) == ((), 0)
    del told[f"{LAYER}.self_attn.o_proj.weight"]
    assert compare(tmp_path, digests(tensors), [told]) == ((), len(tensors) - 1)
    assert compare(tmp_path, digests(tensors), [told | {"of.no.one": "F32 4 1 1 1"}]) == ((), len(tensors) - 1)
    half = [told_by(tensors, Cut(0, 2))]
    assert compare(tmp_path, digests(tensors), half)[0] != (), "a shard is missing"


def test_a_file_that_is_not_the_trainers_is_named_whatever_the_workers_tell(tmp_path: Path) -> None:
    tensors = published()
    spoilt = published() | {"model.norm.weight": torch.ones(WIDTH)}
    save_file(spoilt, tmp_path / "model.safetensors")
    for told in ([], [told_by(spoilt)]):
        assert compare(tmp_path, digests(tensors), told)[0] == ("model.norm.weight",)
    assert compare(tmp_path, digests(tensors | {"model.more": torch.ones(2)}), [])[0] == (
        "model.norm.weight",
        "model.more",
    )


@pytest.mark.parametrize("text", ["", "F32 4 1 1", "F32 4 a 1 1", "F32 4 1 1 1 1"])
def test_what_no_worker_tells_of_its_memory_is_an_error(tmp_path: Path, text: str) -> None:
    save_file(published(), tmp_path / "model.safetensors")
    with pytest.raises(WireError, match="reports malformed checksums of its memory"):
        compare(tmp_path, digests(published()), [{"model.norm.weight": text}])


@settings(max_examples=20, deadline=None)
@given(
    rows=st.integers(1, 9),
    words=st.integers(1, 3),
    cuts=st.lists(st.integers(0, 9), max_size=3).map(sorted),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.float64]),
)
def test_sums_of_parts_add_up_to_that_of_the_whole(rows: int, words: int, cuts: list[int], dtype: torch.dtype) -> None:
    width = words * 512 // dtype.itemsize
    tensor = torch.randn(rows, width).to(dtype)
    tensor[0, 0] = -0.0
    whole = sums_of(tensor)
    assert whole is not None
    parts = Sums(whole.dtype, whole.unit)
    for start, end in zip([0, *cuts], [*cuts, rows], strict=True):
        for column in range(0, width, width // 4):
            parts.take(tensor[start:end, column : column + width // 4], start, column, width)
    assert parts == whole
    assert Sums.parse(str(whole)) == whole
    twice = Sums.parse(str(whole))
    twice.add(whole)
    assert twice.are(whole)
    assert not Sums(whole.dtype, whole.unit).are(whole)
