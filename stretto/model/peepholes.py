"""Exact rewritings of captured calls (`stretto.model.captured`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.fx import Graph, Node


def simplify(graph: Graph, constants: Mapping[Node, Any]) -> None:
    """Fewer calls that compute the same."""
    graph.eliminate_dead_code()
