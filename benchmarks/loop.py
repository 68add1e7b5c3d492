"""The whole loop against its alternatives, on this machine, with recipes/arithmetic.toml.

    python -m benchmarks.loop learns         the recipe itself, over five seeds
    python -m benchmarks.loop async-sync     asynchronous (max_staleness 4) against synchronous (0), interleaved
    python -m benchmarks.loop policies       the four beyond_bound policies: seconds to 85 % held-out accuracy
    python -m benchmarks.loop trl            trained trajectories per second against trl's GRPOTrainer
    python -m benchmarks.loop demo           `make demo` after its set-up, with an empty cache
    python -m benchmarks.loop all

The synchronous system is the same code: a batch is generated, its longest answer awaited, then it is trained on. It may
use both cores in both phases, because they never overlap. Of the ways to run either system, the fastest is searched
first, and used.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.peers.environment import HERE as PEERS
from benchmarks.peers.environment import Environment, PeerUnavailable
from benchmarks.report import Table, save
from benchmarks.runs import RECIPE, Run, train
from stretto.launch.recipe.recipe import load_recipe
from stretto.store.run_folder import RunFolder

ASYNCHRONOUS = {
    "every version": ("rollout.max_staleness=4",),
    "at most ten loads a second": ("rollout.max_staleness=4", "engine.load_interval=0.1"),
}
CACHE_KEPT = ("rollout.max_staleness=4", "engine.on_update=keep")
#: As quick as a synchronous run can be: it is not to be repeatable bit for bit.
TOGETHER = ("rollout.max_staleness=0", "engine.batching=shared")
SYNCHRONOUS = {
    "one thread each": TOGETHER,
    "two engines": (*TOGETHER, "engine.count=2"),
    "two trainer threads": (*TOGETHER, "trainer.threads=2"),
    "two threads each": (*TOGETHER, "engine.threads=2", "trainer.threads=2"),
}
TRIAL_STEPS = 60
#: Room for a batch of 32 groups, which the trainer computes in one micro-batch.
LARGER = ("rollout.max_in_flight=40", "engine.slots=320", "trainer.micro_batch_tokens=8192")
#: Ways to run the recipe beside trl, which has as many: groups per batch, and further settings.
BESIDE_TRL = {
    "as in the recipe": (8, ()),
    "asynchronous": (8, ASYNCHRONOUS["at most ten loads a second"]),
    "asynchronous, caches kept": (8, CACHE_KEPT),
    "asynchronous, a larger batch": (32, (*CACHE_KEPT, *LARGER)),
}
PEER_GROUPS = 256  # that trl trains on in each setting; with fewer, the length of their answers is a matter of chance
POLICIES = ("train", "wait", "mask", "expire")
TARGET = 0.85


def facts(run: Run) -> dict[str, Any]:
    """Values of a run for the tables and the JSON."""
    seen = run.inspection
    return {
        "rl_seconds": round(seen.rl_seconds, 2),
        "initial_accuracy": seen.initial_accuracy,
        "final_accuracy": seen.final_accuracy,
        "trained": seen.trajectories.trained,
        "issued": seen.trajectories.issued,
        "filtered": seen.trajectories.filtered,
        "expired": seen.trajectories.expired,
        "trained_per_second": round(run.trained_per_second, 1),
        "tokens": {"generated": seen.tokens.generated, "trained": seen.tokens.trained},
        "recomputed_tokens": seen.tokens.recomputed,
        "staleness_mean": round(seen.staleness.mean, 3),
        "staleness_max": seen.staleness.max,
        "interrupted": seen.interrupted,
        "busy": seen.busy,
    }


def spread(values: Sequence[float]) -> str:
    """``"0.962 ± 0.006"``: mean and standard deviation."""
    deviation = statistics.stdev(values) if len(values) > 1 else 0.0
    return f"{statistics.mean(values):.3f} ± {deviation:.3f}"


def learns(seeds: Sequence[int], steps: int | None) -> dict[str, Any]:
    """The recipe as it is, one seed after the other: accuracy at the start and at the end, and time. `steps`: None: the
    recipe's."""
    extra = [] if steps is None else [f"trainer.steps={steps}"]
    rows: list[dict[str, Any]] = []
    table = Table("seed", "held-out accuracy", "RL seconds", "trained/s", "staleness mean", "largest", "busy")
    for seed in seeds:
        row = {"seed": seed} | facts(train([f"seed={seed}", *extra]))
        rows.append(row)
        table.add(
            seed,
            f"{row['initial_accuracy']:.3f} → {row['final_accuracy']:.3f}",
            f"{row['rl_seconds']:.1f}",
            row["trained_per_second"],
            f"{row['staleness_mean']:.2f}",
            row["staleness_max"],
            busy(row),
        )
        table.show_last()
    return {"final_accuracy": spread([row["final_accuracy"] for row in rows]), "rows": rows}


