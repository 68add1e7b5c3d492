"""A traced forward of a decode step, in which sequences of small calls are replaced by fused ones
(`steps.fusing`).

For small models Python calls between matmuls take longer than the computation. So the torch calls of a transformers
module are traced once, on a few tokens, and then run as one straight function::

    module    modeling_qwen3.py -> nn.Module.__call__ -> ... -> torch        traced with 5 and with 11 tokens
    trace     token_ids -> embedding -> norm -> linear -> attention -> ...   equal but for numbers of tokens

The two traces may differ only in the number of tokens and rows. The trace uses the module's own parameter tensors, so
weights copied into them take effect; linear layers use their chosen kernels.

A trace is compared with its module before use. A module runs untraced if it has control flow on tensor values (a
mixture of experts) or in-place writes, or if its trace differs by more than rounding.

Before the comparison, sequences of calls are replaced by one call each (`steps.fusing`). If all calls are then
known on the CPU, and a product is in panels, the trace becomes one compiled call (`steps.program`). On a GPU
the trace is captured as a CUDA graph (`gpu.graphs`).

The comparison comes afterwards, so a wrong match is never used.

Axes: T packed token, R row, V vocabulary.
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_aggregate
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from transformers import AttentionInterface, PreTrainedModel

from stretto_kernels.rule import Rule
from stretto_kernels.steps.fusing import Calls, calls_for, fuse, join_products
from stretto_kernels.steps.matmul import Kernel, plain
from stretto_kernels.steps.program import program

log = logging.getLogger(__name__)


_STAND_IN = "stretto_stand_in"
_INPUTS = ("token_ids", "positions", "plan", "tokens", "last")
_TRACED = ((5, 3), (11, 7))  # (tokens, rows) of the two tracings: no size is a sum or a multiple of others
_COMPARED = ((1, 1), (6, 6), (37, 4))

#: Tensor methods with a non-tensor result that does not depend on the values.
_SHAPE_QUESTIONS = frozenset(
    {"__get__", "size", "dim", "ndimension", "numel", "is_floating_point", "_set_grad_enabled"}
)


class _NotTracedError(Exception):
    """The forward of a module cannot be traced; the text is the reason. `trace` raises no such error."""


class Attends(Protocol):
    """Attention of one step; or of some rows of a step, which is given all tokens in other shapes: query [T, H, D], key
    and value [T, K, D], and returns that of its rows, [R, H, D]."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, rule: Rule, /) -> Tensor:
        """Attend in layer number `layer`: query [1, H, T, D], key and value [1, K, T, D]; returns [1, T, H, D]."""


#: Called with (token ids [1, T], positions [1, T], plan, T, -R); returns the logits [1, R, V] of the last R tokens.
Forward = Callable[[Tensor, Tensor, Attends, int, int], Tensor]


