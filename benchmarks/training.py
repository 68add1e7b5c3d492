"""The training step compared with what a user would write instead, on this machine and with the lengths of a real
run.

    python -m benchmarks.training ways            packed beside padded, and beside the step of trl's GRPOTrainer
    python -m benchmarks.training micro-batches   as few as Algorithm 1 needs, or a fixed count (paper, figure 6a)
    python -m benchmarks.training ceiling         share of the machine's fastest product that a step of 48M reaches
    python -m benchmarks.training records         cost of recording the training status of every token
    python -m benchmarks.training all

All ways have the same model, answers and loss. Each number of threads gets its own process, so that torch has its
threads from the start. The compared ways take turns step by step; trl, in its own environment, runs after each process.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.lengths import FILE
from benchmarks.peers.environment import HERE as PEERS
from benchmarks.peers.environment import Environment, PeerUnavailable
from benchmarks.report import Table, save
from benchmarks.shapes import make
from stretto.launch.recipe.recipe import load_recipe
from stretto.model.hf.build import build_policy
from stretto.processes.spawn import environment

ROOT = PEERS.parent.parent
THREADS = (1, 2)
TRL_ROWS = (64, 16)  # of a forward: the whole batch, or a quarter of it
#: Tokens of a micro-batch at most; the first is the longest sequence that there may be, as in the paper.
CAPACITIES = (192, 512, 1024)
SECONDS = 600


def step(part: str, model: Path, threads: int, *words: object) -> dict[str, Any]:
    """Run `benchmarks.training_steps` in its own process, and return its JSON object."""
    command = [sys.executable, "-m", "benchmarks.training_steps", part, str(model), "--threads", str(threads)]
    done = subprocess.run(
        [*command, *map(str, words)],
        capture_output=True,
        text=True,
        check=False,
        timeout=SECONDS,
        env=environment(threads),
        cwd=ROOT,
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr[-2000:]}")
    measured: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return measured


def ways(models: Path, threads: Sequence[int], steps: int, warm: int) -> list[dict[str, Any]]:
    """Trained tokens per second of each way, with the 3.4M model."""
    model, size = make("3.4M", models), ("--steps", steps, "--warm", warm)
    rows: list[dict[str, Any]] = []
    table = Table("threads", "way", "trained tokens/s", "packed is times as fast")
    for count in threads:
        rates: dict[str, Any] = step("ways", model, count, *size)["rates"]
        for width in TRL_ROWS:
            rates[f"trl, {width} rows"] = _trl(model, count, width, steps, warm)
        for name, rate in rates.items():
            ratio = round(rates["packed"] / rate, 2) if isinstance(rate, float) else None
            rows.append({"threads": count, "way": name, "tokens_per_second": rate, "ratio": ratio})
            table.add(count, name, rate, "" if ratio is None else f"{ratio:.2f}")
            table.show_last()
    return rows


def _trl(model: Path, threads: int, rows: int, steps: int, warm: int) -> float | str:
    """Trained tokens per second of trl, or the reason why there are none."""
    words = [str(model), str(FILE), "--rows", str(rows), "--steps", str(steps), "--warm", str(warm)]
    try:
        measured = Environment("trl").measure(PEERS / "trl_step.py", *words, threads=threads, seconds=SECONDS)
    except (PeerUnavailable, subprocess.TimeoutExpired) as failure:
        return str(failure)[-300:]
    return float(measured["tokens_per_second"])


def best(rows: Sequence[dict[str, Any]], threads: int, kind: str) -> float | None:
    """Smallest speed-up of packed steps over the ways of that `kind`, with this number of threads; None if none was
    measured.

    Ways that sort rows by length do not count, because transformers' `Trainer` sorts only if asked to; their ratio is
    shown beside the others.
    """
    ratios = [
        row["ratio"]
        for row in rows
        if row["threads"] == threads and row["way"].startswith(kind) and "length" not in row["way"] and row["ratio"]
    ]
    return min(ratios, default=None)


def of_recipe(models: Path) -> Path:
    """Build the model of recipes/arithmetic.toml."""
    recipe = load_recipe(ROOT / "recipes" / "arithmetic.toml").model.build
    assert recipe is not None
    if not (path := models / "recipe").exists():
        build_policy(recipe, path, seed=1)
    return path


def records(models: Path, steps: int, warm: int) -> list[dict[str, Any]]:
    """Cost of recording tokens, with one thread. The recipe's model computes almost nothing per token: the worst
    case."""
    rows = []
    table = Table("model", "trained tokens of a step", "step, processor s", "with records", "cost", "bytes per token")
    for name, model, count in (("the recipe's", of_recipe(models), 10 * steps), ("3.4M", make("3.4M", models), steps)):
        seen = step("records", model, 1, "--steps", count, "--warm", warm)
        rows.append({"model": name} | seen)
        without, recorded = seen["processor_seconds"].values()
        table.add(name, seen["tokens_per_step"], without, recorded, f"{seen['cost']:+.1%}", seen["bytes_per_token"])
        table.show_last()
    return rows


def allocations(models: Path, steps: int, warm: int) -> list[dict[str, Any]]:
    """Dynamic micro-batches compared with fixed ones, on one thread.

    The models are the recipe's, whose steps are short and whose products are set up again for each new length, and one
    of 3.4M parameters.
    """
    rows = []
    table = Table("model", "tokens at most", "dynamic", "fixed", "dynamic tokens/s", "fixed tokens/s", "gain")
    kinds = (
        ("the recipe's", of_recipe(models), ("--steps", 2 * steps, "--warm", 4 * warm)),
        ("3.4M", make("3.4M", models), ("--steps", steps, "--warm", warm)),
    )
    for name, model, size in kinds:
        for capacity in CAPACITIES:
            seen = step("micro-batches", model, 1, "--capacity", capacity, *size)
            gain = round(seen["rates"]["dynamic"] / seen["rates"]["fixed"] - 1, 3)
            rows.append({"model": name, "gain": gain} | seen)
            rates = seen["rates"]
            table.add(name, capacity, seen["dynamic"], seen["fixed"], rates["dynamic"], rates["fixed"], f"{gain:+.0%}")
            table.show_last()
    print(f"mean gain: {fmean(row['gain'] for row in rows):+.0%}")
    return rows


def ceilings(models: Path, threads: Sequence[int], steps: int, warm: int) -> list[dict[str, Any]]:
    """Share of the machine's fastest product that a training step of the 48M model reaches."""
    model = make("48M", models)
    rows = []
    table = Table("type", "threads", "ceiling GFLOP/s", "step GFLOP/s", "fraction", "tokens/s", "bytes per token")
    for dtype in ("float32", "bfloat16"):
        for count in threads:
            seen = step("ceiling", model, count, "--dtype", dtype, "--steps", steps, "--warm", warm)
            rows.append(seen)
            table.add(
                dtype,
                count,
                seen["ceiling_gflops"],
                seen["gflops"],
                seen["fraction"],
                seen["tokens_per_second"],
                seen["bytes_per_token"],
            )
            table.show_last()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("ways", "micro-batches", "ceiling", "records", "all"))
    parser.add_argument("--threads", type=int, nargs="+", default=list(THREADS))
    parser.add_argument("--steps", type=int, default=8, help="steps that are measured")
    parser.add_argument("--warm", type=int, default=2, help="steps before them that are not")
    words = parser.parse_args()
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="stretto-benchmark-") as folder:
        models = Path(folder)
        if words.part in ("ways", "all"):
            rows = ways(models, words.threads, words.steps, words.warm)
            results["ways"] = rows
            results["ratios"] = {
                f"{kind}, {count} threads": best(rows, count, kind)
                for count in words.threads
                for kind in ("padded", "trl")
            }
            print(results["ratios"])
        if words.part in ("micro-batches", "all"):
            results["micro_batches"] = allocations(models, words.steps, words.warm)
        if words.part in ("records", "all"):
            results["records"] = records(models, 2 * words.steps, words.warm)
        if words.part in ("ceiling", "all"):
            results["ceiling"] = ceilings(models, words.threads, max(1, words.steps // 4), 1)
    save("training" if words.part == "all" else f"training-{words.part}", results)


if __name__ == "__main__":
    main()