def async_sync(seeds: Sequence[int], steps: int | None) -> dict[str, Any]:
    """Same recipe, seeds and number of trained trajectories; runs of each kind alternate.

    The asynchronous system runs once with its default, recomputing KV caches after an update, and once keeping them.
    """
    extra = [] if steps is None else [f"trainer.steps={steps}"]
    fast_trials, fastest = _fastest(ASYNCHRONOUS, seeds[0], 5 * TRIAL_STEPS)
    slow_trials, best = _fastest(SYNCHRONOUS, seeds[0], TRIAL_STEPS)
    rows: list[dict[str, Any]] = []
    table = Table(
        "seed", "async s", "cache kept s", "sync s", "ratio", "cache kept", "accuracies", "async busy", "sync busy"
    )
    ways = {"asynchronous": ASYNCHRONOUS[fastest], "cache_kept": CACHE_KEPT, "synchronous": SYNCHRONOUS[best]}
    for seed in seeds:
        found = {name: facts(train([f"seed={seed}", *way, *extra])) for name, way in ways.items()}
        seconds = {name: run["rl_seconds"] for name, run in found.items()}
        ratio, kept = (seconds["synchronous"] / seconds[name] for name in ("asynchronous", "cache_kept"))
        rows.append({"seed": seed, "ratio": round(ratio, 3), "ratio_cache_kept": round(kept, 3)} | found)
        table.add(
            seed,
            *(f"{second:.1f}" for second in seconds.values()),
            f"{ratio:.2f}",
            f"{kept:.2f}",
            ", ".join(f"{run['final_accuracy']:.3f}" for run in found.values()),
            busy(found["asynchronous"]),
            busy(found["synchronous"]),
        )
        table.show_last()
    summary = {
        "asynchronous_trials": fast_trials,
        "asynchronous": fastest,
        "synchronous_trials": slow_trials,
        "synchronous": best,
        "ratio_median": statistics.median(row["ratio"] for row in rows),
        "ratio_cache_kept_median": statistics.median(row["ratio_cache_kept"] for row in rows),
    } | {f"{name}_accuracy": spread([row[name]["final_accuracy"] for row in rows]) for name in ways}
    print(summary)
    return {"steps": steps, "summary": summary, "rows": rows}


def _fastest(kinds: dict[str, tuple[str, ...]], seed: int, steps: int) -> tuple[dict[str, float], str]:
    """Seconds of each way for its steps (the better of two runs), and the name of the fastest."""
    trial = [f"seed={seed}", f"trainer.steps={steps}", "evaluation.prompts=32"]
    seconds = dict.fromkeys(kinds, math.inf)
    for _ in range(2):
        for name, kind in kinds.items():
            seconds[name] = min(seconds[name], round(train([*trial, *kind]).inspection.rl_seconds, 2))
    best = min(seconds, key=lambda name: seconds[name])
    print(f"seconds for {steps} steps: {seconds}; {best!r} is used", flush=True)
    return seconds, best


def busy(run: dict[str, Any]) -> str:
    """``"engine-0 99% trainer 80%"``."""
    return " ".join(f"{role} {fraction:.0%}" for role, fraction in run["busy"].items())


def policies(seeds: Sequence[int], steps: int | None) -> dict[str, Any]:
    """Which policy reaches the target accuracy first in wall time?

    Each seed runs all four policies one after the other, with evaluations during the run, at a constant learning rate.
    Runs end soon after the target.
    """
    extra = ["evaluation.every=15", "trainer.schedule=constant", f"trainer.steps={steps or 270}"]
    rows: list[dict[str, Any]] = []
    table = Table("seed", "beyond_bound", f"s to {TARGET:.0%}", "s in all", "final", "staleness mean", "largest")
    for seed in seeds:
        for policy in POLICIES:
            run = train([f"seed={seed}", f"rollout.beyond_bound={policy}", *extra])
            row = {"seed": seed, "beyond_bound": policy, "seconds_to_target": run.seconds_to(TARGET)} | facts(run)
            rows.append(row)
            reached = row["seconds_to_target"]
            table.add(
                seed,
                policy,
                "not reached" if reached is None else f"{reached:.1f}",
                f"{row['rl_seconds']:.1f}",
                f"{row['final_accuracy']:.3f}",
                f"{row['staleness_mean']:.2f}",
                row["staleness_max"],
            )
            table.show_last()
    summary = {
        policy: {
            "seconds_to_target": [row["seconds_to_target"] for row in rows if row["beyond_bound"] == policy],
            "final_accuracy": spread([row["final_accuracy"] for row in rows if row["beyond_bound"] == policy]),
        }
        for policy in POLICIES
    }
    return {"target": TARGET, "summary": summary, "rows": rows}