def trace(model: PreTrainedModel, calls: Calls | None = None) -> Forward:
    """Make the fastest function equivalent to the model's forward: its trace, or `module_forward` for models that
    cannot be traced (the reason is logged) and on devices other than the CPU without fused calls. On a GPU, weights
    that multiply the same input may become views of a joint matrix. `calls`: the fused calls; None: those of the
    device."""
    calls = calls or calls_for(model.device, model.dtype)
    if calls is None and model.device.type != "cpu":
        return module_forward(model)
    own = model.config._attn_implementation
    model.set_attn_implementation(_STAND_IN)
    try:
        with plain(model) as kernels:
            traced = _trace(model, kernels, calls)
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
    `graph`. A call that writes in place, or whose result depends on values and is no tensor, raises
    _NotTracedError."""

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
        """Note that `node` stands for a tensor or rule; returns the node."""
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
            raise _NotTracedError(f"{func.__name__} writes in place")
        if isinstance(result, Tensor) and func.__name__ != "__get__":
            if id(result) not in self._nodes and not any(result is tensor for tensor in tensors):
                self.name(result, self._write(func, args, kwargs))
        elif isinstance(result, tuple | list) and result and all(isinstance(part, Tensor) for part in result):
            node = self._write(func, args, kwargs)
            for place, part in enumerate(result):
                self.name(part, self.graph.call_function(operator.getitem, (node, place)))
        elif func.__name__ not in _SHAPE_QUESTIONS or isinstance(result, Tensor):
            raise _NotTracedError(f"{func.__name__} gives {type(result).__name__}")
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
def _trace(model: PreTrainedModel, kernels: Mapping[int, Kernel], calls: Calls | None) -> Forward:
    first, second = (_record(model, tokens, rows) for tokens, rows in _TRACED)
    graph = _unite(first, second)
    for node in graph.find_nodes(op="call_function", target=functional.linear):
        kernel = kernels.get(id(first.constants.get(node.args[1])))
        if kernel is not None and not kernel.of_torch:
            node.target = kernel.multiply
    graph.eliminate_dead_code()
    if calls is not None:
        fuse(graph, first.constants, model.dtype, calls)
        if "attend_rotated" in calls:
            join_products(graph, first.constants)
        elif (whole := program(graph, first.constants, model.dtype)) is not None:
            return whole
    used = {node.target: first.constants[node] for node in graph.nodes if node in first.constants}
    return partial(GraphModule(nn.Module(), graph).forward, **used)


def _record(model: PreTrainedModel, tokens: int, rows: int) -> _Recorder:
    """Run the module on made-up tokens, with logits of the last `rows`; returns the record of its calls."""
    token_ids, positions = _made_up(model, tokens)
    recorder = _Recorder(token_ids, positions)
    with recorder:
        logits = module_forward(model)(token_ids, positions, _StandIn(recorder), tokens, -rows)
    recorder.graph.output(recorder.node(logits))
    return recorder


def _made_up(model: PreTrainedModel, tokens: int) -> tuple[Tensor, Tensor]:
    """Made-up token ids and positions, [1, tokens] each, spread over their ranges."""
    config, places = model.config.get_text_config(), torch.arange(tokens, device=model.device)
    return places[None] * 7 % config.vocab_size, places[None] * 5 % config.max_position_embeddings


def _unite(first: _Recorder, second: _Recorder) -> Graph:
    """The graph of the first recording, changed in place: numbers that differ between the recordings become the step's
    number of tokens or rows. Raises _NotTracedError if the recordings differ in anything else."""
    nodes = list(zip(first.graph.nodes, second.graph.nodes, strict=False))
    (tokens, rows), (tokens_2, rows_2) = _TRACED
    sizes = {(tokens, tokens_2): first.inputs["tokens"], (-rows, -rows_2): first.inputs["last"]}
    twins = dict(nodes)
    if len(first.graph.nodes) != len(second.graph.nodes):
        raise _NotTracedError("it makes more calls for more tokens")
    for one, two in nodes:
        ours, theirs = first.constants.get(one), second.constants.get(two)
        same = ours is theirs or (isinstance(ours, Rule) and ours == theirs)
        if (one.op, one.target) != (two.op, two.target) or not same:
            raise _NotTracedError(f"it calls {one.target} for few tokens and {two.target} for more")
        one.args = _united(one.args, two.args, sizes, twins)
        one.kwargs = _united(one.kwargs, two.kwargs, sizes, twins)
    return first.graph


def _united(one: Any, two: Any, sizes: Mapping[tuple[int, int], Node], twins: Mapping[Node, Node]) -> Any:
    """An argument of both recordings: `one`, in which pairs of numbers in `sizes` are replaced by their node. `twins`:
    node of the second recording by that of the first. Raises _NotTracedError if they differ in anything else."""
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
    raise _NotTracedError(f"{one} for few tokens and {two} for more")


@torch.inference_mode()
def _compare(model: PreTrainedModel, traced: Forward) -> None:
    """Run module and trace on made-up tokens; _NotTracedError if their logits differ in shape or dtype, or by more than
    rounding."""
    for tokens, rows in _COMPARED:
        token_ids, positions = _made_up(model, tokens)
        expected, found = (
            forward(token_ids, positions, _StandIn(), tokens, -rows) for forward in (module_forward(model), traced)
        )
        if found.shape != expected.shape or found.dtype != expected.dtype:
            raise _NotTracedError(f"logits {tuple(found.shape)} instead of {tuple(expected.shape)}")
        allowed = 64 * torch.finfo(expected.dtype).eps * max(1.0, float(expected.abs().max()))
        if not float((found - expected).abs().max()) <= allowed:
            raise _NotTracedError(f"its logits differ by {float((found - expected).abs().max()):.1e}")
