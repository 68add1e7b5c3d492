"""Prometheus: a page with the numbers of the newest step, served by the process that follows the run."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import groupby
from socket import getaddrinfo
from typing import Any

from stretto.processes.http.prometheus import CONTENT_TYPE, Labels, Metric, page_of
from stretto.store.series.metrics import SampledCompletion
from stretto_report.audit.evidence import Alarm
from stretto_report.outlets.follower import About, How
from stretto_report.outlets.points import MetricsPoint

#: Label of the numbers in each map of a step; a map without a label, such as the trainer's, becomes part of the names.
_LABELS = {
    "queues": "queue",
    "busy": "role",
    "memory": "role",
    "canary": "engine",
    "rewards": "reward",
    "goodput": "category",
    "selection_bias": "measure",
    "evaluation_set": "set",
}
_CUMULATIVE = frozenset({"wall_seconds", "rl_seconds", "generated_tokens"})  # since the run began
_OF_A_STEP = frozenset({"trained_tokens", "masked_tokens", "trainer/bad_steps"})  # counted per step, summed here
_STRANGE = re.compile(r"\W", re.ASCII)
_PATIENCE_SECONDS = 5.0  # for a client that connects and sends nothing

Series = tuple[str, Labels]


class PrometheusPage:
    """Outlet: an HTTP server of one page, in a thread, from its creation to `close`. Counters cover the whole run,
    because each process reads the run from its beginning; so `had` is empty."""

    run = "prometheus"
    had: Mapping[str, int] = {}

    def __init__(self, about: About, host: str, port: int) -> None:
        """Start the server at `host` and `port`. Raises OSError if the address is not known or cannot be bound."""
        self._name, self._lock = about.name, threading.Lock()
        self._values: dict[Series, float] = {}
        self._server = _Server(self, host, port)
        threading.Thread(target=self._server.serve_forever, name="prometheus", daemon=True).start()

    def send(self, points: Sequence[MetricsPoint], first: int) -> None:
        with self._lock:
            for point in points:
                self._take(point)

    def table(self, step: int, rows: Sequence[SampledCompletion], points: int) -> None:
        """Do nothing: the page has only numbers."""

    def alarm(self, alarm: Alarm) -> None:
        with self._lock:
            self._values["stretto_alarm_first_step", (("alarm", alarm.title),)] = alarm.first_step

    def close(self, how: How) -> None:
        self._server.shutdown()
        self._server.server_close()

    def text(self) -> str:
        """Return the page in Prometheus' text format."""
        with self._lock:
            series = sorted(self._values.items())
        return page_of(_metrics(series, self._name))

    def _take(self, point: MetricsPoint) -> None:
        for name, value in {"step": point.step, **point.values}.items():
            if point.curve != "step" and name == "step":
                continue
            series = series_of(name)
            self._values[series] = value + (self._values.get(series, 0.0) if name in _OF_A_STEP else 0.0)


def series_of(name: str) -> Series:
    """Return the Prometheus name and labels of the number `name` of a `MetricsPoint`.

    >>> series_of("busy/engine-0")
    ('stretto_busy', (('role', 'engine-0'),))
    >>> series_of("goodput/trained/tokens")
    ('stretto_goodput_tokens', (('category', 'trained'),))
    >>> series_of("trainer/bad_steps")
    ('stretto_trainer_bad_steps_total', ())
    """
    section, *parts = name.split("/")
    labels = ((_LABELS[section], parts.pop(0)),) if section in _LABELS and parts else ()
    ending = "_total" if name in _CUMULATIVE | _OF_A_STEP else ""
    return _STRANGE.sub("_", "_".join(["stretto", section, *parts])) + ending, labels


def _metrics(series: Sequence[tuple[Series, float]], run: str) -> Iterator[Metric]:
    for name, group in groupby(series, key=lambda one: one[0][0]):
        samples = [("", (("run", run), *labels), value) for (_, labels), value in group]
        kind = "counter" if name.endswith("_total") else "gauge"
        yield Metric(name, kind, "docs/reference/metrics.md of stretto", samples)


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, page: PrometheusPage, host: str, port: int) -> None:
        self.address_family = getaddrinfo(host, port)[0][0]
        self.page = page
        super().__init__((host, port), _Request)


class _Request(BaseHTTPRequestHandler):
    timeout = _PATIENCE_SECONDS
    server: _Server

    def do_GET(self) -> None:
        if self.path.partition("?")[0] not in ("/metrics", "/"):
            self.send_error(HTTPStatus.NOT_FOUND)
            return
        body = self.server.page.text().encode()
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", CONTENT_TYPE)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing for a scrape."""
