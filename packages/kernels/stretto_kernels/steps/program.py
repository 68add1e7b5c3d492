"""A traced forward as a program: one call of one compiled loop per decode step.

For a small model, calling a loop from Python and making its output tensor take as long as the loop itself. So a trace
all of whose calls are known becomes a table of steps, and one loop executes the table in memory that stays allocated::

    trace      embedding ─► norm ─► multiply ─► rotate ─► attend ─► multiply ─► norm_of_sum ─► ...     Python
    program    [op | places of inputs | place of output | sizes]  one row per call                     one loop

Values are given by place, an index into a table of addresses. The memory of a value is free again after its last use.
Rotary angles depend on the position alone: they are computed by torch once per position, and kept.

The loop stops for what is not compiled: a product by another kernel than panels; and in steps with contexts each
attention, whose contexts torch computes. A trace with any other call stays as it is.

Axes: T token, H query heads, K key/value heads, D width of a head, R row, V vocabulary.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node
from torch.nn import functional

from stretto_kernels.decode_attention import NO_CAP, NO_WINDOW
from stretto_kernels.fused import gate, norm, norm_of_sum, rotate
from stretto_kernels.panels import kind_of
from stretto_kernels.program_loop import (
    ATTEND,
    CALL,
    EMBED,
    GATE,
    LOGITS,
    MULTIPLY,
    NORM,
    POSITIONS,
    ROTATE,
    TOKEN_IDS,
    run,
)
from stretto_kernels.rule import Rule
from stretto_kernels.steps.matmul import Kernel

_KEPT_BYTES = 64 << 20  # most memory for values that a program keeps between steps
_FIRST_ANGLES = 256  # positions whose angles are computed at first
_NO_ROWS = np.zeros((0, 3), np.int64), np.zeros(0, np.int64)


def _bits(number: float) -> int:
    return int(np.float32(number).view(np.int32))


def _kernel(node: Node) -> Kernel | None:
    """The kernel whose method a node calls; None for another call."""
    owner = getattr(node.target, "__self__", None)
    return owner if isinstance(owner, Kernel) else None


class _UnknownCallError(Exception):
    """A trace has a call that no step of a program computes."""


class _Value(NamedTuple):
    """A value of a trace, at `place` in the table of addresses: `width` numbers for each token, or with `last` each of
    the last rows. `head`: width of a head if it is seen as heads, else 0; as [1, T, H, D], or if `turned` [1, H, T,
    D]."""

    place: int
    width: int
    last: bool = False
    head: int = 0  # width of a head if it is seen as heads
    turned: bool = False  # whether it is seen as [1, H, T, D], not [1, T, H, D]


class _Attention(NamedTuple):
    """An attention, for steps in which Python computes it or a part of it in place of the loop."""

    layer: int
    rule: Rule
    inputs: tuple[_Value, _Value, _Value]
    out: _Value


class _Call(NamedTuple):
    """A product x · weightᵀ + bias (None: 0), written to `out`, that Python computes in place of the loop by
    `multiply`, a kernel of torch's or oneDNN's."""

    multiply: Callable[[Tensor, Tensor, Tensor | None], Tensor]
    x: _Value
    weight: Tensor
    bias: Tensor | None
    out: _Value


class _Writer:
    """Translates a trace into a program, call by call, in its constructor. Raises _UnknownCallError for a trace that no
    program computes."""

    def __init__(self, graph: Graph, constants: Mapping[Node, Any]) -> None:
        self.steps: list[list[int]] = []
        self.by_python: dict[int, _Attention | _Call] = {}  # by number of the step
        self.places = LOGITS + 1
        self.fixed: dict[Node, int] = {}  # places of constants
        self.products: dict[int, tuple[Kernel, Tensor]] = {}  # weights in panels by place
        self.angles: dict[Node, int] = {}  # places of values that depend on positions alone
        self.widths: dict[int, int] = {}  # of values in the program's memory, by place
        self.tails: dict[int, _Value] = {}  # places of the last rows of a value
        self.used: dict[int, list[int]] = defaultdict(list)  # steps that write or read a place
        self._constants = constants
        self._inputs = {node.target: node for node in graph.find_nodes(op="placeholder")}
        self.of_positions = {self._inputs["positions"]}
        self._values: dict[Node, Any] = {}
        self._last: dict[_Value, _Value] = {}  # the last rows of values
        self._output = next(iter(graph.find_nodes(op="output"))).args[0]
        self._attentions = len(graph.find_nodes(op="call_method", target="attend"))  # still to be written
        for node in graph.nodes:
            if node.op in ("call_function", "call_method"):
                self._translate(node)
        if self._value(self._output).place != LOGITS:
            raise _UnknownCallError("the last call is no product")

    def laid_out(self) -> tuple[dict[int, int], int]:
        """Offset of each value in the program's memory, by place, and the size of that memory, in numbers per token.
        Values of one width share memory if one is used only after the other's last use."""
        offsets: dict[int, int] = {}
        free: dict[int, list[int]] = defaultdict(list)
        size = 0
        for number in range(len(self.steps)):
            for place, width in self.widths.items():
                if self.used[place][0] == number:
                    offsets[place] = free[width].pop() if free[width] else size
                    size = max(size, offsets[place] + width)
            for place, width in self.widths.items():
                if self.used[place][-1] == number:
                    free[width].append(offsets[place])
        return offsets, size

    def _translate(self, node: Node) -> None:
        """Write the steps of a call, or, if its result depends on positions alone, mark it as such. Raises
        _UnknownCallError for a call that the program does not know."""
        inputs = set(node.all_input_nodes) - self._constants.keys() - {self._inputs["tokens"]}
        if inputs <= self.of_positions:
            of_weights = any(isinstance(self._constants.get(one), nn.Parameter) for one in node.all_input_nodes)
            self._check(not of_weights)  # the results are kept, but weights change
            self.of_positions.add(node)
            return
        writers: dict[Any, Callable[..., Any]] = {
            functional.embedding: self._embedding,
            functional.linear: self._linear,
            norm: self._norm,
            norm_of_sum: self._norm_of_sum,
            rotate: self._rotate,
            gate: self._gate,
            operator.getitem: self._getitem,
            "attend": self._attend,
            **dict.fromkeys(("view", "reshape", "contiguous", "transpose"), self._seen_otherwise),
        }
        writer = writers.get(functional.linear if _kernel(node) is not None else node.target)
        if writer is None or (node.kwargs and node.target is not functional.embedding):
            raise _UnknownCallError(str(node.target))
        self._values[node] = writer(node, *node.args)

    # One method for each known call, with the node and its arguments. It writes a step, and returns the call's value;
    # it raises _UnknownCallError for shapes or arguments that the step does not compute.

    def _embedding(self, node: Node, ids: Node, weight: Node, *rest: Any) -> _Value:
        self._check(ids is self._inputs["token_ids"] and not rest and node.kwargs.get("max_norm") is None)
        vocabulary, width = self._constants[weight].shape
        out = self._new(width)
        self._step(EMBED, TOKEN_IDS, 0, self._fix(weight), out.place, n=width, m=vocabulary)
        return out

    def _norm(self, node: Node, x: Node, weight: Node, eps: float) -> _Value:
        of = self._value(x)
        self._check(len(self._constants[weight]) == of.width)
        out = self._new(of.width, of.last)
        places = of.place, 0, self._fix(weight), out.place, of.place
        self._step(NORM, *places, n=of.width, k=_bits(eps), last=of.last)
        return out

    def _norm_of_sum(self, node: Node, x: Node, y: Node, weight: Node, eps: float) -> tuple[_Value, _Value]:
        of, other = self._value(x), self._value(y)
        self._check(len(self._constants[weight]) == of.width == other.width and of.last == other.last)
        total, out = self._new(of.width, of.last), self._new(of.width, of.last)
        places = of.place, other.place, self._fix(weight), out.place, total.place
        self._step(NORM, *places, n=of.width, k=_bits(eps), last=of.last)
        return total, out

    def _rotate(self, node: Node, x: Node, weight: Node | None, eps: float, cos: Node, sin: Node) -> _Value:
        of, places = self._value(x), []
        self._check(of.head > 0 and not of.last and {cos, sin} <= self.of_positions)
        for angle in (cos, sin):
            if angle not in self.angles:
                self.angles[angle] = self._place()
            places.append(self.angles[angle])
        out = self._new(of.width)
        inputs = of.place, places[0], 0 if weight is None else self._fix(weight), out.place, places[1]
        self._step(ROTATE, *inputs, n=of.width // of.head, m=of.head, k=_bits(eps))
        return out._replace(head=of.head, turned=True)

    def _gate(self, node: Node, asked: Node, up: Node) -> _Value:
        of, other = self._value(asked), self._value(up)
        self._check(of.width == other.width and of.last == other.last)
        out = self._new(of.width, of.last)
        self._step(GATE, of.place, other.place, 0, out.place, n=of.width, last=of.last)
        return out

    def _linear(self, node: Node, x: Node, weight: Node, bias: Node | None = None) -> _Value:
        of, matrix, kernel = self._value(x), self._constants[weight], _kernel(node)
        width, depth = matrix.shape
        self._check(depth == of.width)
        out = _Value(LOGITS, width, of.last) if node is self._output else self._new(width, of.last)
        if kernel is None or kernel.choice.kernel != "panels":  # for few tokens too: a stop of the loop takes longer
            added = None if bias is None else self._constants[bias]
            self.by_python[len(self.steps)] = _Call(cast(Any, node.target), of, matrix, added, out)
            self._step(CALL, of.place, 0, 0, out.place)
            return out
        place, added_place = self._place(), 0 if bias is None else self._fix(bias)
        self.products[place] = kernel, matrix
        kind = kind_of(matrix.dtype, depth)
        self._step(MULTIPLY, of.place, added_place, place, out.place, n=depth, m=width, k=kind, last=of.last)
        return out

    def _attend(self, node: Node, plan: Node, layer: int, query: Node, key: Node, value: Node, rule: Node) -> _Value:
        inputs = of, key_of, value_of = tuple(self._value(x, turned=True) for x in (query, key, value))
        settings, head = self._constants[rule], of.head
        self._check(head == key_of.head == value_of.head and not (of.last or key_of.last or value_of.last))
        out = self._new(of.width)._replace(head=head)
        self.by_python[len(self.steps)] = _Attention(layer, settings, (of, key_of, value_of), out)
        window = NO_WINDOW if settings.window is None else settings.window
        scaling = head**-0.5 if settings.scaling is None else settings.scaling
        softcap = NO_CAP if settings.softcap is None else settings.softcap
        places, sizes = (*(one.place for one in inputs), out.place), (of.width // head, key_of.width // head, head)
        self._step(ATTEND, *places, n=sizes[0], m=sizes[1], k=sizes[2])
        self.steps[-1][10:] = layer, window, _bits(scaling), _bits(softcap)
        self._attentions -= 1
        return out

    def _getitem(self, node: Node, x: Node, part: Any) -> _Value:
        if isinstance(values := self._values[x], tuple) and not isinstance(values, _Value):
            return cast(_Value, values[part])
        everything = slice(None)
        self._check(part == (everything, slice(self._inputs["last"], None), everything) and not self._attentions)
        return self._value(x)

    def _seen_otherwise(self, node: Node, x: Node, *sizes: Any) -> _Value:
        if node.target == "transpose":
            self._check(sizes == (1, 2))
            return self._value(x)._replace(turned=True)
        of, shape = self._value(x), node.meta["shape"]
        self._check(shape[:2] == self._inputs["token_ids"].meta["shape"])
        return of._replace(head=shape[3] if len(shape) == 4 else 0)

    def _value(self, node: Node, turned: bool = False) -> _Value:
        """The value of a node; after the last attention, that of the last rows. `turned`: the value is wanted as [1, H,
        T, D]. Raises _UnknownCallError if the program has no such value."""
        found = self._values.get(node)
        if not isinstance(found, _Value) or found.turned != turned:
            raise _UnknownCallError(f"the input {node}")
        if self._attentions or found.last:
            return found
        # After the last attention no token needs another: the last rows are enough.
        if found not in self._last:
            self._last[found] = found._replace(place=self._place(), last=True)
            self.tails[self._last[found].place] = found
        return self._last[found]

    def _check(self, known: bool) -> None:
        if not known:
            raise _UnknownCallError("other shapes")

    def _place(self) -> int:
        self.places += 1
        return self.places - 1

    def _new(self, width: int, last: bool = False) -> _Value:
        value = _Value(self._place(), width, last)
        self.widths[value.place] = width
        return value

    def _fix(self, node: Node) -> int:
        """The place of a constant in the table of addresses. Raises _UnknownCallError if its numbers are not
        contiguous."""
        self._check(self._constants[node].is_contiguous())
        if node not in self.fixed:
            self.fixed[node] = self._place()
        return self.fixed[node]

    def _step(self, op: int, *places: int, n: int = 0, m: int = 0, k: int = 0, last: bool = False) -> None:
        """Append a step (see `program_loop.run`) with the operation `op`, and note for each of its `places` that the
        step uses it. `n`, `m`, `k`: its sizes. `last`: it is for the last rows only."""
        for place in places:
            self.used[self.tails[place].place if place in self.tails else place].append(len(self.steps))
        self.steps.append([op, *places, *[0] * (5 - len(places)), n, m, k, int(last), 0, 0, 0, 0])


class _Program:
    """A trace as a table of steps, which one loop executes (see the module), with the memory for its values. `logits`
    computes a decode step with the present weights."""

    def __init__(self, written: _Writer, constants: Mapping[Node, Any], angles: Callable[..., Any], dtype: torch.dtype):
        self._steps, self._at = np.array(written.steps, np.int64), np.zeros(written.places, np.int64)
        self._by_python, self._dtype = written.by_python, dtype
        self._half = None if dtype is torch.float32 else 1
        #: Numbers of the steps before which the loop stops: in all steps, and in steps whose attention torch computes.
        self._calls = [number for number, what in written.by_python.items() if isinstance(what, _Call)]
        self._stops = list(written.by_python)
        self._last_attention = max(number for number in self._stops if number not in self._calls)
        self._fixed = {place: constants[node] for node, place in written.fixed.items()}
        self._products = written.products
        self._weights = [weight for _, weight in self._products.values()]
        self._versions: list[int] = []
        self._angles, self._angle_places = angles, list(written.angles.values())
        self._angle_tables: list[Tensor] = []
        self._known = 0  # positions with angles
        offsets, self._size = written.laid_out()
        self._offsets = np.zeros((2, written.places), np.int64)  # in numbers per token, and per token before the last
        for place, offset in offsets.items():
            self._offsets[0, place] = offset
        for place, of in written.tails.items():
            self._offsets[:, place] = offsets[of.place], of.width
        self._in_memory = np.array([*offsets, *written.tails], np.int64)
        self._memory = torch.empty(0, dtype=dtype)
        self._sized = (0, 0)
        self._vocabulary = written.steps[-1][7] or cast(_Call, written.by_python[len(written.steps) - 1]).out.width

    def logits(self, token_ids: Tensor, positions: Tensor, plan: Any, tokens: int, last: int) -> Tensor:
        """Compute the logits of the last R of the `tokens` tokens of a step, [1, R, V], as a `steps.trace.Forward`.
        `last`: -R."""
        at, token_ids, positions = self._at, token_ids.contiguous(), positions.contiguous()
        cached = getattr(plan, "cached", None)  # of a plan that the loop can follow
        whole = cached is not None and plan.contexts is None
        table, ends = cached or _NO_ROWS
        self._look_at_weights()
        # Rows are no longer than their slots; finding the maximum takes as long as ten such questions.
        self._look_at_positions(table[-1, 1] if whole else int(positions.max()) + 1)
        if self._sized != (tokens, -last):
            self._resize(tokens, -last)
        out = torch.empty((1, -last, self._vocabulary), dtype=self._dtype)
        at[TOKEN_IDS], at[POSITIONS], at[LOGITS] = token_ids.data_ptr(), positions.data_ptr(), out.data_ptr()
        first, common = 0, (tokens, -last, table, ends, tokens - len(ends), self._half)
        for stop in self._calls if whole else self._stops:
            if stop > first:
                run(self._steps, at, first, stop, *common)
            what = self._by_python[stop]
            if isinstance(what, _Call):
                target = out if what.out.place == LOGITS else self._view(what.out)
                target.copy_(what.multiply(self._view(what.x), what.weight, what.bias))
                first = stop + 1
            elif cached is None:
                query, key, value = (self._view(one) for one in what.inputs)
                self._view(what.out).copy_(plan.attend(what.layer, query, key, value, what.rule))
                first = stop + 1
            else:  # the loop attends from the rows, Python within the contexts
                query, key, value = (self._view(one) for one in what.inputs)
                plan.enter(what.layer, key, value)
                if stop != self._last_attention or -last > len(ends):
                    within = plan.within_contexts(query, key, value, what.rule)
                    self._view(what.out)[:, : within.shape[1]].copy_(within)
                first = stop
        run(self._steps, at, first, len(self._steps), *common)
        if self._memory.nbytes > _KEPT_BYTES:
            self._memory, self._sized = torch.empty(0, dtype=self._dtype), (0, 0)
        return out

    def _view(self, value: _Value) -> Tensor:
        tokens, rows = self._sized
        start, before = (int(part) for part in self._offsets[:, value.place])
        start = start * tokens + before * (tokens - rows)
        count = rows if value.last else tokens
        flat = self._memory[start : start + count * value.width]
        if not value.head:
            return flat.view(1, count, value.width)
        heads = flat.view(1, count, -1, value.head)
        return heads.transpose(1, 2) if value.turned else heads

    def _look_at_weights(self) -> None:
        """Renew the panels, and the addresses of panels and constants, if weights have changed."""
        versions = [weight._version for weight in self._weights]
        if versions != self._versions:
            for place, (kernel, weight) in self._products.items():
                self._at[place] = kernel.prepared(weight).data_ptr()
            for place, constant in self._fixed.items():
                self._at[place] = constant.data_ptr()
            self._versions = versions

    def _look_at_positions(self, end: int) -> None:
        """Compute the rotary angles of positions below `end` if some are missing."""
        if end > self._known and self._angle_places:
            known = max(_FIRST_ANGLES, 1 << int(end - 1).bit_length())
            found = self._angles(positions=torch.arange(known)[None], tokens=known)
            self._angle_tables = [table.contiguous() for table in found]
            for place, table in zip(self._angle_places, self._angle_tables, strict=True):
                self._at[place] = table.data_ptr()
            self._known = known  # not before: a step that ran out of memory has no tables

    def _resize(self, tokens: int, rows: int) -> None:
        """Place the values of a step in memory. Afterwards `_sized` is (`tokens`, `rows`)."""
        size = self._size * tokens
        if size > len(self._memory):
            self._memory = torch.empty(size, dtype=self._dtype)
        places = self._in_memory
        starts = self._offsets[0, places] * tokens + self._offsets[1, places] * (tokens - rows)
        self._at[places] = self._memory.data_ptr() + starts * self._dtype.itemsize
        self._sized = tokens, rows


def program(graph: Graph, constants: Mapping[Node, Any], dtype: torch.dtype) -> Callable[..., Tensor] | None:
    """Make a program of a trace: a `steps.trace.Forward`, or None if the trace has other calls or no product in panels.
    `constants`: parameters and other constants by their placeholder node. `dtype`: of the model."""
    try:
        written = _Writer(graph, constants)
    except _UnknownCallError:
        return None
    if not written.products:
        return None
    angles = _part(graph, written.of_positions, constants, written.angles)
    return partial(_Program(written, constants, angles, dtype).logits)


def _part(
    graph: Graph, wanted: set[Node], constants: Mapping[Node, Any], results: Iterable[Node]
) -> Callable[..., tuple[Tensor, ...]]:
    """Make a function of `positions` [1, n] and their number `tokens` that computes the `wanted` nodes of a trace, and
    returns those in `results`."""
    part, copies = Graph(), dict[Node, Node]()
    inputs = {node for one in wanted for node in one.all_input_nodes}
    for node in graph.nodes:
        if node in wanted or node in inputs or node.target == "tokens":
            copies[node] = part.node_copy(node, copies.__getitem__)
    part.output(tuple(copies[node] for node in results))
    used = {str(node.target): constants[node] for node in inputs if node in constants}
    return partial(GraphModule(nn.Module(), part).forward, **used)
