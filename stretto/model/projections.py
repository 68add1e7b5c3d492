"""Queries, keys and values of a layer by one product, and what follows on queries and keys by one call for both.

    weight_q, weight_k, weight_v     views of one tensor [(H + 2K)·D, width]: one product instead of three
    heads of queries and keys        side by side in what it gives: normed and turned together

The parameters stay the module's own, with their names, shapes and values; only where their numbers lie changes.

Axes: T packed token, H query heads, K key/value heads, D width of a head.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from stretto.model.patterns import Found, fitting
from stretto.model.peepholes import fewest_tokens, multiply, rotate


def _projection(name: str) -> Any:
    return ("view", ("multiply", "x", f"{name}_weight", f"{name}_bias", f"{name}_fewest"), f"{name}_shape")


def _normed(name: str) -> Any:
    return ("rms_norm", _projection(name), "norm_shape", f"{name}_norm", "epsilon")


def _attention(heads: Any) -> Any:
    queries, keys = (("rotate", ("transpose", heads(name), 1, 2), "cos", "sin") for name in "qk")
    return ("attend", "attention", "layer", queries, keys, ("transpose", _projection("v"), 1, 2))


def join_projections(graph: Graph, constants: dict[Node, Any]) -> None:
    """Join the projections of layers that rotate their heads, with or without norms of them before."""
    for heads in (_projection, _normed):
        for node, found in fitting(graph, _attention(heads)):
            _join(node, found, constants)
    graph.eliminate_dead_code()
    graph.lint()


def _join(node: Node, found: Found, constants: dict[Node, Any]) -> None:
    weights, biases = ([found[f"{name}_{kind}"] for name in "qkv"] for kind in ("weight", "bias"))
    biased = any(bias is not None for bias in biases)
    if not {*weights, *(biases if biased else ())} <= constants.keys():
        return  # computed from other tensors, or a bias that not all three have
    heads = [weight.meta["shape"][0] // found["cos"].meta["shape"][-1] for weight in weights[:2]]
    norm = (found["q_norm"], found["k_norm"], found["epsilon"]) if "q_norm" in found else None
    with node.graph.inserting_before(node):
        weight = _joined(node.graph, weights, constants)
        bias = _joined(node.graph, biases, constants) if biased else None
        turn = (found["cos"], found["sin"], *heads, fewest_tokens(constants[weight].shape))
        joined = node.graph.call_function(project, (found["x"], weight, bias, norm, *turn))
        parts = [node.graph.call_function(operator.getitem, (joined, place)) for place in range(3)]
        node.args = (*node.args[:2], *parts)


def _joined(graph: Graph, parts: Sequence[Node], constants: dict[Node, Any]) -> Node:
    joined = graph.placeholder(f"{parts[0].name}_joined")
    constants[joined] = side_by_side([constants[part] for part in parts])
    return joined


def side_by_side(parameters: Sequence[Tensor]) -> Tensor:
    """One tensor [N1 + N2 + ..., *rest] of which the parameters [N, *rest] are, or now become, the parts."""
    first = parameters[0]
    ends = [parameter.data_ptr() + parameter.nbytes for parameter in parameters]
    starts = [parameter.data_ptr() for parameter in parameters]
    storages = {parameter.untyped_storage().data_ptr() for parameter in parameters}
    if len(storages) > 1 or starts[1:] != ends[:-1] or not all(parameter.is_contiguous() for parameter in parameters):
        joined = torch.cat([parameter.data for parameter in parameters])
        for parameter, part in zip(parameters, joined.split([len(x) for x in parameters]), strict=True):
            parameter.data = part
    return first.data.as_strided((sum(map(len, parameters)), *first.shape[1:]), first.stride())


def project(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    norm: tuple[Tensor, Tensor, float] | None,
    cos: Tensor,
    signed_sin: Tensor,
    queries: int,
    keys: int,
    fewest: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries [1, H, T, D], keys and values [1, K, T, D] of tokens [1, T, width]; cos and sin are [1, 1, T, D].

    Their memory lies as [1, T, heads, D], in which a token's heads are neighbours.
    """
    heads = multiply(x, weight, bias, fewest).view(1, x.shape[1], queries + 2 * keys, -1)
    turned = heads.narrow(2, 0, queries + keys)
    if norm is not None:
        query_norm, key_norm, epsilon = norm
        weights = torch.cat((query_norm.expand(queries, -1), key_norm.expand(keys, -1)))
        turned = torch.rms_norm(turned, query_norm.shape, None, epsilon).mul_(weights)
    turned = rotate(turned, cos.transpose(1, 2), signed_sin.transpose(1, 2)).transpose(1, 2)
    values = heads.narrow(2, queries + keys, keys).transpose(1, 2)
    return turned.narrow(1, 0, queries), turned.narrow(1, queries, keys), values
