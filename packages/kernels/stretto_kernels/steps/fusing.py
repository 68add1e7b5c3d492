"""Sequences of calls of a traced forward (`steps.trace`) replaced by one call each.

    to pow mean add rsqrt mul to mul      ─► norm            Llama, Qwen, Mistral: weight · (x / √mean x²)
    add, norm of the sum                  ─► norm_of_sum
    norm? transpose mul neg cat mul add   ─► rotate          rotary embedding by halves of a whole head
    silu mul                              ─► gate
    rotate, rotate, attend                ─► attend_rotated  on a GPU: one kernel before the cache is read
    linear, linear, linear of one input   ─► linear          on a GPU: of weights that lie beside each other

Calls are recognised by their functions, arguments and constants; other calls are not changed. `Calls` are the functions
that replace them: loops on the CPU (`stretto_kernels.fused`), kernels on a GPU (`gpu.fused`).
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.fx import Graph, Node
from torch.nn import functional

from stretto_kernels import fused
from stretto_kernels.compiled import computes
from stretto_kernels.gpu import fused as fused_on_gpu

_ALIGNED = 16  # bytes that a product reads at once

#: The functions that replace sequences of calls, by name. With "attend_rotated" products of one input are joined too.
Calls = Mapping[str, Callable[..., Any]]

LOOPS: Calls = {name: getattr(fused, name) for name in ("norm", "norm_of_sum", "rotate", "gate")}
KERNELS: Calls = {name: getattr(fused_on_gpu, name) for name in (*LOOPS, "attend_rotated")}


def calls_for(device: torch.device, dtype: torch.dtype) -> Calls | None:
    """The functions that replace sequences of calls in models of this dtype on this device; None if there are none."""
    if fused_on_gpu.fuses_on(device, dtype):
        return KERNELS
    return LOOPS if computes(device, dtype) else None


class _Norm(NamedTuple):
    x: Node
    weight: Node
    eps: float


def fuse(graph: Graph, constants: Mapping[Node, Any], dtype: torch.dtype, calls: Calls) -> None:
    """Replace in place the calls of `graph` that make up a rotary embedding, an RMS norm, a gated activation or a
    rotated attention by one of `calls` each; others stay.

    `constants`: parameters and other constants by their placeholder node; `dtype`: the model's dtype."""
    first = next(node for node in graph.nodes if node.op != "placeholder")
    for node in graph.find_nodes(op="placeholder"):  # before all calls: a loop stands where its first part was
        first.prepend(node)
    fusing = _Fusing(graph, constants, dtype, calls)
    for replace in (fusing.rotate, fusing.norm, fusing.gate, fusing.attend):
        for node in list(graph.nodes):
            replace(node)
        graph.eliminate_dead_code()


class _Fusing:
    """Replaces calls of one graph (see `fuse`). Dead calls are left behind."""

    def __init__(self, graph: Graph, constants: Mapping[Node, Any], dtype: torch.dtype, calls: Calls) -> None:
        self._graph, self._constants, self._dtype, self._calls = graph, constants, dtype, calls

    def norm(self, node: Node) -> None:
        """Replace the RMS norm whose result is `node`, if it is one, by one call; an addition that gives its input
        becomes a part of the call."""
        if (found := self._norm(node)) is None:
            return
        with self._graph.inserting_before(node):
            parts = _call(found.x, "add")
            if parts is None or not self._alike(parts, found.x):
                alone = self._graph.call_function(self._calls["norm"], (found.x, found.weight, found.eps))
                node.replace_all_uses_with(alone)
                return
        with self._graph.inserting_after(found.x):
            both = self._graph.call_function(self._calls["norm_of_sum"], (*parts, found.weight, found.eps))
        with self._graph.inserting_after(both):
            total, out = (self._graph.call_function(operator.getitem, (both, place)) for place in (0, 1))
        for old, new in ((found.x, total), (node, out)):
            new.meta.update(old.meta)
            old.replace_all_uses_with(new)

    def rotate(self, node: Node) -> None:
        """Replace the rotary embedding whose result is `node`, if it is one, by one call; a norm of its heads becomes a
        part of the call."""
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
            new = self._graph.call_function(self._calls["rotate"], (found.x, weight, found.eps, cos, sin))
        node.replace_all_uses_with(new)

    def gate(self, node: Node) -> None:
        """Replace the gated activation whose result is `node`, if it is one."""
        if (parts := _call(node, "mul")) is None or len(parts) != 2 or not isinstance(parts[0], Node):
            return
        asked = parts[0]
        if asked.target is functional.silu and self._alike((asked.args[0], parts[1]), node):
            with self._graph.inserting_before(node):
                node.replace_all_uses_with(self._graph.call_function(self._calls["gate"], (asked.args[0], parts[1])))

    def attend(self, node: Node) -> None:
        """Replace the attention whose result is `node`, with the rotary embeddings of its query and key, if these have
        the same angles and no other use."""
        if "attend_rotated" not in self._calls or node.target != "attend":
            return
        plan, layer, query, key, value, rule = cast("tuple[Any, ...]", node.args)
        rotated = [x for x in (query, key) if isinstance(x, Node) and x.target is self._calls["rotate"]]
        if len(rotated) != 2 or any(len(x.users) != 1 for x in rotated) or query.args[3:] != key.args[3:]:
            return
        if value.meta.get("dtype") is not self._dtype:
            return
        parts = plan, layer, query.args[:3], key.args[:3], value, *query.args[3:], rule
        with self._graph.inserting_before(node):
            node.replace_all_uses_with(self._graph.call_function(self._calls["attend_rotated"], parts))

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
        """The argument of a conversion to float32, or `node` itself if it is no such conversion. None if that tensor
        does not have the model's dtype."""
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


