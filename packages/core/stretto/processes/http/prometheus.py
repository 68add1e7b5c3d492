"""Prometheus' text format, version 0.0.4, written without a client library."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
Labels = tuple[tuple[str, str], ...]


class Metric(NamedTuple):
    """One metric: a counter, gauge or summary (`kind`), with its `meaning` (a help text) and samples: (suffix of the
    name, labels, value).

    Example: ``Metric("requests_total", "counter", "replies by status", [("", (("status", "200"),), 7)])``
    """

    name: str
    kind: str  # "counter", "gauge" or "summary"
    meaning: str
    samples: Sequence[tuple[str, Labels, float]]


def page_of(metrics: Iterable[Metric]) -> str:
    """Write the metrics, in their order, as a page for Prometheus to scrape. NaN stands for a value that is not
    finite."""
    return "".join(f"{line}\n" for metric in metrics for line in _lines(metric))


def _lines(metric: Metric) -> Iterator[str]:
    yield f"# HELP {metric.name} {metric.meaning}"
    yield f"# TYPE {metric.name} {metric.kind}"
    for ending, labels, value in metric.samples:
        inner = ",".join(f'{label}="{_escaped(text)}"' for label, text in labels)
        shown = repr(value) if math.isfinite(value) else "NaN"
        yield f"{metric.name}{ending}{f'{{{inner}}}' if inner else ''} {shown}"


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
