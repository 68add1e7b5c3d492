"""Promises of the fused decoder layers of a training step:

- values and gradients are those of the modules, with shared prompts and several threads too, to rounding; in bfloat16
  no further from float32 than the modules are;
- the same calls with the same numbers give the same bits;
- only layers of Llama's shape are fused, and a fused model still serves callers of its plain forward.
"""

import math
import weakref
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, PreTrainedModel

from stretto.core.records import Sampling
from stretto.model.hf.layers import checkpoint_activations, decoder_layers
from stretto.model.packed.attention import PACKED_ATTENTION, bucketed
from stretto.model.packed.layer import fuse_layers, places_of
from stretto.model.packed.logprobs import PackedTokens, pack_tokens, token_logprobs
from stretto.trainer.adapters import adapt
from stretto.trainer.config import LoraConfig
from stretto_kernels import layer_loops as loops
from stretto_kernels import short
from stretto_kernels.compiled import AVAILABLE
from stretto_kernels.rule import Rule
from tests.model.families import FAMILIES, VOCABULARY, Family, config
from tests.tolerances import LOGITS, assert_close, operations_of, rounding

pytestmark = pytest.mark.skipif(not AVAILABLE, reason="numba is not installed")

SHAPED: list[Family] = [
    ("qwen3", 2, 2, {}),
    ("qwen3", 4, 1, {}),
    ("qwen2", 4, 2, {}),
    ("llama", 2, 1, {}),
    ("mistral", 4, 2, {"sliding_window": None}),
]
UNCHANGED = Sampling(max_tokens=1)


def build(family: Family) -> PreTrainedModel:
    torch.manual_seed(3)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config(*family), attn_implementation=PACKED_ATTENTION)
    model.eval()
    return model


def packed(shared: bool) -> PackedTokens:
    chance = torch.Generator().manual_seed(1)
    prompt, *answers = (torch.randint(VOCABULARY, (n,), generator=chance).tolist() for n in (6, 1, 9, 40, 2, 13))
    rows = [[*prompt, *answer] for answer in answers]
    return pack_tokens(rows, [range(6, len(row)) for row in rows], prompts=[6] * len(rows) if shared else None)