def trl(steps: int) -> dict[str, Any]:
    """Trained trajectories per second of trl and of stretto, with the same model, prompts, group size, lengths and
    cores; `steps` of eight groups.

    Neither side filters or evaluates, so all that is generated is trained on. Each side has four settings, the recipe's
    batch and one four times as large among them, which suits trl better. trl runs with one and two threads; its other
    generator ("continuous") was never faster.
    """
    recipe = load_recipe(RECIPE)
    table = Table("system", "groups per batch", "setting", "trained trajectories/s", "tokens per answer")
    ours: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="stretto-benchmark-") as folder:
        for name, (groups, setting) in BESIDE_TRL.items():
            batch = (f"rollout.batch_size={groups}", f"trainer.steps={steps * 8 // groups}")
            words = ("rollout.filter=none", f"evaluation.every={steps}", *batch, *setting)
            run = train(words, keep=Path(folder) / name)
            length = round(statistics.mean(step.length_mean for step in run.steps), 2)
            ours.append({"setting": name, "groups": groups} | facts(run) | {"mean_tokens": length})
            table.add("stretto", groups, name, ours[-1]["trained_per_second"], length)
        model = RunFolder.open(Path(folder) / "as in the recipe").policy(0)
        prompts = Path(folder) / "prompts.jsonl"
        questions = recipe.task.questions(recipe.seed).training[:4096]
        prompts.write_text("".join(json.dumps({"prompt": q.text, "answer": q.answer}) + "\n" for q in questions))
        same = ["--group-size", recipe.rollout.group_size, "--answer-marker", "="]
        same += ["--minibatches", recipe.trainer.minibatches, "--max-tokens", recipe.sampling.max_tokens]
        same += ["--learning-rate", recipe.trainer.learning_rate]
        settings = [(groups, threads) for groups in (recipe.rollout.batch_size, 32) for threads in (2, 1)]
        peers = [_peer(model, prompts, [str(word) for word in same], *setting) for setting in settings]
    for peer in peers:
        rate = peer.get("trajectories_per_second", peer.get("failed"))
        table.add("trl", peer["groups"], f"{peer['threads']} threads", rate, peer.get("mean_tokens", ""))
    table.show()
    best = max(ours, key=lambda one: one["trained_per_second"])
    rates = [peer["trajectories_per_second"] for peer in peers if "trajectories_per_second" in peer]
    ratio = best["trained_per_second"] / max(rates) if rates else None
    print(f"ratio of the best to the best: {ratio}")
    return {"ratio_to_best": ratio, "stretto": best, "stretto_settings": ours, "trl": peers}


def demo() -> dict[str, Any]:
    """Seconds of the command of `make demo`, with an empty cache, to its last line, and what the cores' time went
    into."""
    with tempfile.TemporaryDirectory(prefix="stretto-benchmark-") as folder:
        began = time.perf_counter()
        run = train(
            ["evaluation.goal=0.95"], keep=Path(folder) / "run", surroundings=os.environ | {"STRETTO_CACHE": folder}
        )
        seconds = round(time.perf_counter() - began, 1)
    cores = run.inspection.cores or {}
    share = cores["trained"] / sum(cores.values())
    print(f"{seconds} s to {run.inspection.final_accuracy:.3f}; {share:.1%} of the cores' time in trained tokens")
    return {"seconds": seconds, "share": round(share, 4), "cores": dict(cores)} | facts(run)


def _peer(model: Path, prompts: Path, words: list[str], groups: int, threads: int) -> dict[str, Any]:
    setting = {"groups": groups, "threads": threads}
    words = [*words, "--steps", str(PEER_GROUPS // groups)]
    script = PEERS / "trl_grpo.py"
    try:
        measured = Environment("trl").measure(
            script, str(model), str(prompts), *words, "--groups", str(groups), threads=threads, seconds=300
        )
    except (PeerUnavailable, subprocess.TimeoutExpired) as failure:
        return setting | {"failed": str(failure)[-300:]}
    return setting | measured


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("learns", "async-sync", "policies", "trl", "demo", "all"))
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3, 4, 5])
    parser.add_argument("--steps", type=int, default=None, help="training steps (default: the recipe's)")
    words = parser.parse_args()
    if words.part in ("learns", "all"):
        save("loop-learns", learns(words.seeds, words.steps))
    if words.part in ("async-sync", "all"):
        save("loop-async-sync", async_sync(words.seeds, words.steps))
    if words.part in ("policies", "all"):
        save("loop-policies", policies(words.seeds, words.steps))
    if words.part in ("trl", "all"):
        save("loop-trl", trl(words.steps or 400))
    if words.part in ("demo", "all"):
        save("loop-demo", demo())


if __name__ == "__main__":
    main()
