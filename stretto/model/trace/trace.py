"""The forward of a decode step without the module around it: what CUDA graphs are on a GPU, for the processor.

A step of a small model spends more on the calls than on the numbers: between two products of matrices lie dozens of
calls of Python. Here the calls that the transformers module makes to torch are written down once, while it runs over a
few tokens, and are then run as one straight function::

    module    modeling_qwen3.py -> nn.Module.__call__ -> ... -> torch        recorded at 5 and at 11 tokens
    calls     token_ids -> embedding -> norm -> linear -> attention -> ...   equal but for what is a number of tokens

A number that differs between the two tracings has to be one of the two sizes of a step, or nothing is captured.
Parameters are the module's own tensors, so weights that are copied into them are seen. The attention function stays a
call: it is given anew for every step. What is captured is run against the module before it is used; where a module
decides by the values of tensors (a mixture of experts), writes in place, or differs by more than rounding, the module
itself goes on being called.

Axes: T packed token, R row, V vocabulary.
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_aggregate
from torch.overrides import TorchFunctionMode
from transformers import AttentionInterface, PreTrainedModel

from stretto.model.kernels.matmul import Kernel, plain
from stretto.model.trace.rewrites import simplify

log = logging.getLogger(__name__)

#: As transformers calls it: (module, query, key, value, mask, **asked) -> (attended, None).
AttentionFunction = Callable[..., tuple[Tensor, None]]

_STAND_IN = "stretto_stand_in"
_INPUTS = ("token_ids", "positions", "attention", "tokens", "last")
_TRACED = ((5, 3), (11, 7))  # (tokens, rows) of the two tracings: no size is a sum or a multiple of others
_COMPARED = ((1, 1), (6, 6), (37, 4))

#: What a module may ask a tensor and get something else than a tensor: it is the same for all values.
_SHAPE_QUESTIONS = frozenset(
    {"__get__", "size", "dim", "ndimension", "numel", "is_floating_point", "_set_grad_enabled"}
)


class NotTracedError(Exception):
    """Why a module's forward is not a list of calls that is the same for every step."""


@dataclass(frozen=True)
class Layer:
    """One call of the attention function: the module that makes it and what it asks for besides tensors."""

    module: nn.Module
    asked: Mapping[str, Any]


@dataclass(frozen=True)
class TracedForward:
    """The calls of a module's forward, run one after the other."""

    graph: Graph
    calls: Callable[..., Tensor]  # the graph as a function
    constants: tuple[Any, ...]  # parameters, buffers and layers, in the order in which `calls` takes them

    def __call__(self, token_ids: Tensor, positions: Tensor, rows: int, attention: AttentionFunction) -> Tensor:
        """Token ids [T] and positions [T] to the logits [R, V] of the last `rows` tokens."""
        tokens = len(token_ids)
        return self.calls(token_ids[None], positions[None], attention, tokens, -rows, *self.constants)[0]


@dataclass(frozen=True)
class ModuleForward:
    """The module itself; its attention function is the one that its config names."""

    model: PreTrainedModel
    reason: str  # why it was not captured

    def __call__(self, token_ids: Tensor, positions: Tensor, rows: int, attention: AttentionFunction) -> Tensor:
        """As `TracedForward`; of `attention`, a partial of the model's own, the keywords go through the module."""
        return _call_module(self.model, token_ids, positions, rows, **cast("partial[Any]", attention).keywords)


def trace(model: PreTrainedModel) -> TracedForward | ModuleForward:
    """The quickest forward that computes what the module's does."""
    if model.device.type != "cpu":
        return ModuleForward(model, "it is not on the processor")
    own = model.config._attn_implementation
    model.set_attn_implementation(_STAND_IN)
    try:
        with plain(model) as kernels:
            captured = _trace(model, kernels)
        _compare(model, captured)
    except Exception as error:  # whatever a module or torch's tracing does not like, the module itself is still there
        log.info("%s runs as a module, not captured: %s", type(model).__name__, error)
        return ModuleForward(model, str(error))
    finally:
        model.set_attn_implementation(own)
    return captured


def _call_module(model: PreTrainedModel, token_ids: Tensor, positions: Tensor, rows: int, **rest: Any) -> Tensor:
    answer = model(
        input_ids=token_ids[None], position_ids=positions[None], use_cache=False, logits_to_keep=rows, **rest
    )
    return cast(Tensor, answer.logits[0])


