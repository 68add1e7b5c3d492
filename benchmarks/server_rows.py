"""Rows of the results page for runs and measurements with real servers of vLLM and SGLang."""

from __future__ import annotations

from statistics import median
from typing import Any

from benchmarks.rows import Make, Row


def _server_learns(results: dict[str, Any]) -> list[Row]:
    name, told, kills = MAKERS[results["kind"]], results["rescored"], results["kills"]
    start, end, steps = results["initial_accuracy"], results["final_accuracy"], results["steps"]
    broken, balance = len(results["laws_broken"]), results["balance"]
    longest, load = max((kill["seconds"] for kill in kills), default=0.0), results["load_average"]["mean"]
    rows = [
        Row(
            f"{name}: held-out accuracy after {steps} steps of the arithmetic recipe (heads of 32), its server killed "
            f"{len(kills)} times",
            f"{end:.3f}, in {results['rl_seconds']:,.0f} s at a load of {load:.1f}",
            f"before: {start:.3f}",
        ),
        Row(
            f"{name}: trajectories of that run, issued; failed; laws of the checker broken",
            f"{balance['issued']:,}; {balance['failed']}; {broken or 'none'}",
            f"next step at most {longest:.0f} s after a kill" if kills else "",
        ),
        Row(
            f"{name}: largest error of the log-probability of a token, {told['versions']} versions",
            f"{told['largest_error']:.1e} of {told['tokens']:,} tokens",
            "transformers in float64",
        ),
    ]
    return rows if "note" not in results else [*rows[:2], Row(f"{name}: that run is {results['note']}", "")]


def _dtypes(results: list[dict[str, Any]]) -> list[Row]:
    told = {(row["kind"], row["dtype"]): f"{row['error_mean']:.1e} ({row['error_largest']:.1e})" for row in results}
    what = "`behavior_logprob_error` in bfloat16, mean (largest)"
    return [
        Row(f"{name}: {what}", told[kind, "bfloat16"], f"float32: {told[kind, 'float32']}")
        for kind, name in MAKERS.items()
        if (kind, "bfloat16") in told
    ]


def _added(results: dict[str, Any]) -> list[Row]:
    found = []
    for row in results["rows"]:
        name, at = MAKERS[row["kind"]], f"{results['concurrent']} at a time"
        alone, engine = row["server_alone"], row["as_engine"]
        rates = [median(turn["rate"] for turn in turns) for turns in (engine, alone)]
        server = median(turn["server"] for turn in alone)
        ours = median(turn["adapter"] + turn["client"] for turn in engine)
        of_rates = f"{name}: tokens/s as an engine of stretto, {at}, {len(engine)} turns each at a load of"
        of_processors = f"{name}: µs of processors that stretto adds to a token, {at}"
        found += [
            Row(
                f"{of_rates} {row['load_average']:.1f}",
                f"{rates[0]:,.0f}",
                f"the server alone: {rates[1]:,.0f}",
                f"+{row['added']:.1%} time",
            ),
            Row(of_processors, f"{ours:.1f}", f"the server alone: {server:.0f}", f"+{ours / server:.1%}"),
        ]
    return found


MAKERS = {"native": "stretto", "vllm": "vLLM", "sglang": "SGLang"}

SECTION: dict[str, Make] = {
    "servers-learn-vllm": _server_learns,
    "servers-learn-sglang": _server_learns,
    "servers-dtypes": _dtypes,
    "external": _added,
}
