"""A traced forward of a decode step on the CPU, the counterpart of a CUDA graph. Sequences of small calls in it are
replaced by fused loops (`stretto_kernels.fused`).

For small models Python calls between matmuls take longer than the computation. So the torch calls of a transformers
module are traced once, on a few tokens, and then run as one straight function::

    module    modeling_qwen3.py -> nn.Module.__call__ -> ... -> torch        traced with 5 and with 11 tokens
    trace     token_ids -> embedding -> norm -> linear -> attention -> ...   equal but for numbers of tokens

The two traces may differ only in the number of tokens and rows. The trace uses the module's own parameter tensors, so
weights copied into them take effect; linear layers use their chosen kernels.

A trace is compared with its module before use. A module runs untraced if it has control flow on tensor values (a
mixture of experts) or in-place writes, or if its trace differs by more than rounding.

Before the comparison, sequences of calls are replaced by one call each::

    to pow mean add rsqrt mul to mul      ─► norm            Llama, Qwen, Mistral: weight · (x / √mean x²)
    add, norm of the sum                  ─► norm_of_sum
    norm? transpose mul neg cat mul add   ─► rotate          rotary embedding by halves of a whole head
    silu mul                              ─► gate

If all calls are then known, and a product is in panels, the trace becomes one compiled call (`model.kernels.program`).

Calls are recognised by their functions, arguments and constants; other calls are not changed. The comparison comes
afterwards, so a wrong match is never used.

Axes: T packed token, R row, V vocabulary.
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple, Protocol, cast

import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_aggregate
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from transformers import AttentionInterface, PreTrainedModel

from stretto.model.kernels.matmul import Kernel, plain
from stretto.model.kernels.program import program
from stretto_kernels.compiled import computes
from stretto_kernels.fused import gate, norm, norm_of_sum, rotate
from stretto_kernels.rule import Rule

log = logging.getLogger(__name__)


class _Norm(NamedTuple):
    x: Node
    weight: Node
    eps: float


def fuse(graph: Graph, constants: Mapping[Node, Any], dtype: torch.dtype) -> None:
    """Replace in place the calls of `graph` that make up a rotary embedding, an RMS norm or a gated activation by one
    fused call each.

    `constants`: parameters and other constants by their placeholder node; `dtype`: the model's dtype."""
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
        """Replace the RMS norm whose result is `node`, if it is one, together with an addition before it."""
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
        """Replace the rotary embedding whose result is `node`, if it is one, together with a norm before it."""
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
        """Replace the gated activation whose result is `node`, if it is one."""
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


_STAND_IN = "stretto_stand_in"
_INPUTS = ("token_ids", "positions", "plan", "tokens", "last")
_TRACED = ((5, 3), (11, 7))  # (tokens, rows) of the two tracings: no size is a sum or a multiple of others
_COMPARED = ((1, 1), (6, 6), (37, 4))

#: Tensor methods with a non-tensor result that does not depend on the values.
_SHAPE_QUESTIONS = frozenset(
    {"__get__", "size", "dim", "ndimension", "numel", "is_floating_point", "_set_grad_enabled"}
)


class NotTracedError(Exception):
    """The forward of a module cannot be traced; the text is the reason."""