def step(model: PreTrainedModel, tokens: PackedTokens, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Log-probabilities, and the gradient of all parameters."""
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype is torch.bfloat16):
        logprobs = token_logprobs(model, tokens, UNCHANGED).logprobs
    return [logprobs.detach(), *torch.autograd.grad(logprobs.square().mean(), list(model.parameters()))]


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("family", SHAPED, ids=str)
def test_values_and_gradients_are_those_of_the_modules(family: Family, shared: bool) -> None:
    model, tokens = build(family), packed(shared)
    expected = step(model, tokens)
    assert fuse_layers(model) == 2
    logprobs, *gradients = step(model, tokens)
    assert_close(logprobs, expected[0], operations_of(model.config), size=LOGITS)
    assert_close(gradients, expected[1:], operations_of(model.config, backward=True))


def test_threads_share_rows_and_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokens = build(SHAPED[0]), packed(shared=True)
    expected = step(model, tokens)
    fuse_layers(model)
    for module in (loops, short):
        monkeypatch.setattr(module, "parts_of", lambda rows, width: min(rows, 2))
    found = step(model, tokens)
    for ours, theirs in zip(found, expected, strict=True):
        assert_close(ours, theirs, operations_of(model.config, backward=True), size=LOGITS)
    assert all(torch.equal(*both) for both in zip(found, step(model, tokens), strict=True)), "the same bits again"


def test_an_error_of_one_of_several_threads_reaches_the_caller() -> None:
    def looped(first: int, end: int, part: int) -> None:
        if part == 1:
            raise MemoryError

    with pytest.raises(MemoryError):
        loops.over(looped, 8, 2)


def test_bfloat16_is_as_near_to_float32_as_the_modules_are() -> None:
    model, tokens = build(SHAPED[0]), packed(shared=True)
    exact, modules = step(model, tokens), step(model, tokens, torch.bfloat16)
    fuse_layers(model)
    fused = step(model, tokens, torch.bfloat16)
    assert {found.dtype for found in fused} == {torch.float32}
    assert not any(torch.equal(*both) for both in zip(fused, exact, strict=True))
    # The errors of a gradient of 16 numbers are too few to compare: those of all are.
    assert relative_error(fused, exact) <= 1.5 * relative_error(modules, exact)
    for found, theirs, right in zip(fused, modules, exact, strict=True):
        assert float((found - right).norm()) <= 3 * float((theirs - right).norm()) + rounding(size=1.0)


def relative_error(found: Sequence[Tensor], exact: Sequence[Tensor]) -> float:
    """Root of the sum of the squared relative errors of all tensors."""
    return math.hypot(*(float((one - right).norm() / right.norm()) for one, right in zip(found, exact, strict=True)))


def test_bfloat16_copies_of_weights_go_with_the_activations() -> None:
    made = list[weakref.ref[Tensor]]()

    class Record(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            found = function(*args, **kwargs or {})
            if isinstance(found, Tensor) and found.dtype is torch.bfloat16 and found.shape in sizes:
                made.append(weakref.ref(found))
            return found

    def living() -> int:
        return sum(one() is not None for one in made)

    for checkpointed in (False, True):
        model, tokens = build(SHAPED[0]), packed(shared=True)
        sizes = {(96, 32), (2 * 48, 32), (32, 32), (32, 48)}  # q, k, v; gate and up; output; down
        fuse_layers(model)
        if checkpointed:
            checkpoint_activations(model)
        made.clear()
        recording: Any = Record
        with recording(), torch.autocast("cpu", dtype=torch.bfloat16):
            logprobs = token_logprobs(model, tokens, UNCHANGED).logprobs
        assert len(made) >= 8, "four of each layer"
        assert (living() == 0) is checkpointed
        logprobs.sum().backward()
        assert living() == 0, "while the log-probabilities are still used"


@pytest.mark.parametrize("family", [one for one in FAMILIES if one[0] not in ("qwen3", "qwen2", "llama")], ids=str)
def test_layers_of_other_shapes_stay_as_they_are(family: Family) -> None:
    assert fuse_layers(build(family)) == 0


def test_a_layer_with_a_norm_in_bfloat16_is_not_fused() -> None:
    model = build(SHAPED[0])
    model.get_submodule("model.layers.1.post_attention_layernorm").to(torch.bfloat16)
    assert fuse_layers(model) == 1


def test_a_layer_without_rotary_embedding_is_not_fused_however_small_its_weights() -> None:
    model = build(("smollm3", 4, 2, {"initializer_range": 0.001, "no_rope_layers": [1, 0]}))
    assert fuse_layers(model) == 1
    assert ["forward" in vars(layer) for layer in decoder_layers(model)] == [True, False]


def test_a_fused_model_serves_its_plain_forward_and_is_fused_once() -> None:
    model, ids = build(SHAPED[1]), torch.arange(7)[None]
    model.set_attn_implementation("sdpa")
    expected = model(ids).logits
    model.set_attn_implementation(PACKED_ATTENTION)
    assert (fuse_layers(model), fuse_layers(model)) == (2, 0)
    model.set_attn_implementation("sdpa")
    assert torch.equal(model(ids).logits, expected)


def test_frozen_weights_have_no_gradient() -> None:
    model, tokens = build(SHAPED[0]), packed(shared=True)
    fuse_layers(model)
    trained = model.get_parameter("model.layers.0.mlp.up_proj.weight")
    (expected,) = torch.autograd.grad(token_logprobs(model, tokens, UNCHANGED).logprobs.sum(), [trained])
    model.requires_grad_(False)
    trained.requires_grad_()
    token_logprobs(model, tokens, UNCHANGED).logprobs.sum().backward()
    assert trained.grad is not None
    assert torch.equal(trained.grad, expected)
    assert {name for name, one in model.named_parameters() if one.grad is not None} == {
        "model.layers.0.mlp.up_proj.weight"
    }


def test_adapters_added_later_are_computed() -> None:
    model, tokens = build(SHAPED[0]), packed(shared=True)
    fuse_layers(model)
    adapt(model, LoraConfig(rank=2, alpha=4))
    adapters = [one for one in model.parameters() if one.requires_grad]
    logprobs = token_logprobs(model, tokens, UNCHANGED).logprobs
    gradients = torch.autograd.grad(logprobs.sum(), adapters)
    assert sum(bool(one.any()) for one in gradients) == len(adapters) / 2, "of B; A has none while B is zero"


@pytest.mark.parametrize("first", [False, True])
def test_hooks_of_a_layers_parts_are_called(first: bool) -> None:
    model, tokens, called = build(SHAPED[0]), packed(shared=True), list[int]()
    if first:
        fuse_layers(model)
    model.get_submodule("model.layers.1.mlp.down_proj").register_forward_hook(lambda *_: called.append(1))
    if not first:
        fuse_layers(model)
        called.clear()  # comparisons
    token_logprobs(model, tokens, UNCHANGED)
    assert called == [1]


def test_the_first_layer_may_get_a_transposed_view() -> None:
    model, packing = build(SHAPED[0]), packed(shared=True).packing
    view = torch.randn(32, packing.tokens, generator=torch.Generator().manual_seed(4)).t()[None]
    given = {"position_ids": packing.position_ids, "packing": packing, "use_cache": False}
    expected = model.base_model(inputs_embeds=view, **given).last_hidden_state.detach()
    fuse_layers(model)
    assert_close(
        model.base_model(inputs_embeds=view, **given).last_hidden_state,
        expected,
        operations_of(model.config),
        size=LOGITS,
    )


def attended(way: Any, width: int, heads: int, kv_heads: int) -> list[Tensor]:
    """Attention, and the gradients of queries, keys and values, of which the values are part of wider rows."""
    packing, chance = packed(shared=True).packing, torch.Generator().manual_seed(2)
    query, key = (torch.randn(packing.tokens, n, width, generator=chance).requires_grad_() for n in (heads, kv_heads))
    wide = torch.randn(packing.tokens, kv_heads + 1, width, generator=chance).requires_grad_()
    out = way(query, key, wide[:, 1:], packing)
    return [out.detach(), *torch.autograd.grad(out.square().sum(), (query, key, wide))]


@pytest.mark.parametrize(("width", "heads", "kv_heads"), [(8, 2, 2), (16, 3, 1), (64, 12, 2), (24, 18, 2)])
def test_short_sequences_attend_as_in_buckets(width: int, heads: int, kv_heads: int) -> None:
    expected = attended(lambda q, k, v, packing: bucketed(q, k, v, packing, Rule(scaling=0.3)), width, heads, kv_heads)
    found = attended(
        lambda q, k, v, packing: short.short_attention(q, k, v, places_of(packing), packing.longest, 0.3),
        width,
        heads,
        kv_heads,
    )
    for ours, theirs in zip(found, expected, strict=True):
        assert_close(ours, theirs, 4 * max(width, 64))
