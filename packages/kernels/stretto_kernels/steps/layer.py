"""Decoder layers of a training step, in two parts with gradients of their own.

    x ─► norm ─► q, k, v in one product ─► norm and rotate heads ─► attention ─┐
    │                                                                          ▼
    └──────────────────────────────────────────────────────────────► x + output matrix
                          ┌────────────────────────────────────────────────────┘
                          ├─► norm ─► gate, up in one product ─► silu(gate) · up ─► down ─┐
                          └────────────────────────────────────────────────────────► sum ◄┘

`fuse` gives this forward to the layers of Llama's shape (Llama, Mistral, Qwen), if it agrees with their own on
made-up numbers. Parameters and modules stay the same. The residual stream is float32; under autocast the rest is
bfloat16, with sums in float32. All operations between products are loops on the CPU (`stretto_kernels.layer_loops`),
and kernels of the same names on a GPU (`gpu.layer_loops`).

Axes: T token, N width of the model, A all heads of a row, H head, D width of a head, I width of the gate.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.func import functional_call
from transformers import PreTrainedModel

from stretto_kernels import layer_loops as loops
from stretto_kernels.compiled import computes
from stretto_kernels.gpu import layer_loops as gpu_loops
from stretto_kernels.steps.matmul import OneDnnLinear, product, weight_gradient

#: Attention within the sequences of a packed row: query [T, H, D], key and value [T, K, D], the packing, and the factor
#: of the scores; returns [T, H, D].
Attend = Callable[[Tensor, Tensor, Tensor, Any, float], Tensor]


@dataclass(frozen=True)
class _Layer:
    """Sizes and settings of a fused layer, which `_Before` and `_After` share. `eps`: of the norms before attention, of
    heads, and after it. `fewest`: tokens from which oneDNN multiplies; None: never. `parts`: owner, name, module."""

    heads: int
    kv_heads: int
    width: int
    eps: tuple[float, float, float]  # of the norms before attention, of heads, and after attention
    fewest: int | None  # number of tokens from which oneDNN multiplies float32; None: never
    parts: tuple[tuple[nn.Module, str, nn.Module], ...]  # owner, name and module of each part
    attend: Attend

    def times(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if bias is not None and x.is_cuda:
            return torch.addmm(bias, x, weight.t())
        found = product(x, weight) if self._by_onednn(x) else x @ weight.t()
        return found if bias is None else found.add_(bias)

    def input_gradient(self, gradient: Tensor, weight: Tensor) -> Tensor:
        return product(gradient, weight.t().contiguous()) if self._by_onednn(gradient) else gradient @ weight

    def weight_gradient(self, gradient: Tensor, x: Tensor) -> Tensor:
        """gradientᵀ · x in float32."""
        if x.is_cuda and x.dtype is not torch.float32:
            return torch.mm(gradient.t(), x, out_dtype=torch.float32)
        return weight_gradient(gradient, x) if self._by_onednn(x) else (gradient.t() @ x).float()

    def _by_onednn(self, rows: Tensor) -> bool:
        return self.fewest is not None and rows.dtype is torch.float32 and len(rows) >= self.fewest


def _stacked(dtype: torch.dtype, *groups: Sequence[Tensor]) -> list[Tensor]:
    """The weights of each group one below the other, in `dtype`; a single weight of this dtype is returned itself."""
    stacks, parts, weights = list[Tensor](), list[Tensor](), list[Tensor]()
    for group in groups:
        if len(group) == 1 and group[0].dtype is dtype:
            stacks.append(group[0])
            continue
        stacks.append(group[0].new_empty(sum(map(len, group)), group[0].shape[1], dtype=dtype))
        parts += stacks[-1].split([len(one) for one in group])
        weights += group
    if parts:
        torch._foreach_copy_(parts, weights)
    return stacks


def _computed(device: str) -> torch.dtype:
    """The dtype of computation on a kind of device: autocast's, else float32."""
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else torch.float32


def _loops(tensor: Tensor) -> ModuleType:
    """The module with the operations between matmuls, for a tensor's device: CPU loops or GPU kernels."""
    return gpu_loops if tensor.is_cuda else loops


