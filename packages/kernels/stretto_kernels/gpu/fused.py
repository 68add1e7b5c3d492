"""Small operations of a layer as single kernels on a GPU (Triton): norm, rotary embedding of heads, gate. They are the
counterpart of the CPU's loops (`stretto_kernels.fused`) in a traced forward.

    norm      sum = x + y;  out = weight · sum / √(mean sum² + eps)      one program per token
    rotate    out = head · cos + turned(head) · sin, after a norm        one program per token and head
    enter     the same for query and key; key and value go straight to their rows' slots
    gate      out = silu(gate) · up

Numbers are rounded at the same points as by torch's calls, so in bfloat16 the results equal the module's except for the
order of sums. Inputs may be columns of a wider tensor, such as the query within a product that gives query, key and
value. TRITON_INTERPRET=1 runs the kernels on the CPU.

Axes: T token, N width of the model, H query head, K key/value head, D width of a head, R row, W written token.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from stretto_kernels.gpu.attention import DTYPES
from stretto_kernels.gpu.launching import kernel, launches_on, tl, triton
from stretto_kernels.rule import Rule

_BLOCK = 1024  # numbers that a program of `_gate` computes
_PER_WARP = 256  # numbers of a norm
_MOST_WARPS = 16


#: Query or key heads before their rotary embedding: the heads [1, T, H, D], the weight [D] of their RMS norm, if they
#: have one, and its eps.
Heads = tuple[Tensor, Tensor | None, float]


def fuses_on(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the kernels can be used for a model of this dtype on this device: bfloat16, float16 or float32 on a GPU
    of Ampere or newer. False in Triton's interpreter."""
    return dtype in DTYPES and launches_on(device)


