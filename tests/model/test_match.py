"""Promises: a pattern fits what it says and nothing else; one variable is one operand."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Graph, Node

from stretto.model.trace.match import call_instead, fitting


def graph_of(*calls: tuple[Any, ...]) -> tuple[Graph, list[Node]]:
    """Two inputs, then calls of torch functions whose operands are given as places in the list of nodes before."""
    graph = Graph()
    nodes = [graph.placeholder("a"), graph.placeholder("b")]
    for function, *operands in calls:
        given = tuple(nodes[x] if isinstance(x, int) else x for x in operands)
        nodes.append(graph.call_function(function, given))
    graph.output(nodes[-1])
    return graph, nodes


def test_the_operands_of_a_product_fit_in_either_order_and_those_of_a_difference_do_not() -> None:
    for function, expected in ((torch.mul, 1), (torch.sub, 0)):
        graph, _ = graph_of((torch.rsqrt, 0), (function, 2, 1))
        assert len(list(fitting(graph, (function.__name__, "x", ("rsqrt", "y"))))) == expected


def test_a_variable_stands_for_the_same_operand_everywhere() -> None:
    pattern = ("mul", "x", ("rsqrt", "x"))
    graph, nodes = graph_of((torch.rsqrt, 0), (torch.mul, 2, 0))
    assert [(node, found) for node, found in fitting(graph, pattern)] == [(nodes[3], {"x": nodes[0]})]
    graph, _ = graph_of((torch.rsqrt, 0), (torch.mul, 2, 1))
    assert not list(fitting(graph, pattern))


def test_numbers_fit_by_type_and_value() -> None:
    graph, _ = graph_of((torch.pow, 0, 2.0))
    assert not list(fitting(graph, ("pow", "x", 2)))
    assert list(fitting(graph, ("pow", "x", 2.0)))


def test_lists_fit_item_by_item() -> None:
    graph, nodes = graph_of((torch.neg, 1), (torch.cat, 0))
    nodes[3].args = ([nodes[2], nodes[0]], -1)
    assert [found for _, found in fitting(graph, ("cat", [("neg", "y"), "x"], -1))] == [{"y": nodes[1], "x": nodes[0]}]
    assert not list(fitting(graph, ("cat", ["x", ("neg", "y")], -1)))
    assert not list(fitting(graph, ("cat", [("neg", "y")], -1)))


def test_a_call_takes_the_place_of_another() -> None:
    graph, nodes = graph_of((torch.neg, 0), (torch.add, 2, 1))
    call_instead(nodes[2], torch.abs, nodes[1])
    assert [node.target for node in graph.nodes if node.op == "call_function"] == [torch.abs, torch.add]