class _Before(torch.autograd.Function):
    """First part of a layer: from the residual stream to queries, keys and values, [T, H, D]. Returns the stream too,
    for `_After`: so the gradient of the stream comes back here, and is added on the way."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        norm: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        query_bias: Tensor | None,
        key_bias: Tensor | None,
        value_bias: Tensor | None,
        query_norm: Tensor | None,
        key_norm: Tensor | None,
        angles: tuple[Tensor, Tensor],
        layer: _Layer,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        width, (queries, keys), loops = layer.width, (layer.heads, layer.kv_heads), _loops(x)
        (weights,), bias = _stacked(_computed(x.device.type), (query, key, value)), None
        hidden = loops.norm(x, norm, layer.eps[0], weights.dtype)
        if query_bias is not None and key_bias is not None and value_bias is not None:
            bias = torch.cat((query_bias, key_bias, value_bias)).to(weights.dtype)
        columns = layer.times(hidden, weights, bias)
        first, second = loops.heads(columns, (queries, keys), (query_norm, key_norm), layer.eps[1], angles)
        half = None if weights.dtype is torch.float32 else weights
        ctx.save_for_backward(x, norm, query, key, value, query_norm, key_norm, hidden, columns, half)
        ctx.angles, ctx.layer = angles, layer
        return first, second, columns[:, (queries + keys) * width :].unflatten(1, (keys, width)), x

    @staticmethod
    def backward(ctx: Any, queries: Tensor, keys: Tensor, values: Tensor, beside: Tensor) -> tuple[Any, ...]:
        x, norm, query, key, value, query_norm, key_norm, hidden, columns, half = ctx.saved_tensors
        layer, angles, eps, loops = ctx.layer, ctx.angles, ctx.layer.eps[1], _loops(x)
        weights = _stacked(torch.float32, (query, key, value))[0] if half is None else half
        given = (queries.contiguous(), keys.contiguous(), values.contiguous())
        gradient, first, second = loops.heads_back(columns, (query_norm, key_norm), eps, angles, given)
        matrices = biases = (None,) * 3
        sizes = [len(query), len(key), len(value)]
        if any(ctx.needs_input_grad[2:5]):
            matrices = layer.weight_gradient(gradient, hidden).split(sizes)
        if any(ctx.needs_input_grad[5:8]):
            biases = gradient.sum(0, dtype=torch.float32).split(sizes)
        back, _, own = loops.norm_back(x, norm, layer.eps[0], layer.input_gradient(gradient, weights), beside)
        return back, own, *matrices, *biases, first, second, None, None


class _After(torch.autograd.Function):
    """Second part of a layer: from the output of attention, [T, A], to the residual stream after the layer."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        attended: Tensor,
        output: Tensor,
        norm: Tensor,
        asked: Tensor,
        up: Tensor,
        down: Tensor,
        layer: _Layer,
    ) -> Tensor:
        kinds, loops = _stacked(attended.dtype, (output,), (asked, up), (down,)), _loops(x)
        middle, hidden = loops.norm_of_sum(x, layer.times(attended, kinds[0]), norm, layer.eps[2])
        both = layer.times(hidden, kinds[1])
        result: Tensor = loops.add(middle, layer.times(loops.gate(both), kinds[2]))
        halves = () if attended.dtype is torch.float32 else kinds
        ctx.save_for_backward(attended, output, norm, asked, up, down, middle, hidden, both, *halves)
        ctx.layer = layer
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        attended, output, norm, asked, up, down, middle, hidden, both, *halves = ctx.saved_tensors
        layer, loops = cast(_Layer, ctx.layer), _loops(middle)
        kinds = halves or _stacked(torch.float32, (output,), (asked, up), (down,))
        gradient = gradient.contiguous()
        narrow = gradient.to(attended.dtype)
        gated, backs = loops.gate_back(both, layer.input_gradient(narrow, kinds[2]))
        of_hidden = layer.input_gradient(backs, kinds[1])
        back, narrow_back, own = loops.norm_back(middle, norm, layer.eps[2], of_hidden, gradient, copied=True)
        pairs = ((narrow_back, attended), (backs, hidden), (narrow, gated))
        needed = (ctx.needs_input_grad[2], any(ctx.needs_input_grad[4:6]), ctx.needs_input_grad[6])
        of_output, of_both, of_down = (
            layer.weight_gradient(*pair) if wanted else None for pair, wanted in zip(pairs, needed, strict=True)
        )
        of_asked, of_up = (None, None) if of_both is None else of_both.split(len(asked))
        return back, layer.input_gradient(narrow_back, kinds[0]), of_output, own, of_asked, of_up, of_down, None


