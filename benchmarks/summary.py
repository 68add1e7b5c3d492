"""Tables of results, made from the committed JSON files.

    python -m benchmarks.summary > docs/reference/results.md     whole page
    python -m benchmarks.summary readme                rows for the README

`tests/test_docs.py` checks that both pages show exactly this output.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterable, Iterator
from typing import Any

from benchmarks import report
from benchmarks.dashboard_rows import SECTION as OF_DASHBOARD
from benchmarks.gpu_rows import SECTION as OF_GPU
from benchmarks.gpu_rows import lacking
from benchmarks.planner_rows import SECTION as OF_PLANNER
from benchmarks.quick_rows import COMMANDS, COURSE
from benchmarks.rows import PEERS, Row, async_sync, ratios_to, span, training, trl, verifier
from benchmarks.rows import SECTIONS as OF_STRETTO
from benchmarks.server_rows import SECTION as OF_SERVERS
from benchmarks.session_rows import SECTION as OF_SESSIONS
from benchmarks.session_rows import TINKER as OF_TINKER
from benchmarks.tally import read

_SHOWN = ("1", "16", "64")  # sequences of the README's rows of generation
_FAULTS = "../explanation/faults.md"
SECTIONS = {
    "On a GPU (`make gpu`)": OF_GPU,
    **OF_STRETTO,
    "Workflows and agents": OF_SESSIONS,
    "stretto tinker": OF_TINKER,
    "vLLM and SGLang": OF_SERVERS,
    "stretto watch": OF_DASHBOARD,
    "stretto plan": OF_PLANNER,
    "What a command costs": COMMANDS,
    "The course of the goals' ratios (`make bench-quick`)": COURSE,
}

_HEAD = """# Results

