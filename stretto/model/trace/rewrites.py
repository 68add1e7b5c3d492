"""Fewer and quicker calls that compute the same: what captured calls are rewritten by (`stretto.model.trace.trace`).

    x * rsqrt(mean(x²) + ε), times a weight      rms_norm                 equal to the last bit
    x·cos + cat(-x₂, x₁)·sin                     the sign goes to sin     equal to the last bit
    linear                                       the layer's kernel       equal to rounding

Which rewritings pay, and which were tried and do not, stands in docs/log.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from stretto.model.kernels.matmul import Kernel
from stretto.model.trace.match import call_instead, call_name, fitting, replace

_INVERSE_ROOT = ("rsqrt", ("add", ("mean", ("pow", "x", 2), -1, True), "epsilon"))
_NORM = ("mul", "x", _INVERSE_ROOT)
_WEIGHTED_NORM = ("mul", "weight", ("rms_norm", "x", "shape", None, "epsilon"))
_TURNED = ("cat", [("neg", ("getitem", "x", "high")), ("getitem", "x", "low")], -1)
_ROTATION = ("add", ("mul", "x", "cos"), ("mul", _TURNED, "sin"))
_LINEAR = ("linear", "x", "weight", "bias")


def simplify(graph: Graph, kernels: Mapping[Node, Kernel]) -> None:
    """Rewrite the calls of a graph in place; `node.meta` holds "shape" and "dtype" of what is computed, `kernels` who
    multiplies by a weight.

    Nothing in the graph may write in place or be random. Of a shape, the last size is the same in every run.
    """
    _compute_once(graph)
    _normalize(graph)
    _rotate(graph)
    _multiply(graph, kernels)
    graph.eliminate_dead_code()
    graph.lint()


def rotate(x: Tensor, cos: Tensor, signed_sin: Tensor) -> Tensor:
    """Rotary embedding of both halves of a head: x·cos + cat(x₂, x₁)·signed_sin."""
    first, second = x.chunk(2, -1)
    return (x * cos).add_(torch.cat((second, first), -1).mul_(signed_sin))


def sign(sin: Tensor) -> Tensor:
    """cat(-sin₁, sin₂)"""
    first, second = sin.chunk(2, -1)
    return torch.cat((-first, second), -1)


def _compute_once(graph: Graph) -> None:
    """Let equal calls be made once, and none that multiplies by one."""
    made: dict[Any, Node] = {}
    for node in list(graph.nodes):
        if node.op not in ("call_function", "call_method"):
            continue
        if call_name(node) == "mul" and node.args[1] == 1.0 and node.args[0].meta["dtype"] == node.meta["dtype"]:
            replace(node, node.args[0])
        else:
            # As text: slices cannot be hashed, and 1 is not 1.0 or True.
            first = made.setdefault(repr((node.op, node.target, node.args, sorted(node.kwargs.items()))), node)
            if first is not node:
                replace(node, first)


def _normalize(graph: Graph) -> None:
    for node, found in fitting(graph, _NORM):
        if node.meta["dtype"] == torch.float32:
            call_instead(node, torch.rms_norm, found["x"], [node.meta["shape"][-1]], None, found["epsilon"])
    for node, found in fitting(graph, _WEIGHTED_NORM):
        weight = found["weight"].meta
        if weight["shape"] == tuple(found["shape"]) and weight["dtype"] == torch.float32:
            call_instead(node, torch.rms_norm, found["x"], found["shape"], found["weight"], found["epsilon"])


def _rotate(graph: Graph) -> None:
    signed: dict[Node, Node] = {}
    for node, found in fitting(graph, _ROTATION):
        half, sin = node.meta["shape"][-1] // 2, found["sin"]
        if (found["low"], found["high"]) == ((..., slice(None, half, None)), (..., slice(half, None, None))):
            if sin not in signed:
                with graph.inserting_after(sin):
                    signed[sin] = graph.call_function(sign, (sin,))
            call_instead(node, rotate, found["x"], found["cos"], signed[sin])


def _multiply(graph: Graph, kernels: Mapping[Node, Kernel]) -> None:
    for node, found in fitting(graph, _LINEAR):
        if (kernel := kernels.get(found["weight"])) is not None and not kernel.of_torch:
            call_instead(node, kernel.multiply, found["x"], found["weight"], found["bias"])