class Attends(Protocol):
    """Attention of one step (`model.decode.steps.StepPlan`), or of some rows of a step."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, rule: Rule, /) -> Tensor:
        """Attend in layer number `layer`: query [1, H, T, D], key and value [1, K, T, D]; returns [1, T, H, D]."""


#: Called with (token ids [1, T], positions [1, T], plan, T, -R); returns the logits [1, R, V] of the last R tokens.
Forward = Callable[[Tensor, Tensor, Attends, int, int], Tensor]


def trace(model: PreTrainedModel) -> Forward:
    """The fastest function equivalent to the model's forward: its trace on the CPU, or `module_forward` on other
    devices and for models that cannot be traced."""
    if model.device.type != "cpu":
        return module_forward(model)
    own = model.config._attn_implementation
    model.set_attn_implementation(_STAND_IN)
    try:
        with plain(model) as kernels:
            traced = _trace(model, kernels)
        _compare(model, traced)
    except Exception as error:  # any failure of tracing: fall back to the module itself
        log.info("%s runs as a module, without a trace: %s", type(model).__name__, error)
        return module_forward(model)
    finally:
        model.set_attn_implementation(own)
    return traced


def module_forward(model: PreTrainedModel) -> Forward:
    """The module's own forward, untraced. It passes the plan to the module's attention function."""

    def forward(token_ids: Tensor, positions: Tensor, plan: Attends, tokens: int, last: int) -> Tensor:
        inputs = {"input_ids": token_ids, "position_ids": positions, "stretto_step": plan}
        logits: Tensor = model(**inputs, use_cache=False, logits_to_keep=-last).logits
        return logits

    return forward


class _Recorder(TorchFunctionMode):
    """While active as a context manager, records every torch call that makes a tensor, with its arguments, in
    `graph`."""

    def __init__(self, token_ids: Tensor, positions: Tensor) -> None:
        super().__init__()
        self.graph = Graph()
        self.constants: dict[Node, Any] = {}
        self._nodes: dict[int, Node] = {}
        self._alive: list[Any] = []  # an id is valid as long as its object lives
        self.inputs = {name: self.graph.placeholder(name) for name in _INPUTS}
        self.name(token_ids, self.inputs["token_ids"])
        self.name(positions, self.inputs["positions"])

    def name(self, value: Any, node: Node) -> Node:
        self._nodes[id(value)] = node
        self._alive.append(value)
        if isinstance(value, Tensor):
            node.meta.update(shape=tuple(value.shape), dtype=value.dtype)
        return node

    def node(self, value: Any) -> Any:
        """The graph node of a tensor or rule, a new input of the graph if it has none; other values are returned
        unchanged."""
        if not isinstance(value, Tensor | Rule):
            return value
        if id(value) not in self._nodes:  # neither input nor computed: a parameter, a buffer, a rule
            self.constants[self.name(value, self.graph.placeholder(f"constant_{len(self.constants)}"))] = value
        return self._nodes[id(value)]

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs, tensors = kwargs or {}, list[Tensor]()
        map_aggregate((args, kwargs), lambda x: tensors.append(x) if isinstance(x, Tensor) else None)
        versions = [tensor._version for tensor in tensors]
        result = func(*args, **kwargs)
        if versions != [tensor._version for tensor in tensors]:
            raise NotTracedError(f"{func.__name__} writes in place")
        if isinstance(result, Tensor) and func.__name__ != "__get__":
            if id(result) not in self._nodes and not any(result is tensor for tensor in tensors):
                self.name(result, self._write(func, args, kwargs))
        elif isinstance(result, tuple | list) and result and all(isinstance(part, Tensor) for part in result):
            node = self._write(func, args, kwargs)
            for place, part in enumerate(result):
                self.name(part, self.graph.call_function(operator.getitem, (node, place)))
        elif func.__name__ not in _SHAPE_QUESTIONS or isinstance(result, Tensor):
            raise NotTracedError(f"{func.__name__} gives {type(result).__name__}")
        return result

    def _write(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Node:
        given, named = map_aggregate(args, self.node), map_aggregate(kwargs, self.node)
        name = func.__name__
        if name == "__getitem__":
            return self.graph.call_function(operator.getitem, given, named)
        if getattr(Tensor, name, None) is func:
            return self.graph.call_method(name, given, named)
        return self.graph.call_function(func, given, named)


class _StandIn:
    """A fake plan for tracing and comparing: its attention is an arbitrary function of query, key and value."""

    def __init__(self, recorder: _Recorder | None = None) -> None:
        self._recorder = recorder

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, rule: Rule) -> Tensor:
        repeats = query.shape[1] // key.shape[1]
        out = (query * key.repeat_interleave(repeats, 1) + value.repeat_interleave(repeats, 1)).transpose(1, 2)
        if (recorder := self._recorder) is not None:
            q, k, v, known = (recorder.node(x) for x in (query, key, value, rule))
            call = recorder.graph.call_method("attend", (recorder.inputs["plan"], layer, q, k, v, known))
            recorder.name(out, call)
        return out


def _stand_in(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, *, stretto_step: _StandIn, **requested: Any
) -> tuple[Tensor, None]:
    return stretto_step.attend(cast(int, module.layer_idx), query, key, value, Rule.of(requested)), None


AttentionInterface.register(_STAND_IN, _stand_in)


@torch.no_grad()
def _trace(model: PreTrainedModel, kernels: Mapping[int, Kernel]) -> Forward:
    first, second = (_record(model, tokens, rows) for tokens, rows in _TRACED)
    graph = _unite(first, second)
    for node in graph.find_nodes(op="call_function", target=functional.linear):
        kernel = kernels.get(id(first.constants.get(node.args[1])))
        if kernel is not None and not kernel.of_torch:
            node.target = kernel.multiply
    graph.eliminate_dead_code()
    if computes(model.device, model.dtype):
        fuse(graph, first.constants, model.dtype)
        if (whole := program(graph, first.constants, model.dtype)) is not None:
            return whole
    used = {node.target: first.constants[node] for node in graph.nodes if node in first.constants}
    return partial(GraphModule(nn.Module(), graph).forward, **used)


def _record(model: PreTrainedModel, tokens: int, rows: int) -> _Recorder:
    token_ids, positions = _made_up(model, tokens)
    recorder = _Recorder(token_ids, positions)
    with recorder:
        logits = module_forward(model)(token_ids, positions, _StandIn(recorder), tokens, -rows)
    recorder.graph.output(recorder.node(logits))
    return recorder


def _made_up(model: PreTrainedModel, tokens: int) -> tuple[Tensor, Tensor]:
    """Made-up token ids and positions, [1, tokens] each, spread over their ranges."""
    config, places = model.config.get_text_config(), torch.arange(tokens)
    return places[None] * 7 % config.vocab_size, places[None] * 5 % config.max_position_embeddings


def _unite(first: _Recorder, second: _Recorder) -> Graph:
    """The graph of the first recording, changed in place: numbers that differ between the recordings become the step's
    number of tokens or rows. Raises NotTracedError if the recordings differ in anything else."""
    nodes = list(zip(first.graph.nodes, second.graph.nodes, strict=False))
    (tokens, rows), (tokens_2, rows_2) = _TRACED
    sizes = {(tokens, tokens_2): first.inputs["tokens"], (-rows, -rows_2): first.inputs["last"]}
    twins = dict(nodes)
    if len(first.graph.nodes) != len(second.graph.nodes):
        raise NotTracedError("it makes more calls for more tokens")
    for one, two in nodes:
        ours, theirs = first.constants.get(one), second.constants.get(two)
        same = ours is theirs or (isinstance(ours, Rule) and ours == theirs)
        if (one.op, one.target) != (two.op, two.target) or not same:
            raise NotTracedError(f"it calls {one.target} for few tokens and {two.target} for more")
        one.args = _united(one.args, two.args, sizes, twins)
        one.kwargs = _united(one.kwargs, two.kwargs, sizes, twins)
    return first.graph


def _united(one: Any, two: Any, sizes: Mapping[tuple[int, int], Node], twins: Mapping[Node, Node]) -> Any:
    if isinstance(one, Node):
        if twins[one] is two:
            return one
    elif isinstance(one, tuple | list) and isinstance(two, tuple | list) and len(one) == len(two):
        return type(one)(_united(a, b, sizes, twins) for a, b in zip(one, two, strict=True))
    elif isinstance(one, dict) and isinstance(two, dict) and one.keys() == two.keys():
        return {name: _united(one[name], two[name], sizes, twins) for name in one}
    elif isinstance(one, slice) and isinstance(two, slice):
        ends = [(getattr(one, name), getattr(two, name)) for name in ("start", "stop", "step")]
        return slice(*(_united(a, b, sizes, twins) for a, b in ends))
    elif type(one) is type(two) and one == two:
        return one
    elif isinstance(one, int) and isinstance(two, int) and (one, two) in sizes:
        return sizes[one, two]
    raise NotTracedError(f"{one} for few tokens and {two} for more")


@torch.inference_mode()
def _compare(model: PreTrainedModel, traced: Forward) -> None:
    """Run module and trace on made-up tokens; NotTracedError if their logits differ by more than rounding."""
    for tokens, rows in _COMPARED:
        token_ids, positions = _made_up(model, tokens)
        expected, found = (
            forward(token_ids, positions, _StandIn(), tokens, -rows) for forward in (module_forward(model), traced)
        )
        if found.shape != expected.shape or found.dtype != expected.dtype:
            raise NotTracedError(f"logits {tuple(found.shape)} instead of {tuple(expected.shape)}")
        allowed = 64 * torch.finfo(expected.dtype).eps * max(1.0, float(expected.abs().max()))
        if not float((found - expected).abs().max()) <= allowed:
            raise NotTracedError(f"its logits differ by {float((found - expected).abs().max()):.1e}")
