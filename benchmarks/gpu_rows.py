"""Rows of the results page for what was measured on a GPU (`make gpu`)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import median
from typing import Any

from benchmarks.rows import Make, Row

_MODEL = "0.6B in bfloat16"
_PEERS = {
    "generate": "transformers `generate`",
    "generate_static": "transformers `generate`, static cache",
    "generate_compiled": "transformers `generate`, static cache, compiled",
    "generate_batch": "transformers `generate_batch`",
}


def _of_a_gpu(results: dict[str, Any]) -> list[Row]:
    """Rows of every part that has results."""
    done = {name: part for name, part in results.items() if "failed" not in part and "skipped" not in part}
    return [row for name, make in PARTS.items() if name in done for row in make(done)]


def lacking(results: Mapping[str, Any]) -> str:
    """What of the GPU's numbers is not there: parts that failed or were skipped, several GPUs, vLLM; empty if nothing
    is."""
    found = [f"{name} {kind}" for name, part in results.items() for kind in ("failed", "skipped") if kind in part]
    found += ["several GPUs are not measured"] if "2" not in results.get("ranks", {}) else []
    found += ["nor is vLLM beside"] if not isinstance(results.get("vllm", {}).get("vllm"), dict) else []
    return "; ".join(found)


def _decode(done: dict[str, Any]) -> list[Row]:
    part = done["decode"]
    rows = [row for row in part["rows"] if "skipped" not in row]
    found = [
        Row(
            f"tokens/s of the engine, {_MODEL}, {_sizes((row['sequences'], row['context']) for row in rows)}",
            _listed([row["engine_tokens_per_second"] for row in rows]),
            f"weights and cache read once at {part['copy_gb_per_second']:,.0f} GB/s",
            _shares([row["engine_of_floor"] for row in rows]),
        )
    ]
    return found + [
        Row(
            f"largest error of a log-probability, {check['tokens']} greedy tokens, {_MODEL}",
            f"{check['off_from_float32']:.3f}",
            f"transformers in bfloat16: {check['transformers_off_from_float32']:.3f}",
        )
        for check in part["exactness"]
    ]


def _beside(done: dict[str, Any]) -> list[Row]:
    part = done["beside"]
    ours = {row["sequences"]: row["stretto_tokens_per_second"] for row in part["rows"]}
    work = f"prompts of {part['prompt_tokens']}, answers of {part['answer_tokens']} tokens"
    found = []
    for name, peer in _PEERS.items():
        key, places = f"{name}_tokens_per_second", ("beside", "continuous", "compiled")
        told = [row for place in places if place in done for row in done[place]["rows"] if key in row]
        theirs = {row["sequences"]: row[key] for row in told if row["sequences"] in ours}
        if theirs:
            found.append(
                Row(
                    f"tokens/s, {_MODEL}, {work}, {', '.join(map(str, theirs))} sequences",
                    _listed(ours[count] for count in theirs),
                    f"{peer}: {_listed(theirs.values())}",
                    "× " + ", ".join(f"{ours[count] / rate:.1f}" for count, rate in theirs.items()),
                )
            )
    step = part["training"]
    rates = [step[f"{name}_tokens_per_second"] for name in ("stretto", "padded")]
    found.append(
        Row(
            f"trained tokens/s, {_MODEL}, {step['tokens']:,} tokens in {step['sequences']} sequences of one length",
            f"{rates[0]:,.0f}, {step['stretto_peak_gib']:.0f} GiB",
            f"the same step with rows of transformers: {rates[1]:,.0f}, {step['padded_peak_gib']:.0f} GiB",
            f"× {rates[0] / rates[1]:.1f}",
        )
    )
    return found


def _training(done: dict[str, Any]) -> list[Row]:
    part = done["training"]
    rows = [row for row in part["rows"] if "failed" not in row]
    sizes = _sizes((row["sequences"], row["tokens"] // row["sequences"]) for row in rows)
    return [
        Row(
            f"trained tokens/s, {_MODEL}, {sizes}",
            _listed([row["tokens_per_second"] for row in rows]),
            f"the peak of {part['peak_tflops']:,.0f} TFLOP/s",
            _shares([row["mfu"] for row in rows]),
        )
    ]


def _run(done: dict[str, Any]) -> list[Row]:
    part = done["run"]
    what = f"an asynchronous run of {_MODEL}, trainer and engine on one GPU"
    weights = part["weights"]
    moved = weights["bytes"] / 1e9
    return [
        Row(
            f"{what}: tokens/s generated; trained, while it trains",
            f"{part['generated_per_second']:,.0f}; {part['trained_per_second_of_training']:,.0f}",
            f"mean staleness {part['staleness_mean']:.1f}",
            f"MFU {part['mfu_of_training']:.1%}",
        ),
        Row(
            f"″ pause of the engine for new weights, {moved:.1f} GB",
            f"{weights['seconds_pause_median'] * 1e3:,.0f} ms",
            f"read beside the work in {weights['seconds_pull_median'] * 1e3:,.0f} ms",
        ),
    ]


def _learn(done: dict[str, Any]) -> list[Row]:
    part = done["learn"]
    (_, _, before), *_, (step, seconds, after) = part["accuracy"]
    what = "held-out accuracy of the task of `recipes/arithmetic.toml`, 27M in bfloat16, trainer and engine on one GPU"
    return [Row(what, f"{after:.3f} after {seconds:.0f} s of reinforcement, {step} steps", f"{before:.2f} before")]


def _kernels(done: dict[str, Any]) -> list[Row]:
    part = done["kernels"]
    found = [
        _milliseconds(f"reading the cache, {row['rows']} rows of {row['context']:,} tokens", row)
        for row in part["reading"]
    ]
    packed = part["packed"]
    if "flash_ms" in packed:
        told = {"fused_ms": packed["flash_ms"], "plain_ms": packed["bucketed_ms"]}
        found.append(_milliseconds(f"attention of {packed['tokens']:,} packed tokens with its gradient", told))
    return found


def _drawing(done: dict[str, Any]) -> list[Row]:
    part = done["drawing"]
    what = f"sampling from {part['vocabulary']:,} logits"
    return [
        _milliseconds(f"{what}, {row['rows']} rows{how}", row)
        for kind, how in (("plain", ""), ("filtered", ", top-k and top-p"), ("nucleus", ", top-p"))
        for row in part.get(kind, ())
    ]


def _milliseconds(what: str, row: Mapping[str, float]) -> Row:
    fused, plain = row["fused_ms"], row["plain_ms"]
    return Row(f"{what}: ms", f"{fused:.3f}", f"torch alone: {plain:.3f}", f"× {plain / fused:.1f}")


def _memory(done: dict[str, Any]) -> list[Row]:
    part = done["memory"]
    what = f"peak memory of a training step of {part['tokens']:,} tokens, {_MODEL}"
    estimate = f"the estimate of `--dry-run`: {part['estimated_gib']:.1f} GiB"
    return [Row(what, f"{part['peak_gib']:.1f} GiB", estimate, f"{part['peak_of_estimate']:.0%} of it")]


def _publication(done: dict[str, Any]) -> list[Row]:
    part = done["publication"]
    beside, alone = (median(part[key]) for key in ("step_beside", "step_alone"))
    told = f"{beside:.2f} s, the copy {median(part['copy']):.2f} s, the writing {median(part['write']):.2f} s"
    return [Row("a training step while a version is written", told, f"alone: {alone:.2f} s", f"× {alone / beside:.2f}")]


def _tests(done: dict[str, Any]) -> list[Row]:
    return [Row("tests that need a GPU", done["tests"]["told"].strip("= "))]


def _listed(rates: Sequence[float] | Any) -> str:
    return ", ".join(f"{rate:,.0f}" for rate in rates)


PARTS: Mapping[str, Callable[[dict[str, Any]], list[Row]]] = {
    "learn": _learn,
    "run": _run,
    "beside": _beside,
    "decode": _decode,
    "training": _training,
    "memory": _memory,
    "publication": _publication,
    "kernels": _kernels,
    "drawing": _drawing,
    "tests": _tests,
}

SECTION: dict[str, Make] = {"gpu": _of_a_gpu}


def _sizes(sizes: Iterable[tuple[int, int]]) -> str:
    """Sequences × tokens of each, as "1 × 512, 32 × 512 tokens"."""
    return ", ".join(f"{count:,} × {tokens:,}" for count, tokens in sizes) + " tokens"


def _shares(shares: Sequence[float]) -> str:
    """Shares in per cent, as "26, 56 %"."""
    return ", ".join(f"{100 * share:.0f}" for share in shares) + " %"