def _forward(
    module: Any, layer: _Layer, own: Callable[..., Tensor], hidden_states: Tensor, *others: Any, **given: Any
) -> Tensor:
    """The forward of a fused layer; its `own` for other callers than the packed path, for other dtypes, and for a layer
    that got adapters or hooks since."""
    packing, angles = given.get("packing"), given.get("position_embeddings")
    if packing is None or angles is None or given.get("part") is not None:
        return own(hidden_states, *others, **given)
    if not _suits(hidden_states, angles[0]) or _changed(layer):
        return own(hidden_states, *others, **given)
    attention, mlp, x = module.self_attn, module.mlp, hidden_states.flatten(0, 1).contiguous()
    query, key, value, stream = _Before.apply(  # type: ignore[no-untyped-call]
        x,
        module.input_layernorm.weight,
        *(getattr(attention, f"{name}_proj").weight for name in "qkv"),
        *(getattr(attention, f"{name}_proj").bias for name in "qkv"),
        *(getattr(getattr(attention, f"{name}_norm", None), "weight", None) for name in "qk"),
        tuple(angle.flatten(0, 1).contiguous() for angle in angles),
        layer,
    )
    attended = layer.attend(query, key, value, packing, attention.scaling)
    result = _After.apply(  # type: ignore[no-untyped-call]
        stream,
        attended.flatten(1),
        attention.o_proj.weight,
        module.post_attention_layernorm.weight,
        *(getattr(mlp, f"{name}_proj").weight for name in ("gate", "up", "down")),
        layer,
    )
    return cast(Tensor, result).view_as(hidden_states)


def _suits(hidden_states: Tensor, angle: Tensor) -> bool:
    kinds, device = {hidden_states.dtype, angle.dtype}, hidden_states.device.type
    return kinds == {torch.float32} and device in ("cpu", "cuda") and _computed(device) in _DTYPES


def _changed(layer: _Layer) -> bool:
    """Whether a part of a layer was replaced, as by an adapter, or has a hook. The fused forward calls no part."""
    return any(
        owner._modules.get(name) is not part
        or part._forward_hooks
        or part._forward_pre_hooks
        or part._backward_hooks
        or part._backward_pre_hooks
        for owner, name, part in layer.parts
    )


_DTYPES = (torch.float32, torch.bfloat16)


def fusible(model: PreTrainedModel) -> bool:
    """Whether layers of the model may be fused: not without compiled loops or Triton kernels for its device, nor with
    parameters on other devices, a dtype other than float32, a soft cap, or no rotary embedding."""
    width = model.config.get_text_config().hidden_size
    ours = computes(model.device, model.dtype) or gpu_loops.computes(model.device, width)
    elsewhere = any(one.untyped_storage().device != model.device for one in model.parameters())
    if not ours or model.dtype is not torch.float32 or elsewhere:
        return False
    capped = getattr(model.config.get_text_config(), "attn_logit_softcapping", None) is not None
    return not capped and hasattr(model.base_model, "rotary_emb")