class _Recorder(TorchFunctionMode):
    """Writes down every call that makes a tensor; numbers stand in the calls as they were."""

    def __init__(self, token_ids: Tensor, positions: Tensor) -> None:
        super().__init__()
        self.graph = Graph()
        self.constants: dict[Node, Any] = {}
        self._nodes: dict[int, Node] = {}
        self._alive: list[Any] = []  # an id names an object as long as it lives
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
        """The node of a tensor or a layer; anything else stands for itself."""
        if not isinstance(value, Tensor | Layer):
            return value
        if id(value) not in self._nodes:  # neither an input nor computed: a parameter, a buffer, a layer
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


def _stand_in(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    stretto_recorder: _Recorder | None = None,
    **asked: Any,
) -> tuple[Tensor, None]:
    """In the place of attention while a module is traced and compared: any function of all three tensors."""
    repeats = query.shape[1] // key.shape[1]
    out = (query * key.repeat_interleave(repeats, 1) + value.repeat_interleave(repeats, 1)).transpose(1, 2)
    if stretto_recorder is not None:
        kept = {name: asked[name] for name in asked if not isinstance(asked[name], Tensor)}
        given = [stretto_recorder.node(x) for x in (Layer(module, kept), query, key, value)]
        call = stretto_recorder.graph.call_function(attend, (stretto_recorder.inputs["attention"], *given))
        stretto_recorder.name(out, call)
    return out, None


AttentionInterface.register(_STAND_IN, _stand_in)


def attend(attention: AttentionFunction, layer: Layer, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return attention(layer.module, query, key, value, None, **layer.asked)[0]


@torch.no_grad()
def _trace(model: PreTrainedModel, kernels: Mapping[int, Kernel]) -> TracedForward:
    first, second = (_record(model, tokens, rows) for tokens, rows in _TRACED)
    graph = _unite(first, second)
    simplify(graph, {node: kernels[id(x)] for node, x in first.constants.items() if id(x) in kernels})
    used = tuple(first.constants[node] for node in graph.nodes if node in first.constants)
    return TracedForward(graph, GraphModule(nn.Module(), graph).forward, used)


def _record(model: PreTrainedModel, tokens: int, rows: int) -> _Recorder:
    token_ids, positions = (made_up[None] for made_up in _made_up(model, tokens))
    recorder = _Recorder(token_ids, positions)
    inputs = {"input_ids": token_ids, "position_ids": positions}
    with recorder:
        logits = model(**inputs, use_cache=False, logits_to_keep=rows, stretto_recorder=recorder).logits
    recorder.graph.output(recorder.node(logits))
    return recorder


def _made_up(model: PreTrainedModel, tokens: int) -> tuple[Tensor, Tensor]:
    """Token ids and positions, spread over what there is of both."""
    config, places = model.config.get_text_config(), torch.arange(tokens)
    return places * 7 % config.vocab_size, places * 5 % config.max_position_embeddings


def _unite(first: _Recorder, second: _Recorder) -> Graph:
    """The first graph, with the sizes of a step where the two differ.

    Raises:
        NotCapturedError: they differ in anything else.
    """
    nodes = list(zip(first.graph.nodes, second.graph.nodes, strict=False))
    (tokens, rows), (tokens_2, rows_2) = _TRACED
    sizes = {(tokens, tokens_2): first.inputs["tokens"], (-rows, -rows_2): first.inputs["last"]}
    twins = dict(nodes)
    if len(first.graph.nodes) != len(second.graph.nodes):
        raise NotTracedError("it makes more calls for more tokens")
    for one, two in nodes:
        ours, theirs = first.constants.get(one), second.constants.get(two)
        same = ours is theirs or (isinstance(ours, Layer) and ours == theirs)
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
def _compare(model: PreTrainedModel, captured: TracedForward) -> None:
    """Run both over made-up tokens.

    Raises:
        NotCapturedError: they differ by more than the rounding of sums in another order.
    """
    for tokens, rows in _COMPARED:
        token_ids, positions = _made_up(model, tokens)
        expected = _call_module(model, token_ids, positions, rows)
        found = captured(token_ids, positions, rows, _stand_in)
        if found.shape != expected.shape or found.dtype != expected.dtype:
            raise NotTracedError(f"logits {tuple(found.shape)} instead of {tuple(expected.shape)}")
        allowed = 64 * torch.finfo(expected.dtype).eps * max(1.0, float(expected.abs().max()))
        if not float((found - expected).abs().max()) <= allowed:
            raise NotTracedError(f"its logits differ by {float((found - expected).abs().max()):.1e}")
