"""The README's table of results, made from the committed JSON: `python -m benchmarks.summary` prints it.

`tests/test_docs.py` holds the README against it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from statistics import fmean, median
from typing import Any

from benchmarks.report import RESULTS


def _learns(results: dict[str, Any]) -> str:
    rows = results["rows"]
    starts = [row["initial_accuracy"] for row in rows]
    ends = [row["final_accuracy"] for row in rows]
    seconds = [row["rl_seconds"] for row in rows]
    return (
        f"| held-out accuracy of `recipes/arithmetic.toml`, {len(rows)} seeds "
        f"| {min(starts):.2f} – {max(starts):.2f} → {min(ends):.3f} – {max(ends):.3f}, "
        f"after {min(seconds):.0f} – {max(seconds):.0f} s of reinforcement |"
    )


def _async_sync(results: dict[str, Any]) -> str:
    ratios, kept = ([row[name] for row in results["rows"]] for name in ("ratio", "ratio_cache_kept"))
    summary = results["summary"]
    return (
        f"| asynchronous (η = 4, {summary['asynchronous']}) against synchronous ({summary['synchronous']}, "
        f"the fastest of four ways), {len(ratios)} seeds "
        f'| {median(ratios):.2f} times as fast ({min(ratios):.2f} – {max(ratios):.2f}); with `on_update = "keep"` '
        f"{median(kept):.2f} ({min(kept):.2f} – {max(kept):.2f}); accuracy at the end "
        f"{summary['asynchronous_accuracy']}, {summary['cache_kept_accuracy']} and {summary['synchronous_accuracy']} |"
    )


def _trl(results: dict[str, Any]) -> str:
    best = max(peer.get("trajectories_per_second", 0.0) for peer in results["trl"])
    ours = results["stretto"]["trained_per_second"]
    return (
        f"| trained trajectories per second beside trl's `GRPOTrainer`, the best of its four settings "
        f"| {ours:,.0f} and {best:,.0f}: {results['ratio_to_best']:.1f} times |"
    )


def _policies(results: dict[str, Any]) -> str:
    def middle(policy: str) -> str:
        seconds = results["summary"][policy]["seconds_to_target"]
        reached = sorted(second if second is not None else float("inf") for second in seconds)
        return f"`{policy}` {median(reached):.1f}"

    shown = ", ".join(middle(policy) for policy in results["summary"])
    return f"| seconds to {results['target']:.0%} held-out accuracy by `beyond_bound`, median | {shown} |"


_MISTAKES = {"false accept": "false accepts", "false reject": "false rejects", "undecided": "undecided"}


def _verifier(results: dict[str, Any]) -> str:
    def told(row: dict[str, Any]) -> str:
        seen = row["accuracy"]
        false = ", ".join(
            f"{seen[kind]} {name}" for kind, name in _MISTAKES.items() if seen[kind] or kind != "undecided"
        )
        return f"{row['verdicts_per_second']:,} a second, {false}"

    ours, plain = results["rows"]
    workers, cases = results["setting"]["workers"], ours["accuracy"]["cases"]
    return (
        f"| verdicts on mathematics by {workers} workers; {cases} public cases "
        f"| {told(ours)}; plain math-verify {told(plain)} |"
    )


def _sandbox(results: dict[str, Any]) -> str:
    shown = {(row["level"], row["how"]): row for row in results["rows"]}
    level = min(level for level, _ in shown if level != "none")
    taken = [f"{how} {shown[level, how]['median_ms']:.1f} ms" for how in ("warm", "cold")]
    late = [f"{shown[level, how]['p95_ms']:.1f}" for how in ("warm", "cold")]
    bare = shown["none", "plain subprocess"]["median_ms"]
    return (
        f"| a program in the sandbox, level {level}, median (95th percentile {' and '.join(late)} ms) "
        f"| {', '.join(taken)}; a plain subprocess {bare:.1f} ms |"
    )


def _programs(results: dict[str, Any]) -> str:
    rows = results["rows"]
    rates = [f"{row['initial_pass_rate']:.2f} → {row['final_pass_rate']:.2f}" for row in rows]
    seconds = " and ".join(f"{row['rl_seconds']:.0f}" for row in rows)
    count = f"{len(rows)} seeds" if len(rows) > 1 else "one seed"
    learnt = f"{', '.join(rates)}, after {seconds} s of reinforcement"
    return f"| held-out pass rate of `recipes/code.toml`, {count} | {learnt} |"


def _training(results: dict[str, Any]) -> str:
    gains = [row["gain"] for row in results["micro_batches"]]
    shares = ", ".join(f"{row['fraction']:.0%}" for row in results["ceiling"])
    kinds = ", ".join(f"{row['dtype']} on {row['threads']}" for row in results["ceiling"])
    ratios = results["ratios"]
    threads = sorted({row["threads"] for row in results["ways"]})
    by_length = {row["threads"]: row["ratio"] for row in results["ways"] if row["way"].endswith("by length")}

    def beside(kind: str) -> str:
        return " and ".join(f"{ratios[f'{kind}, {count} threads']:.1f}" for count in threads)

    counted = " and ".join(map(str, threads))
    return (
        f"| trained tokens per second on the lengths of a real run, {counted} threads: the packed step beside the best "
        f"one that pads as it comes, beside one that pads what it has sorted by length, and beside trl's "
        f"| {beside('padded')} times; {' and '.join(f'{by_length[count]:.1f}' for count in threads)} times; "
        f"{beside('trl')} times |\n"
        f"| dynamic micro-batches beside a fixed number, {len(gains)} settings "
        f"| {min(gains):+.0%} to {max(gains):+.0%}, {fmean(gains):+.0%} in the mean |\n"
        f"| a step of 48M, share of the machine's fastest product ({kinds} threads) | {shares} |"
    )


_PEERS = {
    "transformers generate": "transformers' `generate`",
    "transformers generate_batch": "its `generate_batch`",
    "vllm": "vLLM",
}


def _rates(results: list[dict[str, Any]]) -> str:
    """A row for each type: tokens per second of every system at as many sequences as all of them were asked for."""
    model, lines = results[0]["model"], []
    for dtype in dict.fromkeys(row["dtype"] for row in results):
        rates = {row["system"]: row["rates"] for row in results if row["dtype"] == dtype}
        ours = rates["stretto"]

        def told(system: str, ours: dict[str, float] = ours, rates: dict[str, dict[str, float]] = rates) -> str:
            there = rates.get(system, {})
            ratios = ", ".join(f"{ours[count] / there[count]:.1f}" for count in ours if count in there)
            return f"{_PEERS[system]} × {ratios}" if ratios else f"{_PEERS[system]} could not be run"

        own = ", ".join(f"{rate:,.0f}" for rate in ours.values())
        lines.append(
            f"| tokens per second of the engine alone, one thread, {model} in {dtype}, {', '.join(ours)} sequences "
            f"| {own}; beside {'; '.join(map(told, _PEERS))} |"
        )
    return "\n".join(lines)


def _tail(results: list[dict[str, Any]]) -> str:
    ratios = "; ".join(
        f"{row['model']}: {row['ratio']:.1f} times the useful tokens, {row['ratio_to_waiting']:.1f} times those of "
        f"batches that leave out what has ended"
        for row in results
    )
    return (
        f"| long-tailed answers (the longest {results[0]['longest']:,} tokens, the median {results[0]['median']:.0f}), "
        f"64 at a time, continuous beside static batches | {ratios} |"
    )


def _pause(results: list[dict[str, Any]]) -> str:
    def told(row: dict[str, Any]) -> str:
        kept = row["recompute_tokens_per_second"] / row["keep_tokens_per_second"]
        return (
            f"{row['model']}: {row['pause_ms']:.0f} ms, of which loading {row['load_ms']:.1f} (a copy in memory takes "
            f"{row['copy_ms']:.1f}); at an update a second `recompute` keeps {kept:.0%} of the pace of `keep`"
        )

    return f"| pause of 64 running answers by an update | {'; '.join(map(told, results))} |"


def _decode_step(results: dict[str, Any]) -> str:
    def told(row: dict[str, Any]) -> str:
        shares = ", ".join(f"{part} {share:.0%}" for part, share in row["share"].items())
        return f"{row['model']} {row['dtype']} {row['fraction']:.0%} ({shares})"

    return (
        f"| a decode step of {results['answers']} answers, share of the core's fastest product, and where the time goes"
        f" | {'; '.join(map(told, results['rows']))} |"
    )


def _soak(results: dict[str, Any]) -> str:
    memory = [sample["resident_mib"] for sample in results["samples"]]
    return (
        f"| an engine at full load for {results['minutes']:.0f} minutes, its cache always full: memory after a "
        f"quarter of the time and at the end | {memory[len(memory) // 4]:.0f} and {memory[-1]:.0f} MiB; "
        f"{results['answers']:,} answers, {results['lost_tokens']} tokens lost |"
    )


def _ledger(results: dict[str, Any]) -> str:
    cost, inside = results["summary"]["cost_of_the_file"], results["summary"]["share_inside"]
    ratios = sorted(pair["file"]["seconds"] / pair["memory"]["seconds"] - 1 for pair in results["pairs"])
    return (
        f"| seconds of a run with its ledger in a file beside one in memory, median of {len(ratios)} pairs "
        f"| {cost:+.1%} ({ratios[0]:+.1%} to {ratios[-1]:+.1%}); {inside:.1%} of the seconds pass inside of it |"
    )


def _goodput(results: dict[str, Any]) -> str:
    return (
        f"| goodput with a kill every {results['period']:.0f} s (conductor, everything, trainer, an engine, a reward "
        f"worker in turn), {len(results['pairs'])} kills | {results['goodput']:.0%} of the undisturbed steps |"
    )


def _resumes(results: dict[str, Any]) -> str:
    runs = results["runs"]
    equal, kept = sum(run["equal"] for run in runs), sum(run["laws_kept"] for run in runs)
    return (
        f"| runs that were killed behind one of their steps and went on: bit-equal to one that was not (synchronous), "
        f"or to their own replay (asynchronous) | {equal} of {len(runs)}; the checker finds every law kept in {kept} |"
    )


def _checkpoints(results: dict[str, Any]) -> str:
    shown = ", ".join(
        f"{name} ({one['mib']:.0f} MiB) {1000 * one['copy']:.0f} ms, "
        f"{one['copy'] / one['plain']:.2f} times a plain copy"
        for name, one in results["models"].items()
    )
    return f"| how long a checkpoint stops the update; it is written beside the training | {shown} |"


def _rounds(results: dict[str, Any]) -> str:
    best = results["best"]
    one, rounds, shared = (best[way]["rl_seconds"] for way in ("one group at a time", "rounds", "shared"))
    return (
        f"| seconds of {results['steps']} synchronous steps that can be repeated bit for bit "
        f"| {rounds:.2f}; one group at a time {one:.2f}, not repeatable {shared:.2f} |"
    )


ROWS: dict[str, Callable[[Any], str]] = {
    "loop-learns": _learns,
    "loop-async-sync": _async_sync,
    "loop-trl": _trl,
    "loop-policies": _policies,
    "verifier": _verifier,
    "sandbox": _sandbox,
    "programs": _programs,
    "training": _training,
    "generation-rates-3.4M": _rates,
    "generation-rates-48M": _rates,
    "decode-step": _decode_step,
    "generation-tail": _tail,
    "generation-pause": _pause,
    "soak": _soak,
    "ledger": _ledger,
    "goodput": _goodput,
    "resumes": _resumes,
    "checkpoints": _checkpoints,
    "rounds": _rounds,
}


def rows() -> list[str]:
    """One line of the table for each benchmark that has a committed result."""
    made = []
    for name, row in ROWS.items():
        path = RESULTS / f"{name}.json"
        if path.exists():
            made.append(row(json.loads(path.read_text())["results"]))
    return made


if __name__ == "__main__":
    print("\n".join(rows()))