def fuse(model: PreTrainedModel, layers: Iterable[nn.Module], attend: Attend, probe: Any) -> int:
    """Give the fused forward to those of `layers` (decoder layers of the model) that it fits, in place; returns their
    number. Layers of another kind, that compute otherwise, or that have it already are left alone. The model must be
    `fusible` and have no attention windows.

    `attend`: attention between the two parts. `probe`: packing of the sequences on which a layer is compared."""
    fused, weights = 0, dict[str, Tensor]()
    for module in layers:
        if "forward" in vars(module) or (layer := _layer_of(module, attend)) is None:
            continue
        shapes = {name: one.shape for name, one in module.named_parameters()}
        if shapes != {name: one.shape for name, one in weights.items()}:
            weights = {name: one.to(model.device) for name, one in _made_up(shapes).items()}
        if _agrees(model, module, layer, weights, probe):
            module.forward = partial(_forward, module, layer, module.forward)
            fused += 1
    return fused


def _made_up(shapes: Mapping[str, torch.Size]) -> dict[str, Tensor]:
    """Random weights (the same at each call), by name, with which each operation of a layer shows in the result. The
    weights of a new model may be zero, or so small that a layer without rotary embedding gives the same."""
    chance = torch.Generator().manual_seed(1)
    made = {name: torch.randn(shape, generator=chance) for name, shape in shapes.items()}
    return {name: one if one.dim() == 1 else one.mul_(one.shape[1] ** -0.5) for name, one in made.items()}


def _layer_of(module: Any, attend: Attend) -> _Layer | None:
    """Sizes and settings of a layer with the parts and names of Llama's, all float32, and perhaps norms of queries and
    keys; None for another layer."""
    try:
        attention, mlp = module.self_attn, module.mlp
        linear = [getattr(attention, f"{name}_proj") for name in "qkvo"]
        linear += [getattr(mlp, f"{name}_proj") for name in ("gate", "up", "down")]
        norms = [module.input_layernorm, module.post_attention_layernorm]
        inside = [one for name in "qk" if (one := getattr(attention, f"{name}_norm", None)) is not None]
        eps = [float(one.variance_epsilon) for one in (*norms, *inside)]
        width = int(attention.head_dim)
        float(attention.scaling)
    except (AttributeError, TypeError):
        return None
    plain = all(type(one) in (nn.Linear, OneDnnLinear) for one in linear)
    known = {id(one.weight) for one in (*linear, *norms, *inside)}
    if all(one.bias is not None for one in linear[:3]):
        known |= {id(one.bias) for one in linear[:3]}
    if not plain or known != {id(one) for one in module.parameters()} or len(inside) == 1 or width % 2:
        return None
    if any(one.weight.shape != (width,) for one in inside) or any(
        one.dtype is not torch.float32 for one in module.parameters()
    ):
        return None
    kernel = linear[0].kernel.choice if isinstance(linear[0], OneDnnLinear) else None
    fewest = kernel.fewest if kernel is not None and kernel.kernel == "onednn" else None
    counts = (linear[0].out_features // width, linear[1].out_features // width)
    parts = tuple((owner, name, part) for owner in module.modules() for name, part in owner.named_children())
    return _Layer(*counts, width, (eps[0], eps[-1], eps[1]), fewest, parts, attend)


@torch.no_grad()
def _agrees(model: Any, module: nn.Module, layer: _Layer, weights: dict[str, Tensor], packing: Any) -> bool:
    """Whether the fused forward gives what the layer's own gives with these weights and a made-up input, up to
    rounding. False also if the model's rotary angles have another width than a head."""
    size = model.config.get_text_config().hidden_size
    x = torch.linspace(-2, 2, packing.tokens * size, device=model.device).mul(37).sin().view(1, packing.tokens, size)
    angles = model.base_model.rotary_emb(x, packing.position_ids)
    if angles[0].shape[-1] != layer.width:
        return False
    given = {"position_embeddings": angles, "position_ids": packing.position_ids, "packing": packing}
    expected = functional_call(module, weights, x, {"attention_mask": None, "use_cache": False, **given})
    module.forward = partial(_forward, module, layer, module.forward)
    try:
        found = functional_call(module, weights, x, given)
    finally:
        del module.forward
    allowed = 64 * torch.finfo(x.dtype).eps * max(1.0, float(expected.abs().max()))
    return float((found - expected).abs().max()) <= allowed
