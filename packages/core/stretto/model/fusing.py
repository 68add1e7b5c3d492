"""Replace sequences of small calls in a traced forward by fused loops (`model.kernels.fused`).

    to pow mean add rsqrt mul to mul      ─► norm            Llama, Qwen, Mistral: weight · (x / √mean x²)
    add, norm of the sum                  ─► norm_of_sum
    norm? transpose mul neg cat mul add   ─► rotate          rotary embedding by halves of a whole head
    silu mul                              ─► gate

Calls are recognised by their functions, arguments and constants; other calls are not changed. The trace is compared
with its module afterwards, so that a wrong match is never used (`model.trace`).
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.nn import functional

from stretto.model.kernels.fused import gate, norm, norm_of_sum, rotate


class _Norm(NamedTuple):
    x: Node
    weight: Node
    eps: float


def fuse(graph: Graph, constants: Mapping[Node, Any], dtype: torch.dtype) -> None:
    """Replace recognised calls of `graph` in place. `constants`: parameters and other constants by their placeholder
    node; `dtype`: the model's dtype."""
    first = next(node for node in graph.nodes if node.op != "placeholder")
    for node in graph.find_nodes(op="placeholder"):  # before all calls: a loop stands where its first part was
        first.prepend(node)
    fusing = _Fusing(graph, constants, dtype)
    for replace in (fusing.rotate, fusing.norm, fusing.gate):
        for node in list(graph.nodes):
            replace(node)
        graph.eliminate_dead_code()


class _Fusing:
    def __init__(self, graph: Graph, constants: Mapping[Node, Any], dtype: torch.dtype) -> None:
        self._graph, self._constants, self._dtype = graph, constants, dtype

    def norm(self, node: Node) -> None:
        """If `node` is the result of an RMS norm, replace the norm, together with an addition before it."""
        if (found := self._norm(node)) is None:
            return
        with self._graph.inserting_before(node):
            parts = _call(found.x, "add")
            if parts is None or not self._alike(parts, found.x):
                node.replace_all_uses_with(self._graph.call_function(norm, (found.x, found.weight, found.eps)))
                return
        with self._graph.inserting_after(found.x):
            both = self._graph.call_function(norm_of_sum, (*parts, found.weight, found.eps))
        with self._graph.inserting_after(both):
            total, out = (self._graph.call_function(operator.getitem, (both, place)) for place in (0, 1))
        for old, new in ((found.x, total), (node, out)):
            new.meta.update(old.meta)
            old.replace_all_uses_with(new)

    def rotate(self, node: Node) -> None:
        """If `node` is the result of a rotary embedding, replace the rotation, together with a norm before it."""
        if (parts := _call(node, "add")) is None or not all(isinstance(part, Node) for part in parts):
            return
        plain, turned = (_call(part, "mul") for part in parts)
        if plain is None or turned is None or _turned(turned[0]) is not plain[0]:
            return
        angles = [_call(part, "unsqueeze") for part in (plain[1], turned[1])]
        heads = _call(plain[0], "transpose")
        if heads is None or heads[1:] != (1, 2) or any(angle is None or angle[1:] != (1,) for angle in angles):
            return
        cos, sin = (angle[0] for angle in angles if angle is not None)
        found = self._norm(heads[0]) or _Norm(heads[0], heads[0], 0.0)
        shape, width = found.x.meta.get("shape", ()), cos.meta.get("shape", ())[-1:]
        kinds = {x.meta.get("dtype") for x in (found.x, cos, sin)}
        if len(shape) != 4 or shape[-1:] != width or kinds != {self._dtype}:
            return
        weight = None if found.weight is found.x else found.weight
        with self._graph.inserting_before(node):
            new = self._graph.call_function(rotate, (found.x, weight, found.eps, cos, sin))
        node.replace_all_uses_with(new)

    def gate(self, node: Node) -> None:
        """If `node` is the result of a gated activation, replace the activation."""
        if (parts := _call(node, "mul")) is None or len(parts) != 2 or not isinstance(parts[0], Node):
            return
        asked = parts[0]
        if asked.target is functional.silu and self._alike((asked.args[0], parts[1]), node):
            with self._graph.inserting_before(node):
                node.replace_all_uses_with(self._graph.call_function(gate, (asked.args[0], parts[1])))

    def _norm(self, node: Any) -> _Norm | None:
        """Input, weight and eps of the RMS norm whose result is `node`; None if it is no such result."""
        parts = _call(node, "mul")
        if parts is None or len(parts) != 2 or not self._is_weight(parts[0]):
            return None
        scaled = _call(self._narrow(parts[1]), "mul")
        if scaled is None or (root := _call(scaled[1], "rsqrt")) is None or (added := _call(root[0], "add")) is None:
            return None
        mean = _call(added[0], "mean")
        squares = None if mean is None or mean[1:] != (-1,) else _call(mean[0], "pow")
        if squares is None or squares[1:] != (2,) or squares[0] is not scaled[0] or not isinstance(added[1], float):
            return None
        x = self._wide(scaled[0])
        return None if x is None else _Norm(x, parts[0], added[1])

    def _is_weight(self, node: Any) -> bool:
        value = self._constants.get(node)
        return isinstance(value, Tensor) and value.dim() == 1 and value.dtype is self._dtype and value.is_contiguous()

    def _narrow(self, node: Any) -> Any:
        """The argument of a conversion to the model's dtype; `node` itself if it is no such conversion."""
        parts = _call(node, "to")
        return node if parts is None or parts[1:] != (self._dtype,) else parts[0]

    def _wide(self, node: Any) -> Node | None:
        """The argument of a conversion to float32, or `node` itself if it is no such conversion; None if this does not
        have the model's dtype."""
        parts = _call(node, "to")
        x = node if parts is None or parts[1:] != (torch.float32,) else parts[0]
        return x if isinstance(x, Node) and x.meta.get("dtype") is self._dtype else None

    def _alike(self, parts: Any, result: Node) -> bool:
        """Whether both parts are tensors with the result's shape and the model's dtype."""
        wanted = (result.meta.get("shape"), self._dtype)
        kinds = [(x.meta.get("shape"), x.meta.get("dtype")) for x in parts if isinstance(x, Node)]
        return kinds == [wanted, wanted]


def _call(node: Any, name: str) -> tuple[Any, ...] | None:
    """The arguments of `node` if it is a call of the function or method `name`, without unknown keywords; else None."""
    if not isinstance(node, Node) or node.op not in ("call_function", "call_method"):
        return None
    called = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    extra = set(node.kwargs) - ({"keepdim"} if name == "mean" else {"dim"} if name == "cat" else set())
    return node.args if called == name and not extra else None


def _turned(node: Any) -> Any:
    """The heads x of a node cat(-second half of x, first half of x) on the last axis; None if `node` is no such
    node."""
    parts = _call(node, "cat")
    if parts is None or getattr(node, "kwargs", {}).get("dim") != -1 or len(parts[0]) != 2:
        return None
    late, early = _call(parts[0][0], "neg"), _call(parts[0][1], "getitem")
    late = None if late is None else _call(late[0], "getitem")
    if late is None or early is None or late[0] is not early[0]:
        return None
    shape = late[0].meta.get("shape", (0,))
    half = shape[-1] // 2
    cuts = (Ellipsis, slice(half, None, None)), (Ellipsis, slice(None, half, None))
    return late[0] if (late[1], early[1]) == cuts and shape[-1] == 2 * half else None
