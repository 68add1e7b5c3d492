"""Rows of the results page: one function for each benchmark turns its results into lines."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any


@dataclass(frozen=True)
class Row:
    """A measurement, and the one that it is compared with."""

    what: str
    ours: str
    peer: str = ""
    ratio: str = ""

    def __str__(self) -> str:
        return f"| {self.what} | {self.ours} | {self.peer or '–'} | {self.ratio or '–'} |"


def span(values: Sequence[float], form: str) -> str:
    low, high = format(min(values), form), format(max(values), form)
    return low if low == high else f"{low} – {high}"


# ── the loop ────────────────────────────────────────────────────────────────────────────────────────


def _learns(results: dict[str, Any]) -> list[Row]:
    rows = results["rows"]
    starts, ends, seconds = ([row[key] for row in rows] for key in ("initial_accuracy", "final_accuracy", "rl_seconds"))
    what = f"held-out accuracy of `recipes/arithmetic.toml`, {len(rows)} seeds"
    after = f"{span(ends, '.3f')} after {span(seconds, '.0f')} s of reinforcement"
    return [Row(what, after, f"{span(starts, '.2f')} before")]


def _pretrained(results: dict[str, Any]) -> list[Row]:
    before, after = (
        span([one["avg"] for one in results[when]], ".2f") + f", {len(results[when])} evaluations"
        for when in ("before", "after")
    )
    minutes, worked = results["run_seconds"] / 60, results["processor_seconds"] / 60
    what = "held-out accuracy of SmolLM2-135M-Instruct, `recipes/smollm2.toml`, one run of one seed"
    return [Row(what, f"{after}, after {minutes:.0f} min, {worked:.0f} processor min", f"{before}, before")]


def _programs(results: dict[str, Any]) -> list[Row]:
    rows = results["rows"]
    starts, ends, seconds = (
        [row[key] for row in rows] for key in ("initial_pass_rate", "final_pass_rate", "rl_seconds")
    )
    after = f"{span(ends, '.2f')} after {span(seconds, '.0f')} s of reinforcement"
    return [
        Row(f"held-out pass rate of `recipes/code.toml`, {len(rows)} seeds", after, f"{span(starts, '.2f')} before")
    ]


def _demo(results: dict[str, Any]) -> list[Row]:
    seconds, accuracy = results["seconds"], results["final_accuracy"]
    return [
        Row(
            "`make demo` after its set-up, with an empty cache",
            f"{seconds:.0f} s; held-out {accuracy:.3f}",
            "goal: 240 s",
        ),
        Row(
            "of both cores' time in it: sampling and training of tokens that were trained on", f"{results['share']:.0%}"
        ),
    ]


def async_sync(results: dict[str, Any]) -> list[Row]:
    summary, steps = results["summary"], results["steps"]

    def row(how: str, runs: str, ratio: str, accuracy: str) -> Row:
        seconds = median(row[runs]["rl_seconds"] for row in results["rows"])
        synchronous = median(row["synchronous"]["rl_seconds"] for row in results["rows"])
        ratios = [row[ratio] for row in results["rows"]]
        return Row(
            f"{steps} asynchronous steps (η = 4), {how}, {len(ratios)} seeds; accuracy at the end",
            f"{seconds:.1f} s; {summary[accuracy]}",
            f"the fastest of four synchronous ways: {synchronous:.1f} s; {summary['synchronous_accuracy']}",
            f"× {median(ratios):.2f} ({span(ratios, '.2f')})",
        )

    return [
        row("caches recomputed", "asynchronous", "ratio", "asynchronous_accuracy"),
        row("caches kept", "cache_kept", "ratio_cache_kept", "cache_kept_accuracy"),
    ]


def trl(results: dict[str, Any]) -> list[Row]:
    best = max(peer.get("trajectories_per_second", 0.0) for peer in results["trl"])
    ours = results["stretto"]["trained_per_second"]
    peer = f"trl's `GRPOTrainer`, the best of {len(results['trl'])} settings: {best:,.0f}"
    settings = results.get("stretto_settings", ())  # older results have one
    mine = f"the best of {len(settings)} settings: {ours:,.0f}" if settings else f"{ours:,.0f}"
    return [Row("trained trajectories per second", mine, peer, f"× {results['ratio_to_best']:.1f}")]


def _policies(results: dict[str, Any]) -> list[Row]:
    def middle(policy: str) -> str:
        seconds = results["summary"][policy]["seconds_to_target"]
        reached = sorted(second if second is not None else float("inf") for second in seconds)
        return f"`{policy}` {median(reached):.1f}"

    shown = ", ".join(map(middle, results["summary"]))
    return [Row(f"seconds to {results['target']:.0%} held-out accuracy by `beyond_bound`, median", shown)]


def _rounds(results: dict[str, Any]) -> list[Row]:
    best = results["best"]
    one, rounds, shared = (best[way]["rl_seconds"] for way in ("one group at a time", "rounds", "shared"))
    what = f"{results['steps']} synchronous steps that repeat bit for bit"
    return [
        Row(what, f"{rounds:.2f} s", f"one group at a time: {one:.2f} s", f"× {one / rounds:.2f}"),
        Row(
            what,
            f"{rounds:.2f} s",
            f"a shared batch, which does not repeat: {shared:.2f} s",
            f"× {shared / rounds:.2f}",
        ),
    ]


def _decisions(results: dict[str, Any]) -> list[Row]:
    def rates(journal: str) -> str:
        return span([row["trajectories_per_second"] for row in results["rows"] if row["journal"] == journal], ",.0f")

    what = "trajectories per second that the conductor decides on, simulated engines"
    return [
        Row(f"{what}, journal in memory", rates("in memory"), f"goal: {results['goal']:,}"),
        Row(f"{what}, every state change in SQLite", rates("ledger"), f"goal: {results['goal']:,}"),
    ]


# ── generation ──────────────────────────────────────────────────────────────────────────────────────

PEERS = {
    "transformers generate": "transformers' `generate`",
    "transformers generate_batch": "transformers' `generate_batch`",
    "vllm": "vLLM",
    "openvino": "OpenVINO GenAI",
    "llamacpp": "llama.cpp",
}


def ratios_to(results: list[dict[str, Any]], dtype: str, system: str) -> dict[int, float]:
    """Rate of stretto divided by that of `system`, by the number of sequences."""
    rates = {row["system"]: row["rates"] for row in results if row["dtype"] == dtype}
    ours, theirs = rates["stretto"], rates.get(system, {})
    return {int(count): ours[count] / theirs[count] for count in ours if count in theirs}


def _rates(results: list[dict[str, Any]]) -> list[Row]:
    rows = []
    for ours in (row for row in results if row["system"] == "stretto"):
        model, dtype = ours["model"], ours["dtype"]
        for system, name in PEERS.items():
            ratios = ratios_to(results, dtype, system)
            what = f"tokens per second, {model} in {dtype}, one thread, {', '.join(map(str, ratios))} sequences"
            own = ", ".join(f"{ours['rates'][str(count)]:,.0f}" for count in ratios)
            rows += [Row(what, own, name, "× " + ", ".join(f"{one:.1f}" for one in ratios.values()))] if ratios else []
    return rows


def _tail(results: list[dict[str, Any]]) -> list[Row]:
    rows = []
    for row in results:
        tail = f"median {row['median']:.0f}, longest {row['longest']:,}"
        what = f"useful tokens per second, long-tailed completions ({tail}), {row['model']}"
        rates = row["tokens_per_second"]
        ours = f"{rates['continuous']:,.0f}"
        rows.append(Row(what, ours, f"static batches: {rates['static']:,.0f}", f"× {row['ratio']:.1f}"))
        left_out = f"batches that drop what has ended: {rates['waiting']:,.0f}"
        rows.append(Row(what, ours, left_out, f"× {row['ratio_to_waiting']:.1f}"))
    return rows


def _pause(results: list[dict[str, Any]]) -> list[Row]:
    rows = []
    for row in results:
        kept = row["recompute_tokens_per_second"] / row["keep_tokens_per_second"]
        load, copy = row["load_ms"], row["copy_ms"]
        loading = f"{load:.1f} ms"
        rows += [
            Row(
                f"loading new weights, {row['model']}",
                loading,
                f"a copy in memory: {copy:.1f} ms",
                f"× {copy / load:.2f}",
            ),
            Row(f"pause of 64 running completions, caches recomputed, {row['model']}", f"{row['pause_ms']:,.0f} ms"),
            Row(
                f"pace at an update a second, caches recomputed, {row['model']}",
                f"{row['recompute_tokens_per_second']:,.0f} tokens/s",
                f"caches kept: {row['keep_tokens_per_second']:,.0f} tokens/s",
                f"× {kept:.2f}",
            ),
        ]
    return rows


_PARTS = {"products": "matmuls"}
_LEAST_SHARE = 0.05


def _decode_step(results: dict[str, Any]) -> list[Row]:
    def shares(row: dict[str, Any]) -> str:
        named = ((_PARTS.get(part, part), share) for part, share in row["share"].items())
        return ", ".join(f"{part} {share:.0%}" for part, share in named if share >= _LEAST_SHARE)

    what = f"a decode step of {results['answers']} sequences"
    return [
        Row(
            f"{what}, {row['model']} in {row['dtype']}: {shares(row)}",
            f"{row['gflops']:.0f} GFLOP/s",
            f"the core's fastest matmul: {row['ceiling_gflops']:.0f} GFLOP/s",
            f"{row['fraction']:.0%} of it",
        )
        for row in results["rows"]
    ]


def _serving(results: dict[str, Any]) -> list[Row]:
    return [
        Row(
            f"tokens per second of the server, streams: {row['streams']}, {results['model']}",
            f"{row['tokens_per_second']:,.0f}",
            f"the engine alone: {row['engine_alone']:,.0f}",
            f"× {row['fraction']:.3f}",
        )
        for row in results["rows"]
    ]


# ── training ────────────────────────────────────────────────────────────────────────────────────────


def training(results: dict[str, Any]) -> list[Row]:
    packed = {row["threads"]: row["tokens_per_second"] for row in results["ways"] if row["way"] == "packed"}
    rows = [
        Row(
            f"trained tokens per second, lengths of a real run, threads: {row['threads']}",
            f"{packed[row['threads']]:,.0f}",
            f"{row['way']}: {row['tokens_per_second']:,.0f}",
            f"× {row['ratio']:.1f}",
        )
        for row in results["ways"]
        if row["way"] != "packed"
    ]
    gains = [row["gain"] for row in results["micro_batches"]]
    more = f"{fmean(gains):+.0%} tokens per second in the mean ({min(gains):+.0%} to {max(gains):+.0%})"
    rows.append(
        Row(
            f"dynamic micro-batches, {len(gains)} settings", more, "a fixed number of them", f"× {1 + fmean(gains):.2f}"
        )
    )
    return rows + _ceilings(results)


def _ceilings(results: dict[str, Any]) -> list[Row]:
    return [
        Row(
            f"a training step of 48M in {row['dtype']}, threads: {row['threads']}",
            f"{row['gflops']:.0f} GFLOP/s",
            f"the fastest matmul: {row['ceiling_gflops']:.0f}",
            f"{row['fraction']:.0%} of it",
        )
        for row in results["ceiling"]
    ]


def _real_ranks(results: dict[str, Any]) -> list[Row]:
    rows = results["rows"]
    peaks, counted = [max(row["peaks"]) / 2**20 for row in rows], [row["counted"] / 2**20 for row in rows]
    what = f"MiB of a rank, 22M parameters, {', '.join(str(row['ranks']) for row in rows)} ranks on gloo"
    ours, told = (", ".join(f"{size:.0f}" for size in sizes) for sizes in (peaks, counted))
    ratios = ", ".join(f"{a / b:.2f}" for a, b in zip(peaks, counted, strict=True))
    return [Row(what, ours, f"counted: {told}", ratios)]


def _checkpoints(results: dict[str, Any]) -> list[Row]:
    return [
        Row(
            f"stop of the update for a checkpoint, {name} ({one['mib']:.0f} MiB)",
            f"{1000 * one['copy']:.0f} ms",
            f"a plain copy: {1000 * one['plain']:.0f} ms",
            f"× {one['plain'] / one['copy']:.2f}",
        )
        for name, one in results["models"].items()
    ]


# ── weights ─────────────────────────────────────────────────────────────────────────────────────────


def _weights(results: dict[str, Any]) -> list[Row]:
    rows = []
    rays = {row["bytes"]: row for row in (results["ray"] or {"rows": []})["rows"]}
    for one in results["models"]:
        size, rates = one["bytes"], one["bytes_per_second"]
        name = f"{one['model']} in bfloat16 ({size / 1e6:.0f} MB)"
        beside = [f"a plain copy: {rates['copy'] / 1e6:,.0f}"]
        if size in rays:
            beside.append(f"Ray's get: {size / rays[size]['get'] / 1e6:,.0f}")
        beside.append(f"its delta ({one['moved']:.0%}): {rates['delta'] / 1e6:,.0f}")
        full = f"{rates['full'] / 1e6:,.0f} MB/s"
        ratio = f"× {rates['full'] / rates['copy']:.2f}"
        stops = {stop["engines"]: stop for stop in one["pauses"] if stop["form"] == "full"}
        pauses = [f"{1000 * stop['pause']:.0f} ms with {count}" for count, stop in stops.items()]
        verify = f"checksums before it: {1000 * stops[1]['verify']:.0f} ms"
        rows += [
            Row(f"version pulled over the loopback, {name}", full, "; ".join(beside), ratio),
            Row(f"stop of engines for it, {one['model']}", ", ".join(pauses), verify),
        ]
    return rows


# ── rewards ─────────────────────────────────────────────────────────────────────────────────────────


def verifier(results: dict[str, Any]) -> list[Row]:
    ours, plain = results["rows"]
    workers, cases = results["setting"]["workers"], ours["accuracy"]["cases"]

    def mistakes(row: dict[str, Any]) -> str:
        seen = row["accuracy"]
        return f"{seen['false accept']} and {seen['false reject']}"

    rate, other = ours["verdicts_per_second"], plain["verdicts_per_second"]
    return [
        Row(
            f"verdicts per second on mathematics, {workers} workers",
            f"{rate:,}",
            f"plain math-verify: {other:,}",
            f"× {rate / other:.1f}",
        ),
        Row(
            f"false accepts and false rejects on {cases} public cases",
            f"{mistakes(ours)}, {ours['accuracy']['undecided']} undecided",
            f"plain math-verify: {mistakes(plain)}",
        ),
    ]


def _sandbox(results: dict[str, Any]) -> list[Row]:
    plain = next(row for row in results["rows"] if row["level"] == "none")
    first, *others = (row for row in results["rows"] if row is not plain)

    def row_of(row: dict[str, Any], prefix: str, beside: str) -> Row:
        return Row(
            f"{prefix}level {row['level']}, {row['how']}",
            f"{row['median_ms']:.1f} ms ({row['p95_ms']:.1f})",
            f"{beside}{plain['median_ms']:.1f} ms ({plain['p95_ms']:.1f})",
            f"× {plain['median_ms'] / row['median_ms']:.2f}",
        )

    whole = row_of(first, "a program in the sandbox, median (95th percentile): ", "a plain subprocess: ")
    return [whole, *(row_of(row, "″ ", "″ ") for row in others)]


# ── faults ──────────────────────────────────────────────────────────────────────────────────────────


def _goodput(results: dict[str, Any]) -> list[Row]:
    what = f"steps with a kill every {results['period']:.0f} s (each role in turn), {len(results['pairs'])} kills"
    done, undisturbed = (sum(pair[key] for pair in results["pairs"]) for key in ("disturbed", "undisturbed"))
    return [Row(what, f"{done:,}", f"undisturbed: {undisturbed:,}", f"× {results['goodput']:.2f}")]


def _resumes(results: dict[str, Any]) -> list[Row]:
    runs = results["runs"]
    equal, kept = sum(run["equal"] for run in runs), sum(run["laws_kept"] for run in runs)
    return [
        Row(
            "runs killed after one of their steps and resumed: bit-equal at the end; every law of the checker kept",
            f"{equal} of {len(runs)}; {kept} of {len(runs)}",
            "undisturbed run (synchronous), own replay (asynchronous)",
        )
    ]


def _conductor(results: dict[str, Any]) -> list[Row]:
    """At once, with the most engines, for each length."""
    at_once = [row for row in results["rows"] if not row["setting"]["seconds"]]
    most = max(row["setting"]["engines"] for row in at_once)

    def made(row: dict[str, Any]) -> Row:
        rates, tokens = row["training"], row["setting"]["tokens"]
        what = f"one conductor, {most} engines, {tokens:,} tokens: trajectories/s, and tokens per CPU second"
        told = f"{rates['trajectories_per_second']:,.0f}; {rates['tokens_per_cpu_second'] / 1e6:.1f}M"
        return Row(what, told, f"goal: {results['goal']:,}; 15M for 1,024 tokens")

    return [made(row) for row in at_once if row["setting"]["engines"] == most]


_JOINED = {
    "agent": "a machine that joins with an engine",
    "rank": "a killed rank, its trainer's included",
}


def _restarts(results: dict[str, Any]) -> list[Row]:
    """Costs as the code was measured last; beside them the first ones of this machine, if there are earlier ones."""
    sides = list(results.values())
    (first, last), roles = (sides[0], sides[-1]), sides[-1]["roles"]
    whole, load = last["resume"], f"at load {last['load']:.0f}"
    before = "" if last is first else f"before: {first['resume']['cpu']:.1f}, at load {first['load']:.0f}"
    ratio = f"× {first['resume']['cpu'] / whole['cpu']:.1f}" if before else ""
    own = ("trainer", "engine", "rewards")
    replaced = ", ".join(f"{roles[name]['cpu']:.2f}" for name in own)
    return [
        Row(
            f"CPU seconds of a resume to its next step, median of {whole['times']}",
            f"{whole['cpu']:.1f}, at most {whole['most_cpu']:.1f}, {load}",
            before,
            ratio,
        ),
        Row(f"″ of a killed {', '.join(own)} to the second step after", replaced),
        *(Row(f"″ of {what}", f"{roles[name]['cpu']:.1f}") for name, what in _JOINED.items() if name in roles),
    ]


def _ledger(results: dict[str, Any]) -> list[Row]:
    cost, inside = results["summary"]["cost_of_the_file"], results["summary"]["share_inside"]
    ratios = sorted(pair["file"]["seconds"] / pair["memory"]["seconds"] - 1 for pair in results["pairs"])
    told = f"{cost:+.1%} ({ratios[0]:+.1%} to {ratios[-1]:+.1%}); {inside:.1%} of the time is spent in it"
    return [
        Row(f"time of a run with its ledger in a file, median of {len(ratios)} pairs", told, "the ledger in memory")
    ]


Make = Callable[[Any], list[Row]]
SECTIONS: dict[str, dict[str, Make]] = {
    "The loop": {
        "loop-learns": _learns,
        "loop-demo": _demo,
        "programs": _programs,
        "smollm2": _pretrained,
        "loop-async-sync": async_sync,
        "loop-trl": trl,
        "loop-policies": _policies,
        "rounds": _rounds,
        "decisions": _decisions,
    },
    "Generation": {
        "generation-rates-3.4M": _rates,
        "generation-rates-48M": _rates,
        "generation-tail": _tail,
        "generation-pause": _pause,
        "decode-step": _decode_step,
        "serving": _serving,
    },
    "Training": {
        "training": training,
        "training-ceiling": _ceilings,
        "checkpoints": _checkpoints,
        "real-ranks": _real_ranks,
    },
    "Weights": {"weights": _weights},
    "Rewards": {"verifier": verifier, "sandbox": _sandbox},
    "The conductor": {"conductor": _conductor},
    "Faults": {"goodput": _goodput, "resumes": _resumes, "restarts": _restarts, "ledger": _ledger},
}