@kernel
def _norm(
    x_TN: tl.tensor,
    y_TN: tl.tensor,
    weight_N: tl.tensor,
    total_TN: tl.tensor,
    out_TN: tl.tensor,
    x_token: tl.tensor,
    y_token: tl.tensor,
    eps: tl.tensor,
    ADDS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Program t writes the RMS norm of token t to `out_TN`; with `ADDS` that of x + y, which goes to `total_TN`."""
    token, inside_N = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    real_N = inside_N < WIDTH
    kind = x_TN.dtype.element_ty
    x_N = tl.load(x_TN + token * x_token + inside_N, mask=real_N, other=0.0).to(tl.float32)
    if ADDS:
        y_N = tl.load(y_TN + token * y_token + inside_N, mask=real_N, other=0.0).to(tl.float32)
        total_N = (x_N + y_N).to(kind)
        tl.store(total_TN + token * WIDTH + inside_N, total_N, mask=real_N)
        x_N = total_N.to(tl.float32)
    weight = tl.load(weight_N + inside_N, mask=real_N, other=0.0).to(tl.float32)
    share = tl.rsqrt(tl.sum(x_N * x_N, 0) / WIDTH + eps)
    out_N = weight * (x_N * share).to(kind).to(tl.float32)
    tl.store(out_TN + token * WIDTH + inside_N, out_N.to(kind), mask=real_N)


@kernel
def _turned(
    head_D: tl.tensor,
    weight_D: tl.tensor,
    eps: tl.tensor,
    cos_D: tl.tensor,
    sin_D: tl.tensor,
    NORM: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
) -> Any:
    """The two halves of a head after its norm, if it has one, and its rotary embedding. The embedding rotates by
    halves: sin multiplies (-second half, first half)."""
    inside = tl.arange(0, BLOCK)
    real = inside < HALF
    kind = head_D.dtype.element_ty
    low = tl.load(head_D + inside, mask=real, other=0.0).to(tl.float32)
    high = tl.load(head_D + HALF + inside, mask=real, other=0.0).to(tl.float32)
    if NORM:
        share = tl.rsqrt((tl.sum(low * low, 0) + tl.sum(high * high, 0)) / (2 * HALF) + eps)
        low_weight = tl.load(weight_D + inside, mask=real, other=0.0).to(tl.float32)
        high_weight = tl.load(weight_D + HALF + inside, mask=real, other=0.0).to(tl.float32)
        low = (low_weight * (low * share).to(kind).to(tl.float32)).to(kind).to(tl.float32)
        high = (high_weight * (high * share).to(kind).to(tl.float32)).to(kind).to(tl.float32)
    low_cos = tl.load(cos_D + inside, mask=real, other=0.0).to(tl.float32)
    high_cos = tl.load(cos_D + HALF + inside, mask=real, other=0.0).to(tl.float32)
    low_sin = tl.load(sin_D + inside, mask=real, other=0.0).to(tl.float32)
    high_sin = tl.load(sin_D + HALF + inside, mask=real, other=0.0).to(tl.float32)
    left = (low * low_cos).to(kind).to(tl.float32) - (high * low_sin).to(kind).to(tl.float32)
    right = (high * high_cos).to(kind).to(tl.float32) + (low * high_sin).to(kind).to(tl.float32)
    return left.to(kind), right.to(kind)


@kernel
def _store(out_D: tl.tensor, low: tl.tensor, high: tl.tensor, HALF: tl.constexpr, BLOCK: tl.constexpr) -> None:
    """Store the two halves of a head."""
    inside = tl.arange(0, BLOCK)
    tl.store(out_D + inside, low, mask=inside < HALF)
    tl.store(out_D + HALF + inside, high, mask=inside < HALF)


@kernel
def _rotate(
    x_THD: tl.tensor,
    weight_D: tl.tensor,
    cos_TD: tl.tensor,
    sin_TD: tl.tensor,
    out_THD: tl.tensor,
    x_token: tl.tensor,
    x_head: tl.tensor,
    angle: tl.tensor,
    eps: tl.tensor,
    NORM: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Program (t, h): norm and rotary embedding of head h of token t."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    from_D, cos_D, sin_D = x_THD + token * x_token + head * x_head, cos_TD + token * angle, sin_TD + token * angle
    low, high = _turned(from_D, weight_D, eps, cos_D, sin_D, NORM, HALF, BLOCK)
    _store(out_THD + (token * tl.num_programs(1) + head) * 2 * HALF, low, high, HALF, BLOCK)


@kernel
def _enter(
    query_THD: tl.tensor,
    key_TKD: tl.tensor,
    value_TKD: tl.tensor,
    query_weight_D: tl.tensor,
    key_weight_D: tl.tensor,
    cos_TD: tl.tensor,
    sin_TD: tl.tensor,
    slots_R4: tl.tensor,
    writes_W3: tl.tensor,
    out_THD: tl.tensor,
    query_token: tl.tensor,
    query_head: tl.tensor,
    key_token: tl.tensor,
    key_head: tl.tensor,
    value_token: tl.tensor,
    value_head: tl.tensor,
    angle: tl.tensor,
    query_eps: tl.tensor,
    key_eps: tl.tensor,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    QUERY_NORM: tl.constexpr,
    KEY_NORM: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Program (w, h) norms and rotates query head h of written token w, into `out_THD`; for h from `HEADS` on, a key
    head, or copies a value head. Keys and values go to the token's place in its row's slot."""
    token = tl.load(writes_W3 + 3 * tl.program_id(0))
    slot = slots_R4 + 4 * tl.load(writes_W3 + 3 * tl.program_id(0) + 1)
    inside_slot = tl.load(writes_W3 + 3 * tl.program_id(0) + 2) * 2 * HALF
    pointer = tl.pointer_type(key_TKD.dtype.element_ty)
    head = tl.program_id(1)
    cos_D, sin_D = cos_TD + token * angle, sin_TD + token * angle
    if head < HEADS:
        from_D = query_THD + token * query_token + head * query_head
        low, high = _turned(from_D, query_weight_D, query_eps, cos_D, sin_D, QUERY_NORM, HALF, BLOCK)
        _store(out_THD + (token * HEADS + head) * 2 * HALF, low, high, HALF, BLOCK)
    elif head < HEADS + KV_HEADS:
        from_D = key_TKD + token * key_token + (head - HEADS) * key_head
        low, high = _turned(from_D, key_weight_D, key_eps, cos_D, sin_D, KEY_NORM, HALF, BLOCK)
        to_D = tl.load(slot).to(pointer) + (head - HEADS) * tl.load(slot + 2) + inside_slot
        _store(to_D, low, high, HALF, BLOCK)
    else:
        kv_head, inside = head - HEADS - KV_HEADS, tl.arange(0, BLOCK)
        from_D = value_TKD + token * value_token + kv_head * value_head
        low = tl.load(from_D + inside, mask=inside < HALF)
        high = tl.load(from_D + HALF + inside, mask=inside < HALF)
        to_D = tl.load(slot + 1).to(pointer) + kv_head * tl.load(slot + 2) + inside_slot
        _store(to_D, low, high, HALF, BLOCK)


@kernel
def _gate(
    asked_TN: tl.tensor,
    up_TN: tl.tensor,
    out_TN: tl.tensor,
    asked_token: tl.tensor,
    up_token: tl.tensor,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Program (t, b) writes silu(asked) · up for block b of token t to `out_TN`."""
    token, inside_N = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    real_N = inside_N < WIDTH
    kind = asked_TN.dtype.element_ty
    asked_N = tl.load(asked_TN + token * asked_token + inside_N, mask=real_N, other=0.0).to(tl.float32)
    up_N = tl.load(up_TN + token * up_token + inside_N, mask=real_N, other=0.0).to(tl.float32)
    active_N = (asked_N / (1.0 + tl.exp(-asked_N))).to(kind).to(tl.float32)
    tl.store(out_TN + token * WIDTH + inside_N, (active_N * up_N).to(kind), mask=real_N)


def _tokens(x: Tensor) -> Tensor:
    """`x` as [T, N], where a token's numbers lie beside each other."""
    x = x if x.stride(-1) == 1 else x.contiguous()
    return x.reshape(-1, x.shape[-1])


def _normed(x: Tensor, y: Tensor | None, weight_N: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(x + y, its RMS norm); without `y`, the norm of x in both places."""
    x_TN, y_TN = _tokens(x), _tokens(x if y is None else y)
    out, width = x.new_empty(x.shape), len(weight_N)
    total = out if y is None else x.new_empty(x.shape)
    block = triton.next_power_of_2(width)
    warps = min(max(block // _PER_WARP, 1), _MOST_WARPS)
    tensors, strides = (x_TN, y_TN, weight_N, total, out), (x_TN.stride(0), y_TN.stride(0))
    sizes = {"ADDS": y is not None, "WIDTH": width, "BLOCK": block, "num_warps": warps}
    _norm[(len(x_TN),)](*tensors, *strides, eps, **sizes)
    return total, out


def norm(x: Tensor, weight_N: Tensor, eps: float) -> Tensor:
    """RMS norm of `x` over the last axis, times the weight; `eps` is added to the mean of squares."""
    return _normed(x, None, weight_N, eps)[1]


def norm_of_sum(x: Tensor, y: Tensor, weight_N: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x + y, and its RMS norm over the last axis (`eps` is added to the mean of squares), times the weight."""
    return _normed(x, y, weight_N, eps)


def _heads(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def rotate(x: Tensor, weight_D: Tensor | None, eps: float, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply the rotary embedding to heads `x` [1, T, H, D]; `cos` and `sin`: [1, T, D]. Returns [1, H, T, D].
    `weight_D`: weight of an RMS norm of each head before it; None: no norm."""
    x, cos, sin = _heads(x), cos.contiguous(), sin.contiguous()
    _, tokens, heads, width = x.shape
    out = x.new_empty(x.shape)
    tensors, strides = (x, x if weight_D is None else weight_D, cos, sin, out), x.stride()[1:3]
    _rotate[(tokens, heads)](*tensors, *strides, width, eps, NORM=weight_D is not None, **_halves(width))
    return out.transpose(1, 2)


def _halves(width: int) -> dict[str, int]:
    """Launch settings of a kernel whose programs hold the halves of a head of this width."""
    return {"HALF": width // 2, "BLOCK": triton.next_power_of_2(width // 2), "num_warps": 1}


def enter_rotated(
    query: Heads, key: Heads, value: Tensor, cos: Tensor, sin: Tensor, slots_R4: Tensor, writes_W3: Tensor
) -> Tensor:
    """Apply the rotary embedding, after the norms, to the query and key of each token; write keys and values to their
    rows' slots. Returns the query, [T, H, D].

    Args:
        query, key: heads of the slots' dtype, as `value`.
        value: [1, K, T, D].
        cos, sin: [1, T, D].
        slots_R4: int64, for each row: address of its keys, address of its values, and the stride between heads, in
            elements; the fourth number is not read.
        writes_W3: int64 (token, row, position in the slot); has every token once.
    """
    (asked, query_weight, query_eps), (keys, key_weight, key_eps) = query, key
    asked, keys, values = (_heads(x)[0] for x in (asked, keys, value.transpose(1, 2)))
    cos, sin = cos.contiguous(), sin.contiguous()
    (_, heads, width), kv_heads, out_THD = asked.shape, keys.shape[1], asked.new_empty(asked.shape)
    weights = [asked if weight is None else weight for weight in (query_weight, key_weight)]
    norms = {"QUERY_NORM": query_weight is not None, "KEY_NORM": key_weight is not None}
    tensors = (asked, keys, values, *weights, cos, sin, slots_R4, writes_W3, out_THD)
    strides = (*asked.stride()[:2], *keys.stride()[:2], *values.stride()[:2], width)
    sizes = {"HEADS": heads, "KV_HEADS": kv_heads, **norms, **_halves(width)}
    _enter[(len(writes_W3), heads + 2 * kv_heads)](*tensors, *strides, query_eps, key_eps, **sizes)
    return out_THD


def gate(asked: Tensor, up: Tensor) -> Tensor:
    """silu(asked) · up."""
    asked_TN, up_TN = _tokens(asked), _tokens(up)
    tokens, width = asked_TN.shape
    out, block = asked.new_empty(asked.shape), min(_BLOCK, triton.next_power_of_2(width))
    _gate[(tokens, triton.cdiv(width, block))](
        asked_TN, up_TN, out, asked_TN.stride(0), up_TN.stride(0), WIDTH=width, BLOCK=block
    )
    return out


def attend_rotated(
    plan: Any,
    layer: int,
    query: Heads,
    key: Heads,
    value: Tensor,
    cos: Tensor,
    sin: Tensor,
    rule: Rule,
) -> Tensor:
    """Attention of layer number `layer` in one step, with the rotary embedding before it, [1, T, H, D]. `plan` has a
    method `attend` (`steps.trace.Attends`). If it has an attribute `rotated` that is not None, that function does both
    at once, in place of `attend`."""
    at_once: Callable[..., Tensor] | None = getattr(plan, "rotated", None)
    if at_once is not None:
        return at_once(layer, query, key, value, cos, sin, rule)
    attends: Callable[..., Tensor] = plan.attend
    return attends(layer, rotate(*query, cos, sin), rotate(*key, cos, sin), value, rule)
