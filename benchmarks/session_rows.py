"""Rows of the results page for workflows, for the gateway of agents, and for Tinker's SDK."""

from __future__ import annotations

from typing import Any

from benchmarks.rows import Make, Row


def _learns_in_turns(results: dict[str, Any]) -> list[Row]:
    first, last = results["evaluations"][0], results["evaluations"][-1]
    what = f"held-out accuracy of `recipes/{results['recipe']}`, {results['steps']} steps, one run"
    low, high = last["ci95"]
    after = f"{last['accuracy']:.3f} [{low:.3f}, {high:.3f}] after {results['rl_seconds']:.0f} s of reinforcement"
    return [
        Row(what, after, f"{first['accuracy']:.3f} before"),
        Row(
            "of those, right at the first try",
            f"{last['rewards']['first']:.3f}",
            f"{first['rewards']['first']:.3f} before",
        ),
    ]


def _learns_its_tool(results: dict[str, Any]) -> list[Row]:
    what = f"an agent with a calculator, `recipes/calculator_agent.toml`, {results['steps']} steps, one run: held out"
    after = f"{results['final_accuracy']:.3f}; {results['seconds'] / 60:.0f} min in all"
    own = f"with the tool {results['with_tool']:.3f}, without it {results['without_tool']:.3f}"
    return [
        Row(what, after, f"{results['initial_accuracy']:.3f} before"),
        Row("other questions to that agent, afterwards", own),
    ]


def _gateway(results: dict[str, Any]) -> list[Row]:
    row = next(row for row in results["rows"] if row["model"] == "instant" and row["sessions"] == 256)
    what = f"the gateway: processor time of a call, {row['sessions']} sessions at once, {results['turns']} turns each"
    return [Row(what, f"{row['cpu_ms']:.1f} ms", "the engine not counted")]


def _tinker(results: dict[str, Any]) -> list[Row]:
    calls, rates = results["calls"], results["steps a second"]
    (_, alone), (clients, together) = rates.items()
    step = "a step of forward_backward and optim_step, {sequences} sequences of {tokens} tokens".format_map(results)
    busy = f", at a load of {results['load']:.0f}" if results.get("load", 0) >= 1 else ""
    rows = [
        Row(
            f"{step}, {results['model']}{busy}: {unit}",
            f"{found['served'] * 1e3:.0f} ms",
            f"the same loop in Python: {found['in Python'] * 1e3:.0f} ms",
            f"{found['overhead']:+.1%}",
        )
        for unit in ("seconds", "CPU seconds")
        for found in [results[f"{unit} of a step"]]
    ]
    return [
        *rows,
        Row(f"such steps a second, {clients} at once", f"{together:.2f}", f"1 client: {alone:.2f}"),
        Row(
            "small calls a second, one after the other: forward of 16 tokens; heartbeat",
            f"{calls['forward']:.0f}; {calls['heartbeat']:.0f}",
        ),
    ]


TINKER: dict[str, Make] = {"tinker": _tinker}
SECTION: dict[str, Make] = {"workflows": _learns_in_turns, "calculator": _learns_its_tool, "gateway": _gateway}
