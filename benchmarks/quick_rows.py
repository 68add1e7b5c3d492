"""Rows of the results page: the course of the ratios of `make bench-quick`, and costs of commands that end at once.

A course is a list of points, the oldest first. A point names the version of stretto, the commit and the day, and has
the ratios that were measured then, each as the list of its runs.
"""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median
from typing import Any

from benchmarks.rows import Make, Row

Ratios = list[float]

#: Those of the ten goals, in the order of the goals.
RATIOS = {
    "demo": "a short demo with an empty cache, of 10¹² FLOPs of the fastest product",
    "help": "`stretto --help`, of an empty interpreter",
    "wrong-key": "`stretto train` with a wrong key, of an empty interpreter",
    "engine-3.4M": "engine, 64 sequences, 3.4M float32, of transformers' `generate`",
    "engine-48M": "engine, 64 sequences, 48M float32, of transformers' `generate`",
    "asynchronous": "asynchronous steps, of synchronous ones",
    "trajectories": "trained trajectories per second, of a loop of `generate` and padded steps",
    "network-135M": "a version of 135M bfloat16 over the network, of a plain copy",
    "conductor-tokens": "tokens per CPU second of one conductor, per JSON text",
    "server": "server under 64 streams, of the engine alone",
    "train-48M-bfloat16": "training step, 48M bfloat16, of the fastest product",
    "resume": "a resume to its next step, of an empty interpreter",
    "replaced": "trainer, engine, rewards replaced, of an empty interpreter",
}
#: On record, and not measured any more.
_EARLIER = {
    "decode-3.4M-float32": "decode step, 3.4M float32, of the fastest product",
    "decode-48M-float32": "decode step, 48M float32, of the fastest product",
    "train-3.4M-float32": "training step, 3.4M float32, of the fastest product",
    "publish": "publication of 48M bfloat16, of a plain copy",
    "network": "the same over the network, of a plain copy",
    "conductor": "trajectories decided and on record per JSON text",
    "mistake": "`stretto train nosuch.toml`, of an empty interpreter",
    "sandbox": "a sandboxed program, warm, of a plain subprocess",
}
_ENOUGH, _FIRST_LINE = 0.5, 1.0  # CPU seconds for a command that ends at once, and until the first line of a run


def last_points(course: list[dict[str, Any]]) -> dict[str, Ratios]:
    """The newest runs of each ratio."""
    return {name: runs for point in course for name, runs in point["ratios"].items()}


def _course(results: dict[str, Any]) -> Iterator[Row]:
    for name, what in (RATIOS | _EARLIER).items():
        points = [point for point in results["course"] if name in point["ratios"]]
        if points:
            *before, now = [median(point["ratios"][name]) for point in points]
            path = [f"{_named(point)}: {ratio:.3g}" for point, ratio in zip(points, before, strict=False)]
            yield Row(what, f"{now:.3g}, {_named(points[-1])}", " → ".join(path), _change(before, now))


def _named(point: dict[str, Any]) -> str:
    return f"{point['version']} ({point['commit']}, {point['measured']})"


def _change(before: list[float], now: float) -> str:
    return f"× {now / before[-1]:.2f}" if before else ""


def _commands(results: dict[str, Any]) -> Iterator[Row]:
    *_, newest = results.values()
    what, told = "CPU seconds, median and most", ""
    for command, row in newest["commands"].items():
        goal = f"goal: {_FIRST_LINE if command.startswith('train, to') else _ENOUGH:g}"
        peer, told = "″" if goal == told else goal, goal
        yield Row(f"{what}: `stretto {command}`", f"{row['cpu']:.2f}, {row['most']:.2f}", peer)
        what = "″"


COURSE: dict[str, Make] = {"quick": lambda results: list(_course(results))}
COMMANDS: dict[str, Make] = {"commands": lambda results: list(_commands(results))}
