"""Finding calls in a graph and putting others in their place.

A pattern is written as what is called and with what: ``("mul", "x", ("rsqrt", "y"))`` is a product with an inverse
root, ``["x", "y"]`` a list of two. A string alone is a variable, which stands for one and the same operand wherever it
occurs. Keywords stand after the other operands; the operands of a sum or a product fit in either order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import permutations
from typing import Any

from torch.fx import Graph, Node

Found = dict[str, Any]

_COMMUTATIVE = ("add", "mul")


def fitting(graph: Graph, pattern: Any) -> Iterator[tuple[Node, Found]]:
    """The nodes that fit a pattern, with what its variables stand for; nodes may be replaced on the way."""
    for node in list(graph.nodes):
        if (found := _fit(pattern, node, {})) is not None:
            yield node, found


def _fit(pattern: Any, value: Any, found: Found) -> Found | None:
    """What the variables of a pattern stand for if it fits a value, given what some stand for already."""
    if isinstance(pattern, str):
        known = found.get(pattern, value)
        same = known is value or (not isinstance(value, Node) and known == value)
        return {**found, pattern: value} if same else None
    if isinstance(pattern, list):
        return _fit_each(pattern, value, found) if isinstance(value, list | tuple) else None
    if not isinstance(pattern, tuple):
        return found if type(pattern) is type(value) and pattern == value else None
    name, *operands = pattern
    if not isinstance(value, Node) or call_name(value) != name:
        return None
    given = [*value.args, *value.kwargs.values()]
    orders = permutations(operands) if name in _COMMUTATIVE else [operands]
    fits = (_fit_each(list(order), given, found) for order in orders)
    return next((fit for fit in fits if fit is not None), None)


def _fit_each(patterns: list[Any], values: list[Any] | tuple[Any, ...], found: Found) -> Found | None:
    if len(patterns) != len(values):
        return None
    fit: Found | None = found
    for pattern, value in zip(patterns, values, strict=True):
        fit = None if fit is None else _fit(pattern, value, fit)
    return fit


def call_name(node: Node) -> str | None:
    if node.op == "call_method":
        return str(node.target)
    return getattr(node.target, "__name__", None) if node.op == "call_function" else None


def call_instead(node: Node, function: Callable[..., Any], *args: Any) -> None:
    """Let a call of another function take a node's place."""
    with node.graph.inserting_before(node):
        replace(node, node.graph.call_function(function, args))


def replace(node: Node, by: Node) -> None:
    by.meta = by.meta or node.meta
    node.replace_all_uses_with(by)
    node.graph.erase_node(node)