class _Product(NamedTuple):
    """A call of `torch.nn.functional.linear` (`node`) whose weight and bias (None: none) are parameters."""

    node: Node
    weight: nn.Parameter
    bias: nn.Parameter | None

    @property
    def kind(self) -> tuple[Any, ...]:
        """Key of a product: products with equal keys become one."""
        return self.weight.dtype, self.weight.device, self.bias is None


def join_products(graph: Graph, constants: dict[Node, Any]) -> None:
    """Replace products of the same input by one product with the matrices beside each other, in place. The parameters
    become views of the joint matrix, so numbers that are copied into them arrive there, and nothing is held twice. A
    parameter that is used twice is left alone. `constants`: parameters and other constants by their placeholder node;
    joint matrices are added."""
    by_input: dict[tuple[Any, ...], list[_Product]] = defaultdict(list)
    for node in graph.find_nodes(op="call_function", target=functional.linear):
        if (product := _product(node, constants)) is not None:
            by_input[node.args[0], *product.kind].append(product)
    for products in by_input.values():
        if len(products) > 1:
            _join(graph, constants, products)
    graph.eliminate_dead_code()


def _product(node: Node, constants: Mapping[Node, Any]) -> _Product | None:
    """The product that a call computes; None if it cannot be joined with others: an argument is no parameter, or is
    used elsewhere too, is trained, or has rows of other than multiples of 16 bytes."""
    names = [name for name in node.args[1:] if isinstance(name, Node)]
    parts: list[Any] = [constants.get(name) for name in names]
    if node.kwargs or not parts or any(len(name.users) != 1 for name in names):
        return None
    if not all(type(part) is nn.Parameter and part.is_contiguous() and not part.requires_grad for part in parts):
        return None
    weight, bias = parts[0], parts[1] if len(parts) > 1 else None
    rows_fit = weight.shape[1] * weight.element_size() % _ALIGNED == 0
    return _Product(node, weight, bias) if rows_fit else None


def _join(graph: Graph, constants: dict[Node, Any], products: Sequence[_Product]) -> None:
    """Replace products of one input and one `kind` in the graph by the parts of one product, whose joined weights
    become new `constants`."""
    first = products[0].node
    joint = [_joined([product.weight for product in products])]
    if products[0].bias is not None:
        joint.append(_joined([product.bias for product in products if product.bias is not None]))
    names = list[Node]()
    with graph.inserting_before(next(node for node in graph.nodes if node.op != "placeholder")):
        for tensor in joint:
            names.append(graph.placeholder(f"joint_{len(constants)}"))
            constants[names[-1]] = tensor
    with graph.inserting_before(first):
        both = graph.call_function(functional.linear, (first.args[0], *names))
        end = 0
        for product in products:
            start, end = end, end + len(product.weight)
            columns: Any = (Ellipsis, slice(start, end))
            part = graph.call_function(operator.getitem, (both, columns))
            part.meta.update(product.node.meta)
            product.node.replace_all_uses_with(part)


def _joined(parameters: Sequence[nn.Parameter]) -> Tensor:
    """One tensor of which the parameters are the parts, in order; they become views of it, unless they are already."""
    first, end = parameters[0].data, parameters[0].data_ptr()
    apart = False
    for parameter in parameters:
        same = parameter.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        apart = apart or not same or parameter.data_ptr() != end
        end = parameter.data_ptr() + parameter.nbytes
    if not apart:
        return first.as_strided((sum(map(len, parameters)), *first.shape[1:]), first.stride())
    joint = torch.cat([parameter.data for parameter in parameters])
    for parameter, part in zip(parameters, joint.split([len(one) for one in parameters]), strict=True):
        parameter.data = part
    if joint.is_cuda:
        torch.cuda.empty_cache()  # the parts' own memory may have gaps of other sizes than the next joint tensor
    return joint