Every number comes from a committed file of `benchmarks/results`, which names machine and library versions; `python -m
benchmarks.summary` makes this page: of each benchmark the newest by processors of each maker. A ratio above 1.0:
stretto is faster or cheaper. Attempts are in `docs/log.md`, the cost of each `beyond_bound` policy in
[staleness](../explanation/staleness.md), the server under load in [gateway](../how_to/gateway.md#metrics).

Held-out accuracy is over 512 questions at temperature 1. Seconds of reinforcement leave out warm start and evaluations
around it.
"""


def measured(name: str) -> dict[str, Any]:
    """Results of a benchmark on each processor on which it was measured; the latest first."""
    files = [report.RESULTS / f"{name}.json", *sorted(report.RESULTS.glob(f"{name}.*.json"))]
    contents = [json.loads(file.read_text(encoding="utf-8")) for file in files if file.exists()]
    return {_machine(content["machine"]): content["results"] for content in contents}


def _shown(name: str) -> dict[str, Any]:
    """Of `measured` the newest by processors of each maker, AMD and Intel, each that has a GPU, and of a course each
    processor."""
    found: dict[str, tuple[str, Any]] = {}
    if name in COURSE:
        return measured(name)
    for where, results in measured(name).items():
        found.setdefault(where.split()[0] if where.endswith("no GPU") else where, (where, results))
    return dict(found.values())


def _machine(machine: dict[str, Any]) -> str:
    """The words of a heading. Beside a GPU its machine does not matter as much."""
    if gpus := [str(gpu).partition(",")[0] for gpu in machine["accelerators"]]:
        return f"{', '.join(gpus)}, {machine['cores']} cores"
    return f"{machine['processor']}, {machine['cores']} cores, {machine['memory_gib']} GiB, no GPU"


# ── missed goals ────────────────────────────────────────────────────────────────────────────────────


def _latest(name: str) -> Any:
    return next(iter(measured(name).values()))


def _beside(model: str, system: str, least: int, goal: float) -> tuple[bool, str]:
    """Whether the ratios from `least` sequences on reach the goal, and these for both dtypes, on the processor where
    the system was measured last."""
    rates, told, worst = _rates_with(model, system), [], math.inf
    for dtype in dict.fromkeys(row["dtype"] for row in rates):
        ratios = [one for count, one in ratios_to(rates, dtype, system).items() if count >= least]
        told.append(f"{span(ratios, '.1f')} in {dtype}")
        worst = min(worst, *ratios)
    return worst >= goal, ", ".join(told)


def _rates_with(model: str, system: str) -> list[dict[str, Any]]:
    """Rates of generation on the processor where the system was measured last."""
    everywhere = measured(f"generation-rates-{model}").values()
    return next(rates for rates in everywhere if any(row["system"] == system for row in rates))


def unfinished() -> dict[str, str]:
    """Campaigns in parts that have not reached their goal."""
    kills, schedules = (read(report.RESULTS / f"{name}.json", name).total for name in ("kills", "schedules"))
    random, played = kills["faults"] - kills.get("in turn", 0), schedules["schedules"]
    found = {}
    if random < 1000:
        told = f"{random}, beside 308 kills and stops on one commit"
        found["a campaign of 1,000 random kills"] = f"{told}: [faults]({_FAULTS}#campaigns-on-real-runs)"
    if played < 100_000:
        found["100,000 simulated schedules"] = f"{played:,}: [faults]({_FAULTS}#schedules)"
    return found


def in_parts() -> list[str]:
    """The text of docs/explanation/faults.md about campaigns in parts."""
    kills, schedules = (read(report.RESULTS / f"{name}.json", name) for name in ("kills", "schedules"))
    in_turn = kills.total.get("in turn", 0)
    return [
        f"so far {kills.total['faults'] - in_turn:,} random faults, and {in_turn:,} that came in turn, "
        f"{kills.problems or 'no'} problems",
        f"{schedules.total['schedules']:,} have been played, with {schedules.total['kills']:,} kills of the conductor "
        f"and {schedules.problems or 'no'} problems",
    ]


def missed() -> list[str]:
    """One line for each goal that was set and not reached."""
    told = {goal: reached for goal, (met, reached) in _goals().items() if not met}
    elsewhere = {"each ratio on Intel, too": "of Intel there are the rows above"}
    return [f"| {goal} | {reached} |" for goal, reached in (told | unfinished() | elsewhere | _on_a_gpu()).items()]


def _goals() -> dict[str, tuple[bool, str]]:
    """Whether each goal is met, and what was reached."""
    loop, beside_trl = _latest("loop-async-sync")["summary"], _latest("loop-trl")["ratio_to_best"]
    by_length = [row["ratio"] for row in _latest("training")["ways"] if row["way"].endswith("by length")]
    cold = next(row for row in _latest("sandbox")["rows"] if (row["level"], row["how"]) == ("A", "cold"))
    learns, live = _latest("servers-learn-sglang"), _latest("watch-live")
    sglang, share = learns["rescored"], live["server_processor"] / live["run_processor"]
    planned = _latest("predictions")["summary"]
    spent = _latest("loop-demo")["share"]
    asynchronous, kept = loop["ratio_median"], loop["ratio_cache_kept_median"]
    return {
        "asynchronous 2.0 times as fast as synchronous, caches recomputed": (asynchronous >= 2, f"{asynchronous:.2f}"),
        "asynchronous 2.5 times as fast, caches kept": (kept >= 2.5, f"{kept:.2f}"),
        "8 times trl's trained trajectories": (beside_trl >= 8, f"{beside_trl:.1f}"),
        "90 % of both cores' time in tokens that are trained on": (
            spent >= 0.9,
            f"{spent:.0%} of a whole demo",
        ),
        "4 times transformers' `generate`, 3.4M, 64 sequences and more": _beside(
            "3.4M", "transformers generate", 64, 4
        ),
        "2 times vLLM, 3.4M, 64 sequences and more": _beside("3.4M", "vllm", 64, 2),
        "1.5 times vLLM, 48M, 16 sequences and more": _beside("48M", "vllm", 16, 1.5),
        "no slower than vLLM, 48M": _beside("48M", "vllm", 1, 1),
        "packed training 3 times rows that are padded and sorted by length": (
            min(by_length) >= 3,
            span(by_length, ".1f"),
        ),
        f"a cold sandbox within {cold['goal_ms']:.0f} ms at the 95th percentile": (
            cold["p95_ms"] <= cold["goal_ms"],
            f"{cold['p95_ms']:.1f} ms",
        ),
        f"every token of a run with SGLang within {sglang['tolerance']:g} of its version's weights": (
            sglang["beyond_tolerance"] == 0,
            f"{sglang['beyond_tolerance']} of {sglang['tokens']:,} beyond it, {sglang['largest_error']:.2g} at most",
        ),
        "the server of a watched run takes under 1% of the run's processor seconds": (share < 0.01, f"{share:.1%}"),
        "predictions on this machine: mean staleness within 0.3 versions": (
            planned["staleness_worst"] <= 0.3,
            f"{planned['staleness_worst']:.1f} at worst; {planned['staleness_median']:.2f} in the median",
        ),
    }


def _on_a_gpu() -> dict[str, str]:
    goal, found = "every number on a GPU", measured("gpu")
    if not found:
        return {goal: "nothing has been measured on a GPU; `make gpu` measures it"}
    told = lacking(next(iter(found.values())))
    return {goal: told} if told else {}


# ── the pages ───────────────────────────────────────────────────────────────────────────────────────


def page() -> str:
    """The text of docs/reference/results.md."""
    machines = dict.fromkeys(where for makes in SECTIONS.values() for name in makes for where in _shown(name))
    parts = [_HEAD, *(part for where in machines for part in _on(where))]
    parts += ["## Missed goals\n", "| goal | reached |\n|---|---|\n" + "\n".join(missed()) + "\n"]
    return "\n".join(parts)


def _on(where: str) -> Iterable[str]:
    yield f"## {where}\n"
    for section, makes in SECTIONS.items():
        found = {name: _shown(name) for name in makes}
        rows = [row for name, make in makes.items() if where in found[name] for row in make(found[name][where])]
        if rows:
            head = "| what | stretto | beside | ratio |\n|---|---|---|---|\n"
            yield f"### {section}\n\n{head}" + "\n".join(_said_once(map(str, rows))) + "\n"


def _said_once(rows: Iterable[str]) -> Iterator[str]:
    """Rows of a table, with a repetition sign for the first cells that equal those of the row above."""
    above: list[str] = []
    for row in rows:
        cells = row.split(" | ")
        same = [cell == other for cell, other in zip(cells, above, strict=False)]
        repeated = same.index(False) if False in same else 0
        yield " | ".join(["| ″", *["″"] * (repeated - 1), *cells[repeated:]] if repeated else cells)
        above = cells


def learnt() -> str:
    """The README's sentence about the accuracy that the demo reaches."""
    rows = _latest("loop-learns")["rows"]
    starts, ends, seconds = ([row[key] for row in rows] for key in ("initial_accuracy", "final_accuracy", "rl_seconds"))
    return (
        f"Over {len(rows)} seeds held-out accuracy goes from {span(starts, '.2f')} to {span(ends, '.3f')} "
        f"in {span(seconds, '.0f')} s of reinforcement on {next(iter(measured('loop-learns')))}."
    )


def pretrained() -> str:
    """The text of docs/tutorials/own_model.md about the results of recipes/smollm2.toml."""
    found = _latest("smollm2")
    before, after = ([one["avg"] for one in found[key]] for key in ("before", "after"))
    shown = f"{len(before)} evaluations of {found['before'][0]['samples']} completions"
    return (
        f"Held-out accuracy goes from {span(before, '.2f')} to {span(after, '.2f')} ({shown}; 95% intervals end at "
        f"{found['highest_before']:.2f} before and begin at {found['lowest_after']:.2f} after) in {found['steps']} "
        f"steps, {found['run_seconds'] / 60:.0f} minutes on {next(iter(measured('smollm2')))}, of which other work had "
        f"a part: the run used {found['processor_seconds'] / 60:.0f} processor minutes."
    )


def _generation(model: str, system: str) -> Iterator[Row]:
    """A row for each dtype, with one sequence and with many, which shows where the peer is faster."""
    rates = [row for row in _rates_with(model, "vllm") if row["system"] in ("stretto", system)]
    for dtype in ("float32", "bfloat16"):
        ours, theirs = (
            next(row["rates"] for row in rates if (row["dtype"], row["system"]) == (dtype, one))
            for one in ("stretto", system)
        )
        yield Row(
            f"tokens/s, {model} in {dtype}, one thread, {', '.join(_SHOWN)} sequences",
            ", ".join(f"{ours[count]:,.0f}" for count in _SHOWN),
            f"{PEERS[system]}: {', '.join(f'{theirs[count]:,.0f}' for count in _SHOWN)}",
            "× " + ", ".join(f"{ours[count] / theirs[count]:.1f}" for count in _SHOWN),
        )


def readme() -> list[str]:
    """Rows for the README: ratios, each to its peer."""
    asynchronous = async_sync(_latest("loop-async-sync"))[0]
    synchronous = asynchronous.peer.split(": ")[1].split(";")[0]
    packed = next(row for row in training(_latest("training")) if "padded, 16 rows:" in row.peer)
    rows = [
        Row(
            f"seconds for {_latest('loop-async-sync')['steps']} training steps",
            asynchronous.ours.split(";")[0],
            f"itself, synchronous: {synchronous}",
            asynchronous.ratio.split(" (")[0],
        ),
        *trl(_latest("loop-trl")),
        *_generation("3.4M", "transformers generate"),
        *_generation("3.4M", "vllm"),
        *_generation("48M", "vllm"),
        *_generation("48M", "openvino"),
        Row("trained tokens/s, 3.4M, packed", packed.ours, packed.peer, packed.ratio),
        Row(
            "verdicts/s, mathematics",
            *(getattr(verifier(_latest("verifier"))[0], key) for key in ("ours", "peer", "ratio")),
        ),
    ]
    return [str(row) for row in rows]


if __name__ == "__main__":
    if sys.argv[1:] == ["readme"]:
        print("\n".join([learnt(), *readme()]))
    else:
        print(page(), end="")
