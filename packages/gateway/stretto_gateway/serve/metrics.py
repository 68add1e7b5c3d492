"""Counters of a server and its engine as Prometheus metrics."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import msgspec

from stretto.core.engine import EngineHealth
from stretto.processes.http.prometheus import Metric, page_of

_GAUGES = frozenset({"version", "running", "waiting", "unfinished", "needed", "resident"})
_MEANING = {
    "version": "policy version of the weights in the model",
    "running": "completions in a slot",
    "waiting": "completions that wait for a slot",
    "generated": "tokens sampled",
    "prefilled": "prompt tokens computed, once for all completions to a prompt",
    "recomputed": "tokens computed again after an update of the weights or a preemption",
    "interrupted": "completions stopped in mid-sentence by an update",
    "preempted": "completions that lost their KV entries because the cache was full",
    "unfinished": "tokens sampled for requests that are open",
    "needed": "rows or KV cache for all open completions, over what there is, the larger share",
    "wasted": "tokens sampled for completions that were aborted",
    "updates": "versions loaded",
    "checked": "bytes of versions read",
    "resident": "bytes of memory",
    "busy_seconds": "time spent in steps and in loading",
}


class Counters:
    """Counters of a server's requests and tokens, and sums of their latencies."""

    def __init__(self) -> None:
        self._requests: Counter[tuple[str, int]] = Counter()
        self._tokens: Counter[str] = Counter()
        self._seconds: dict[str, tuple[int, float]] = {"first_token": (0, 0.0), "last_token": (0, 0.0)}

    def replied(self, path: str, status: int) -> None:
        """Count a reply that begins, by path and HTTP status."""
        self._requests[path, status] += 1

    def completed(self, prompt: int, sampled: int, first_token: float | None, last_token: float) -> None:
        """Count the tokens and the latency of a request whose completions have ended.

        Args:
            prompt, sampled: numbers of tokens.
            first_token: seconds from the request to its first token; None if the reply was not streamed.
            last_token: seconds from the request to its last token.
        """
        self._tokens.update(prompt=prompt, completion=sampled)
        for name, seconds in (("first_token", first_token), ("last_token", last_token)):
            if seconds is not None:
                count, total = self._seconds[name]
                self._seconds[name] = count + 1, total + seconds

    def text(self, health: EngineHealth | None) -> str:
        """Page with the server's and the engine's metrics, for Prometheus to scrape. `health`: None while the engine
        does not reply."""
        up = Metric("stretto_engine_up", "gauge", "whether the engine replies", [("", (), int(health is not None))])
        return page_of([up, *(_engine(health) if health is not None else ()), *self._server()])

    def _server(self) -> Iterator[Metric]:
        replies = [
            ("", (("path", path), ("status", str(status))), count)
            for (path, status), count in sorted(self._requests.items())
        ]
        yield Metric("stretto_http_requests_total", "counter", "replies by path and status", replies)
        for name, meaning in (("prompt", "prompt tokens"), ("completion", "sampled tokens")):
            meaning = f"{meaning} of completed requests"
            yield Metric(f"stretto_{name}_tokens_total", "counter", meaning, [("", (), self._tokens[name])])
        for name, (count, total) in self._seconds.items():
            meaning = f"seconds from a request to its {name.replace('_', ' ')}"
            yield Metric(f"stretto_{name}_seconds", "summary", meaning, [("_sum", (), total), ("_count", (), count)])


def _engine(health: EngineHealth) -> Iterator[Metric]:
    for field, value in msgspec.structs.asdict(health).items():
        kind, ending = ("gauge", "") if field in _GAUGES else ("counter", "_total")
        yield Metric(f"stretto_engine_{field}{ending}", kind, _MEANING[field], [("", (), value)])
