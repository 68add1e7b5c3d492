"""Rows of the tables of results about `stretto watch`."""

from __future__ import annotations

from typing import Any

from benchmarks.rows import Make, Row


def _large(results: dict[str, Any]) -> list[Row]:
    sizes, slowest = results["sizes"], max(results["tables"].values())
    of = f"a run of {sizes['trajectories']:,} trajectories, {sizes['steps']:,} steps, {sizes['spans']:,} spans"
    memory = f"{results['memory_mib_reading']:.0f} MiB while reading, {results['memory_mib']:.0f} MiB after"
    return [
        Row(f"{of}: opened for the first time", f"{results['opening_first']:.2f} s", "goal: 1 s"),
        Row(f"{of}: opened by another server", f"{results['opening_again']:.2f} s", "goal: 1 s"),
        Row(f"{of}: the slowest page of the table", f"{1000 * slowest:.0f} ms", "goal: 200 ms"),
        Row(f"{of}: memory of the server", memory, "goal: 500 MiB"),
    ]


def _frames(results: dict[str, Any]) -> list[Row]:
    moving = results["moving"]
    what = (
        f"a frame while the timeline of {results['spans']:,} spans zooms and moves, {moving['frames']} frames: median, "
        f"95%, longest"
    )
    ours = f"{moving['median']:.1f}, {moving['p95']:.1f}, {moving['longest']:.0f} ms; {moving['late']:.1%} are late"
    return [Row(what, ours, "60 a second: 16.7 ms")]


def _live(results: dict[str, Any]) -> list[Row]:
    rate, used = results["rate_ratio"], results["processor_seconds_per_token_ratio"]
    run, server, browser = (results[f"{name}_processor"] for name in ("run", "server", "browser"))
    beside = f"{results['pairs']} pairs of {results['window_seconds']:g} s of one run of `recipes/arithmetic.toml`"

    def told(ratio: dict[str, float]) -> str:
        return f"× {ratio['median']:.3f} ({ratio['low']:.3f} – {ratio['high']:.3f})"

    what = "processor seconds of a second in which the page of a running run is open"
    ours = f"server {server:.4f}, headless browser {browser:.4f}"
    return [
        Row(what, ours, f"the run: {run:.2f}"),
        Row("tokens per second of that run, median of pairs and its 95% interval", told(rate), f"without, {beside}"),
        Row("processor seconds of its processes for each token", told(used), f"without, {beside}"),
    ]


SECTION: dict[str, Make] = {"watch": _large, "watch-frames": _frames, "watch-live": _live}
